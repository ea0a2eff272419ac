"""The live fuzz against a real HTTP server that misbehaves: its complaints, and that
a worker's death is found with the requests that were open then."""

import asyncio
import json
import subprocess
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kappa_benchmarks.faults import fuzz as fuzzing
from kappa_benchmarks.faults.bodies import CHAT
from kappa_benchmarks.faults.cluster import key_of
from kappa_benchmarks.faults.fuzz import FuzzPlan, complaint_of, fuzz
from kappa_benchmarks.faults.traffic import Beside, Observed
from tests.benchmarks.faults.test_bodies import SCHEMAS

REFUSAL = {"error": {"message": "no", "type": "bad", "param": None, "code": "invalid"}}
CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
HONEST = key_of("honest")


class Endpoint:
    """Streams to the honest client; answers others by `hostile(request)`."""

    def __init__(self, hostile):
        self._hostile = hostile

    async def answer(self, request):
        await request.read()
        if request.headers.get("authorization") != HONEST["authorization"]:
            return self._hostile(request)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CHUNK + b"data: [DONE]\n\n")
        return response


class FakeTarget:
    """A target with one worker, which is a process of ours."""

    model = "m"

    def __init__(self, url, pid):
        self.url, self._pid, self.left = url, pid, 0
        self.family = self

    def nodes(self):
        return [{"worker": "w"}]

    def pid(self, _worker):
        return self._pid

    def of_role(self, _role):
        return []

    def below(self, _pid):
        return []

    def reservations(self):
        return self.left

    def until(self, question, _patience_s):
        return question()


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fuzzing, "_IDLE_S", 0.2)
    monkeypatch.setattr(fuzzing, "_LOOK_S", 0.1)


async def fuzzed(hostile, process, count=60, left=0):
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", Endpoint(hostile).answer)
    async with TestServer(app) as server:
        target = FakeTarget(str(server.make_url("")).rstrip("/"), process.pid)
        target.left = left
        return await fuzz(target, FuzzPlan(count, 5, SCHEMAS, at_once=4, bound_s=10.0))


def refuse(_request):
    return web.json_response(REFUSAL, status=400)


async def test_a_cluster_that_refuses_everything_keeps_its_promises(process):
    done = await fuzzed(refuse, process)
    assert done.requests == 60 and done.wrong_total == 0 and done.deaths == ()
    assert done.statuses["400"] > 50
    assert done.honest.failed == {} and done.honest.requests >= 1 and done.idle.requests >= 1
    # Whether the honest client waited depends on this machine; nothing else may be broken.
    assert all("honest client waited" in words for words in done.broken())
    assert "60 requests" in done.summary()
    assert json.loads(json.dumps(done.to_dict()))["fields"] == len(SCHEMAS[CHAT]["properties"])


async def test_what_is_wrong_is_shown_with_its_request(process):
    done = await fuzzed(lambda _: web.Response(status=500, text="oops"), process, left=2)
    assert done.wrong_total == 60 and len(done.wrong) == 20
    assert done.wrong[0].startswith("500 oops: ") and "/v1/" in done.wrong[0]
    assert {"60 answers were wrong", "2 reservations are left"} <= set(done.broken())


async def test_a_dead_worker_is_found_with_the_requests_of_that_moment(process, monkeypatch):
    async def slowly(question):
        await asyncio.sleep(0.5)  # longer than all requests take
        return question()

    monkeypatch.setattr(fuzzing, "aside", slowly)

    def kill(request):
        process.kill()
        process.wait()
        return refuse(request)

    done = await fuzzed(kill, process)
    assert done.deaths[0].lost == (f"w {process.pid}",)
    assert any("/v1/" in suspect for suspect in done.deaths[0].suspects)
    assert any("processes died" in words for words in done.broken())


@pytest.mark.parametrize(
    ("status", "text", "wrong"),
    [
        (200, "{}", False),
        (400, json.dumps(REFUSAL), False),
        (400, '{"detail": "x"}', True),
        (422, "not JSON", True),
        (503, json.dumps({"error": {**REFUSAL["error"], "message": ""}}), True),
        (500, json.dumps(REFUSAL), True),
        (200, f"data: {json.dumps(REFUSAL)}\n\n", False),
        (200, 'data: {"choices": []}\n\ndata: {"error": "x"}\n\n', True),
    ],
)
def test_only_refusals_in_openai_shape_are_right(status, text, wrong):
    assert bool(complaint_of(status, text)) == wrong


def seen(taken_s, first_s, ok=True):
    return Observed(10.0, 10.0 + first_s, 10.0 + taken_s, 200 if ok else 429, True, ok, error="x")


def test_a_clients_times_are_quantiles_of_what_was_answered():
    # Ends after 1, 2, 3 s, first tokens after 0.1, 0.2, 0.9 s; a refusal has no time.
    requests = [seen(1.0, 0.1), seen(2.0, 0.2), seen(3.0, 0.9), seen(0.0, 0.0, ok=False)]
    whole = Beside.of(requests, first_token=False)
    assert (whole.p50_s, whole.max_s) == pytest.approx((2.0, 3.0))
    assert Beside.of(requests, first_token=True).p50_s == pytest.approx(0.2)
    assert whole.failed == {"x": 1} and whole.requests == 4
