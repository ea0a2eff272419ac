"""What the ingress does when workers are missing, die, fail or stall, and when clients leave.

Ray's delivery is replaced by a script (fault injection); routing, limits and HTTP are real.
"""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from ray.exceptions import RayActorError

import router.live
from kappa.hardware import node_profile
from kappa.report import Announcement
from kappa.step import StepModel
from router.admission import Admission
from router.board import Board
from router.http_app import make_app
from router.ingress import PIN_HEADER, IngressSettings, KappaIngress
from router.rendering import PromptRenderer
from workers.tiny_model import make_tiny_model

pytestmark = pytest.mark.ray

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PATH = "/v1/chat/completions"
_PATIENCE_S = 30.0


def event(text):
    choice = {"index": 0, "delta": {"content": text}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


class Scripted(KappaIngress):
    """The ingress with a script in place of Ray's delivery; `script(worker)` yields its items."""

    def __init__(self, renderer, script, **changes):
        values = {
            "tokenizer_source": "", "policy": "ttft", "index_blocks": 1000, "max_queue": 8,
            "stale_after_s": 1e9, "calibrate": False, "calibrate_requests": None,
            "request_timeout_s": 60.0, "secret": "s",
        }  # fmt: skip
        known = set(IngressSettings.__dataclass_fields__)
        self._settings = IngressSettings(**{"record": None} | values | changes) if (
            "record" in known
        ) else IngressSettings(**values | changes)  # fmt: skip
        self._live_router, self._renderer, self._threads = None, renderer, None
        self._default_serve_handles = {"m": SimpleNamespace(llm_config=None)}
        self._script, self.sent, self.closed = script, [], 0

    async def _wake_router(self):
        return

    async def _get_response(self, *, body, call_method, raw_request=None):
        worker = raw_request.headers[PIN_HEADER]
        self.sent.append(worker)
        try:
            async for item in self._script(worker):
                yield item
        finally:
            self.closed += 1


def announcement(worker):
    return Announcement(
        worker=worker, model="m", node=replace(node_profile("pcie"), name=worker),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=100, host_blocks=0, max_batch_tokens=512,
        max_context_tokens=1024, events_endpoint="tcp://127.0.0.1:9",
        snapshot_endpoint="tcp://127.0.0.1:9",
    ).to_dict()  # fmt: skip


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))


@pytest.fixture
async def serve(renderer, monkeypatch):
    board = Board()
    monkeypatch.setattr(router.live, "BOARD", board)

    async def make(script, workers=("a", "b"), **changes):
        ingress = Scripted(renderer, script, **changes)
        app = make_app(1 << 20)
        app.post(PATH)(ingress.chat)
        live = ingress._live()
        board.post("d", {worker: announcement(worker) for worker in workers})
        async with asyncio.timeout(_PATIENCE_S):
            while len(live.router.state.workers) < len(workers):
                await asyncio.sleep(0.01)
        return ingress, live, app

    yield make
    board.post("d", {})
    await asyncio.sleep(0.05)


async def post(app, **changes):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, json=BODY | changes)


def code(answer):
    return answer.json()["error"]["code"]


async def words(_worker):
    yield [event("one")]
    yield [event("two"), event("three")]


async def test_a_stream_is_relayed_and_released(serve):
    ingress, live, app = await serve(words)
    answer = await post(app, stream=True)
    assert answer.status_code == 200
    assert answer.text == event("one") + event("two") + event("three") + "data: [DONE]\n\n"
    assert answer.headers["x-kappa-node"] in ("a", "b")
    (record,) = live.records.values()
    assert (record.end, live.router.reservations, ingress.closed) == ("done", 0, 1)


async def test_without_workers_it_is_503_with_a_time_to_come_back(serve):
    _, live, app = await serve(words, workers=())
    answer = await post(app)
    assert (answer.status_code, code(answer)) == (503, "no_worker")
    assert int(answer.headers["retry-after"]) >= 1
    assert live.router.reservations == 0


async def test_with_admission_what_would_start_too_late_is_refused(serve):
    _, live, app = await serve(words, admission=True)
    assert (await post(app, stream=True)).status_code == 200
    strict = Admission(floor_s=0.0, ttft_factor=0.0)
    live.router.config = replace(live.router.config, admission=strict)
    answer = await post(app)
    assert (answer.status_code, code(answer)) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert live.router.reservations == 0


async def test_a_worker_that_dies_first_is_replaced_by_another(serve):
    async def script(worker):
        if len(ingress.sent) == 1:
            raise RayActorError
        yield [event(worker)]

    ingress, live, app = await serve(script)
    answer = await post(app, stream=True)
    assert answer.status_code == 200
    assert len(set(ingress.sent)) == 2
    assert answer.headers["x-kappa-node"] == ingress.sent[1]
    assert live.router.reservations == 0


async def test_two_dying_workers_are_503(serve):
    async def script(_worker):
        raise RayActorError
        yield

    ingress, live, app = await serve(script)
    answer = await post(app, stream=True)
    assert (answer.status_code, code(answer)) == (503, "no_worker")
    assert sorted(ingress.sent) == ["a", "b"]
    assert live.router.reservations == 0


async def test_an_engine_that_fails_is_500_without_details(serve):
    async def script(_worker):
        raise RuntimeError("secret detail")
        yield

    _, live, app = await serve(script)
    answer = await post(app)
    assert (answer.status_code, code(answer)) == (500, "engine")
    assert "secret" not in answer.text
    assert live.router.reservations == 0


async def test_an_engine_that_stalls_is_504(serve):
    async def script(_worker):
        await asyncio.sleep(600)
        yield

    _, live, app = await serve(script, request_timeout_s=0.05)
    answer = await post(app)
    assert (answer.status_code, code(answer)) == (504, "timeout")
    assert live.router.reservations == 0


async def test_a_stream_that_breaks_ends_with_an_error_event(serve):
    async def script(_worker):
        yield [event("one")]
        raise RuntimeError("secret detail")

    _, live, app = await serve(script)
    answer = await post(app, stream=True)
    events = [e for e in answer.text.split("\n\n") if e]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine"
    assert "secret" not in answer.text and "[DONE]" not in answer.text
    (record,) = live.records.values()
    assert (record.end, live.router.reservations) == ("error", 0)


async def test_no_more_than_the_limit_are_let_in_however_they_arrive(serve):
    gate = asyncio.Event()

    async def script(_worker):
        await gate.wait()
        yield [event("late")]

    _, live, app = await serve(script)
    posts = [asyncio.create_task(post(app, stream=True)) for _ in range(20)]
    async with asyncio.timeout(_PATIENCE_S):
        while sum(task.done() for task in posts) < 12:
            await asyncio.sleep(0.01)
    gate.set()
    answers = [await task for task in posts]
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(429)) == (8, 12)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert code(refused) == "queue_full" and int(refused.headers["retry-after"]) >= 1
    assert live.router.reservations == 0


@pytest.mark.parametrize("leaves_after", [0, 1, 2])
async def test_a_client_that_leaves_at_any_moment_frees_its_reservation(serve, leaves_after):
    async def script(_worker):
        for number in range(1000):
            yield [event(str(number))]
            await asyncio.sleep(0.001)

    ingress, live, app = await serve(script)
    sent = []
    gone = asyncio.Event()
    if not leaves_after:
        gone.set()
    text = json.dumps(BODY | {"stream": True}).encode()
    read = False

    async def receive():
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": text, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0.01)  # as a socket may: others run meanwhile
        sent.append(message)
        if len(sent) >= leaves_after:
            gone.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "server": ("test", 80), "client": ("c", 1),
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    async with asyncio.timeout(_PATIENCE_S):
        await app(scope, receive, send)
    assert live.router.reservations == 0
    assert ingress.closed == len(ingress.sent) == 1
    (record,) = live.records.values()
    assert record.end == "client_gone"
