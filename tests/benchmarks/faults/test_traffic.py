"""What clients note of good and bad answers, over real HTTP; and how many are open at once."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kappa_benchmarks.faults.cluster import FaultsError
from kappa_benchmarks.faults.storm import KillPlan, kill_workers, open_streams
from kappa_benchmarks.faults.traffic import Mix, Traffic

CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": "no_worker"}}


class Endpoint:
    """Answers as `mode` says, and counts."""

    def __init__(self):
        self.mode, self.bodies, self.open, self.most_open = "fine", [], 0, 0
        self.gate = asyncio.Event()

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.mode == "refuse":
            return web.json_response(ERROR, status=503)
        if self.mode == "nonsense":
            return web.Response(text="<html>", status=500)
        if not body["stream"]:
            return web.json_response({"choices": []}, headers={"x-kappa-node": "a"})
        answer = web.StreamResponse(headers={"x-kappa-node": "a"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        if self.mode == "wait":
            await self.gate.wait()
        self.open -= 1
        if self.mode == "cut":
            request.transport.close()
            return answer
        end = b"data: [DONE]\n\n" if self.mode != "tell" else b"data: " + json.dumps(ERROR).encode()
        await answer.write(end + b"\n\n")
        return answer


@pytest.fixture
async def served():
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    async with TestServer(app) as server:
        yield endpoint, str(server.make_url("")).rstrip("/")
        endpoint.gate.set()


QUIET = Mix(clients=0, documents=4, words=20)


@pytest.mark.parametrize(
    ("mode", "streamed", "ok", "begun", "error"),
    [
        ("fine", False, True, True, ""),
        ("fine", True, True, True, ""),
        ("refuse", False, False, True, "503 no_worker"),
        ("refuse", True, False, True, "503 no_worker"),
        ("nonsense", False, False, True, "500 in another shape"),
        ("tell", True, False, True, "error event"),
        ("cut", True, False, True, "ClientPayloadError"),
    ],
)
async def test_each_kind_of_answer_is_noted_as_what_it_is(served, mode, streamed, ok, begun, error):
    endpoint, url = served
    endpoint.mode = mode
    async with Traffic(url, "m", QUIET, 0) as traffic:
        seen = await traffic.ask(0, streamed)
    noted = (seen.ok, seen.first_s is not None, seen.error)
    assert noted == (ok, begun, error)


async def test_nobody_there_is_noted_too():
    async with Traffic("http://127.0.0.1:9", "m", QUIET, 0) as traffic:
        seen = await traffic.ask(0, False)
    assert not seen.ok and seen.status == 0 and seen.error == "ClientConnectorError"


async def test_clients_send_what_the_seed_says_until_they_settle(served):
    endpoint, url = served
    sent = []
    for _ in range(2):
        endpoint.bodies = []
        async with Traffic(url, "m", Mix(clients=1, documents=4, words=20), 7) as traffic:
            while len(endpoint.bodies) < 20:
                await asyncio.sleep(0.005)
        assert len(traffic.seen) == len(endpoint.bodies)
        sent.append([(b["stream"], b["messages"][0]["content"]) for b in endpoint.bodies[:20]])
    assert sent[0] == sent[1]
    assert {stream for stream, _ in sent[0]} == {True, False}


async def test_clients_never_stop_sending_prompts_without_a_cache(served):
    """Else an engine has stored everything after a moment, and publishes no event to be lost."""
    endpoint, url = served
    async with Traffic(url, "m", Mix(clients=2, documents=4, words=20), 3):
        while len(endpoint.bodies) < 200:
            await asyncio.sleep(0.005)
    sent = [body["messages"][0]["content"] for body in endpoint.bodies[:200]]
    late = [text for i, text in enumerate(sent) if i >= 100 and text not in sent[:i]]
    assert len(late) > 5
    assert len(set(sent)) < 100, "most repeat"


class Rows:
    """A target without a cluster: rows, and nothing reserved."""

    def __init__(self, url, rows=()):
        self.url, self.model, self.headers, self._rows = url, "m", {}, list(rows)
        self.family = self

    def nodes(self):
        return self._rows

    def strays(self):
        return []

    def reservations(self):
        return 0

    def until(self, question, patience_s):
        return question()


async def test_many_streams_are_open_all_at_once(served):
    endpoint, url = served
    endpoint.mode = "wait"
    run = asyncio.create_task(open_streams(Rows(url), 50, QUIET, 0))
    async with asyncio.timeout(20):
        while endpoint.most_open < 50:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # each client reads its first line
    endpoint.gate.set()
    seen = await run
    assert (seen.streams, seen.failed, seen.most_open) == (50, 0, 50)


async def test_killing_needs_somebody_who_takes_over(served):
    _, url = served
    with pytest.raises(FaultsError, match="needs two"):
        await kill_workers(Rows(url, [{"node": "a"}]), KillPlan(10, 1), QUIET, 0, print)


async def test_streams_that_were_refused_were_neither_open_nor_quick(served):
    endpoint, url = served
    endpoint.mode = "refuse"
    seen = await open_streams(Rows(url), 5, QUIET, 0)
    assert (seen.failed, seen.most_open, seen.ttft_p99_s) == (5, 0, 0.0)
