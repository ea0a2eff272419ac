"""What one tenant sends does not keep another's small request from its answer."""

import asyncio
import threading

import pytest

from router.api.tokenizing import SHORT_BYTES
from tests.router.scripted import event
from tests.router.stream_worker import until
from tests.router.test_ingress_terms import DEADLINE, ask, cluster, code, renderer, words

pytestmark = pytest.mark.ray
__all__ = ["cluster", "renderer"]

LONG = [{"role": "user", "content": "a " * SHORT_BYTES}]


class Blocked:
    """The ingress' tokenizers, which answer nothing until they are let."""

    def __init__(self, here, monkeypatch):
        self.begun, self.let = 0, threading.Event()
        tokenizing = here.ingress._path._tokenizing
        self._tokens = tokenizing._renderer.tokenizer.tokens
        monkeypatch.setattr(tokenizing._renderer.tokenizer, "tokens", self._wait)
        monkeypatch.setattr(tokenizing._process, "tokens", self._wait)

    def _wait(self, plain, most_tokens=None):
        self.begun += 1
        assert self.let.wait(30)
        return self._tokens(plain, most_tokens)


@pytest.fixture
def blocked(monkeypatch):
    made = []

    def make(here):
        made.append(Blocked(here, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.let.set()


def held(here):
    return len(here.ingress._path._places)


async def test_a_tenant_that_fills_the_queue_leaves_others_their_share(cluster):
    gate = asyncio.Event()

    async def script(_worker):
        yield [event("x")]
        await gate.wait()

    async with cluster(script, max_queue=4) as here:
        tasks = [asyncio.create_task(ask(here, "alice")) for _ in range(4)]
        await until(lambda: here.live.router.reservations == 4)
        assert code(await ask(here, "alice"), 429) == "queue_full"
        # Of two active tenants each has a share of 4 / 2.
        tasks += [asyncio.create_task(ask(here, "bob")) for _ in range(2)]
        await until(lambda: here.live.router.reservations == 6)
        assert code(await ask(here, "bob"), 429) == "queue_full"
        gate.set()
        assert [a.status_code for a in await asyncio.gather(*tasks)] == [200] * 6
        assert held(here) == 0


async def test_what_is_tokenized_counts_for_max_queue(cluster, blocked):
    async with cluster(words, max_queue=2) as here:
        tokenizers = blocked(here)
        tasks = [
            asyncio.create_task(ask(here, path=path))
            for path in ("/v1/chat/completions", "/v1/route")
        ]
        await until(lambda: held(here) == 2)
        for path in ("/v1/chat/completions", "/v1/route"):
            assert code(await ask(here, path=path), 429) == "queue_full"
        tokenizers.let.set()
        assert [a.status_code for a in await asyncio.gather(*tasks)] == [200, 200]
        assert held(here) == 0


async def test_a_small_request_does_not_wait_for_another_tenants_long_prompts(cluster, blocked):
    async with cluster(words) as here:
        tokenizers = blocked(here)
        flood = [asyncio.create_task(ask(here, "alice", messages=LONG)) for _ in range(3)]
        await until(lambda: tokenizers.begun == 1)
        small = asyncio.create_task(ask(here, "bob"))
        # Its own lane has begun it while the first long one still runs.
        await until(lambda: tokenizers.begun == 2)
        assert not small.done() and not any(task.done() for task in flood)
        tokenizers.let.set()
        assert (await small).status_code == 200
        for answer in await asyncio.gather(*flood):
            assert code(answer, 400) == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/route"])
@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_deadline_is_kept_while_tokenizing_is_busy(cluster, blocked, path, waiting):
    async with cluster(words) as here:
        tokenizers = blocked(here)
        others = [asyncio.create_task(ask(here, "alice")) for _ in range(waiting)]
        await until(lambda: tokenizers.begun == waiting)
        late = await ask(here, "bob", path=path, headers={DEADLINE: "50"})
        assert code(late, 504) == "deadline_exceeded"
        assert not any(task.done() for task in others)
        tokenizers.let.set()
        assert [a.status_code for a in await asyncio.gather(*others)] == [200] * waiting
        assert held(here) == 0


async def test_waiting_to_be_tokenized_has_a_bound_without_a_deadline(cluster, blocked):
    async with cluster(words, request_timeout_s=0.05) as here:
        blocked(here)
        answer = await ask(here, "bob")
        assert code(answer, 504) == "timeout" and "not tokenized" in answer.text
