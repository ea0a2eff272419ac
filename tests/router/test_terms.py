"""What a client may not dodge: token limits, by whatever shape or end its request takes.

Ray's delivery is replaced by a script, as in test_ingress; everything else is real.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from router.api.app import Access, make_app
from router.api.limits import Allowance
from tests.router.scripted import BODY, PATH, code, event, until, words

pytestmark = pytest.mark.ray

TEXTS = "/v1/completions"
A_MINUTE = 200
# The tiny tokenizer makes a token or more of each word.
LONG = {"messages": [{"role": "user", "content": "hello " * 120}], "max_tokens": 4}


async def never(_worker):
    await asyncio.Event().wait()
    yield


@asynccontextmanager
async def limited(serve, script=words, tokens_per_minute=A_MINUTE, **changes):
    """(ingress, live router, client) where everybody has so many tokens a minute."""
    ingress, live, _ = await serve(script, **changes)
    app = make_app(Access(default_allowance=Allowance(tokens_per_minute=tokens_per_minute)))
    app.post(PATH)(ingress.chat)
    app.post(TEXTS)(ingress.completions)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield ingress, live, client


async def left(client):
    """Tokens that a small request finds left, itself taken off."""
    answer = await client.post(PATH, json=BODY | {"stream": True})
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (PATH, {**BODY, "max_tokens": 60, "n": 4}),
        (TEXTS, {"model": "m", "prompt": ["a", "b", "c", "d"], "max_tokens": 60}),
        (TEXTS, {"model": "m", "prompt": [[1, 2], [3, 4]], "n": 2, "max_tokens": 60}),
    ],
)
async def test_every_answer_that_is_asked_for_counts(serve, path, asked):
    async with limited(serve) as (ingress, live, client):
        answer = await client.post(path, json=asked)
        assert (answer.status_code, code(answer)) == (400, "request_over_limit")
        assert ingress.sent == [] and live.router.reservations == 0


async def test_prompts_that_come_in_pieces_count_like_others(serve):
    asked = {"model": "m", "prompt": ["hello " * 400, "b"], "max_tokens": 1}

    async def pieces():
        yield json.dumps(asked).encode()

    async with limited(serve) as (ingress, _, client):
        whole = await client.post(TEXTS, json=asked)
        kind = {"content-type": "application/json"}
        chunked = await client.post(TEXTS, content=pieces(), headers=kind)
        assert "content-length" not in chunked.request.headers
        assert code(whole) == code(chunked) == "request_over_limit"
        assert ingress.sent == []


async def test_tokens_are_limited_where_rays_own_router_steers_too(serve):
    async with limited(serve, mode="ray") as (ingress, _, client):
        sent = []

        async def call(body, method, headers):
            sent.append(body)
            yield [event("one")]

        ingress._path._delivery._call = call
        for _ in range(2):
            answer = await client.post(PATH, json=BODY | {"stream": True, "max_tokens": 150})
            assert answer.status_code == 200
        over = await client.post(PATH, json=BODY | {"stream": True, "max_tokens": A_MINUTE})
        assert over.status_code in (400, 429) and len(sent) == 2


async def test_a_client_that_hangs_up_pays_for_the_prompt_that_was_computed(serve):
    async with limited(serve, never) as (ingress, live, client):
        asking = asyncio.create_task(client.post(PATH, json={**BODY, **LONG}))
        await until(lambda: ingress.sent)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert live.router.reservations == 0
        ingress._script = words
        assert await left(client) < A_MINUTE - 60


async def test_a_client_whose_deadline_passed_in_the_engine_pays_for_its_prompt(serve):
    async with limited(serve, never) as (ingress, _, client):
        late = await client.post(
            PATH, json={**BODY, **LONG}, headers={"x-kappa-deadline-ms": "900"}
        )
        assert (late.status_code, code(late)) == (504, "deadline_exceeded")
        assert len(ingress.sent) == 1
        ingress._script = words
        assert await left(client) < A_MINUTE - 60


async def test_a_request_that_an_engine_failed_pays_nothing(serve):
    async def fails(_worker):
        raise RuntimeError("broken")
        yield

    async with limited(serve, fails) as (ingress, _, client):
        assert (await client.post(PATH, json={**BODY, **LONG})).status_code == 500
        ingress._script = words
        assert await left(client) > A_MINUTE - 40


async def test_asking_for_what_a_worker_lacks_does_not_open_its_breaker(serve):
    async with limited(serve) as (ingress, live, client):
        for _ in range(20):
            answer = await client.post(PATH, json=BODY, headers={"x-kappa-plan": "load"})
            assert (answer.status_code, code(answer)) == (400, "no_load_plans")
        states = [live.members.breakers.state(w, live.now_s()) for w in ("a", "b")]
        assert [(s.standing, s.failures) for s in states] == [("closed", 0)] * 2
        assert ingress.sent == [] and live.router.reservations == 0
