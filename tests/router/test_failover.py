"""A worker that fails: its requests go elsewhere or end with an error, and it is left alone.

Ray's delivery is a script; who is there, breakers, retries and HTTP are real.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

import router.api.deliver
import router.api.endpoints
import router.api.request_path
from kappa.keys import digest_of
from kappa.protocol import EngineDiedError, WorkerReport
from kappa.settings.routing import FailoverSettings
from router.api.tenants import Tenants
from router.decision import RouteRequest
from router.live.replica_registry import PinGoneError
from tests.router.scripted import announcement, code, event, get, post, until, words

pytestmark = pytest.mark.ray

LONG_PAUSE_S = 1000.0
SLOW = FailoverSettings(failures=2, pause_s=LONG_PAUSE_S, longest_pause_s=LONG_PAUSE_S)
SOON = FailoverSettings(stall_after_s=0.5, failures=2, pause_s=0.05, longest_pause_s=0.1)


def failing_first(error, then=words):
    """A script in which the first worker that is asked raises `error`, before any item."""
    asked = []

    async def script(worker):
        asked.append(worker)
        if len(asked) == 1:
            raise error
        async for item in then(worker):
            yield item

    return script


async def whole(_worker):
    content = {"choices": [{"message": {"content": "hello"}}]}
    usage = SimpleNamespace(completion_tokens=1)
    yield SimpleNamespace(usage=usage, model_dump_json=lambda: json.dumps(content))


def busy(live):
    """Others were in each engine a moment ago, so that nobody is alone there."""
    for worker in live.router.workers:
        live.suspects.ended(worker, live.now_s())


def error_event(status):
    told = {"message": "secret detail", "type": "t", "param": None, "code": status}
    return f"data: {json.dumps({'error': told})}\n\n"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ActorDiedError(), "died"),
        (EngineDiedError("w"), "engine_died"),
        (PinGoneError("w"), "left"),
        (RuntimeError("secret"), "error"),
    ],
)
async def test_a_request_that_its_worker_failed_is_served_by_another(serve, error, why, stream):
    ingress, live, app = await serve(failing_first(error, words if stream else whole))
    busy(live)
    answer = await post(app, stream=stream)
    assert answer.status_code == 200 and len(set(ingress.sent)) == 2
    assert answer.headers["x-kappa-node"] == ingress.sent[1]
    (record,) = live.records.values()
    assert (record.end, record.attempt) == ("done", 1)
    assert live.router.reservations == 0 and len(live.members.waits) == 0
    assert ingress.closed == 2
    line = f'kappa_retries_total{{node="{ingress.sent[0]}",why="{why}"}} 1.0'
    assert line in (await get(app, "/metrics")).text


async def test_a_stream_that_begins_with_an_engines_failure_is_tried_elsewhere(serve):
    async def script(worker):
        yield [error_event(500)] if len(ingress.sent) == 1 else [event(worker)]

    ingress, live, app = await serve(script)
    answer = await post(app, stream=True)
    assert answer.status_code == 200 and answer.text.startswith(event(ingress.sent[1]))
    assert live.router.reservations == 0


async def test_a_stream_that_begins_with_a_refusal_is_refused_with_its_status(serve):
    async def script(_worker):
        yield [error_event(400)]

    ingress, live, app = await serve(script)
    answer = await post(app, stream=True)
    assert answer.status_code == 400 and len(ingress.sent) == 1
    assert live.members.breakers.state(ingress.sent[0], 0.0).failures == 0


async def test_an_engines_failure_inside_a_stream_ends_it_in_our_words(serve):
    async def script(_worker):
        yield [event("one")]
        yield [event("two"), error_event(500), "data: [DONE]\n\n"]

    _, live, app = await serve(script)
    events = [e for e in (await post(app, stream=True)).text.split("\n\n") if e]
    assert [*events[:2]] == [event("one").strip(), event("two").strip()]
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "engine"
    assert len(events) == 3 and "secret" not in "".join(events)
    (record,) = live.records.values()
    assert (record.end, live.router.reservations) == ("error", 0)


async def test_the_last_workers_failure_is_told_where_nobody_else_is_left(serve):
    _, live, app = await serve(failing_first(RuntimeError("secret")), workers=("a",))
    answer = await post(app, stream=True)
    assert (answer.status_code, code(answer)) == (500, "engine")
    assert live.router.reservations == 0


async def test_a_worker_that_fails_again_and_again_is_left_alone_then_tried_and_taken_back(serve):
    failed = {"a"}

    async def script(worker):
        if worker in failed:
            raise RuntimeError
        yield [event(worker)]

    ingress, live, app = await serve(script, failover=SLOW)
    for _ in range(20):
        assert (await post(app, stream=True)).status_code == 200
        if live.members.breakers.state("a", live.now_s()).standing == "open":
            break
    state = live.members.breakers.state("a", live.now_s())
    assert (state.standing, state.why) == ("open", "errors")
    rows = {row["node"]: row for row in (await get(app, "/v1/nodes")).json()["nodes"]}
    assert rows["a"]["breaker"] == {"state": "open", "why": "errors", "failures": 2, "opened": 1}
    samples = (await get(app, "/metrics")).text
    assert 'kappa_breaker_open{node="a"} 1.0' in samples
    assert 'kappa_breaker_opened_total{node="a",why="errors"} 1.0' in samples
    before = len(ingress.sent)
    assert (await post(app, stream=True)).status_code == 200
    assert ingress.sent[before:] == ["b"]
    assert list(live.records.values())[-1].avoided == ("a",)
    failed.clear()
    live._epoch_s += LONG_PAUSE_S  # the pause is over

    async def closed():
        assert (await post(app, stream=True)).status_code == 200
        return live.members.breakers.state("a", live.now_s()).standing == "closed"

    async with asyncio.timeout(30.0):
        while not await closed():
            await asyncio.sleep(0.01)
    assert "a" in ingress.sent[before + 1 :]


async def test_where_all_fail_one_that_fails_is_still_asked(serve):
    async def script(_worker):
        raise RuntimeError
        yield

    ingress, live, app = await serve(script, failover=SLOW)
    for _ in range(4):
        assert (await post(app, stream=True)).status_code == 500
    standings = {live.members.breakers.state(w, live.now_s()).standing for w in "ab"}
    assert "closed" not in standings
    sent = len(ingress.sent)
    assert (await post(app, stream=True)).status_code == 500
    assert len(ingress.sent) > sent


def heard(live, worker, **what):
    live.members.reported(WorkerReport(worker, live.now_s(), **what))


async def test_a_worker_that_falls_silent_loses_those_it_has_not_begun(serve):
    async def script(worker):
        if worker == stuck:
            await asyncio.sleep(600)
        yield [event(worker)]

    ingress, live, app = await serve(script, failover=SOON)
    stuck = live.explain(live_request()).worker
    heard(live, stuck, steps_total=1)
    answer = await post(app, stream=True)
    assert answer.status_code == 200 and ingress.sent[0] == stuck != ingress.sent[1]
    assert live.members.breakers.state(stuck, live.now_s()).why == "silent"
    assert stuck in live.members.blocked().gone
    heard(live, stuck, steps_total=2)
    assert stuck not in live.members.blocked().gone, "heard again"


async def test_an_engine_that_stands_still_loses_them_too_though_its_worker_reports(serve):
    async def script(worker):
        if worker == stuck:
            await asyncio.sleep(600)
        yield [event(worker)]

    ingress, live, app = await serve(script, failover=SOON)
    stuck = live.explain(live_request()).worker

    async def report():
        while True:
            heard(live, stuck, steps_total=7)
            await asyncio.sleep(0.1)

    reporting = asyncio.create_task(report())
    try:
        answer = await post(app, stream=True)
        assert answer.status_code == 200 and ingress.sent[0] == stuck != ingress.sent[1]
        assert live.members.breakers.state(stuck, live.now_s()).why == "stalled"
    finally:
        reporting.cancel()


async def test_a_stream_of_a_worker_that_stays_silent_ends_with_an_error_event(serve):
    async def script(worker):
        yield [event("one")]
        await asyncio.sleep(600)

    _, live, app = await serve(script, failover=SOON, stale_after_s=0.8)
    for worker in "ab":
        heard(live, worker, steps_total=1)
    answer = await post(app, stream=True)
    events = [e for e in answer.text.split("\n\n") if e]
    assert events[0] == event("one").strip() and len(events) == 2
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "engine"
    assert live.router.reservations == 0


async def test_a_stream_of_an_engine_that_stands_still_ends_and_it_is_left_alone_until_it_moves(
    serve,
):
    async def script(worker):
        yield [event("one")]
        if len(ingress.sent) == 1:
            await asyncio.sleep(600)

    patient = SLOW.model_copy(update={"stall_after_s": 0.5})
    ingress, live, app = await serve(script, failover=patient, stale_after_s=1.0)
    stuck, steps = live.explain(live_request()).worker, [7]

    async def report():
        while True:
            for worker in "ab":
                heard(live, worker, steps_total=steps[0] if worker == stuck else 1)
            await asyncio.sleep(0.1)

    reporting = asyncio.create_task(report())
    try:
        answer = await post(app, stream=True)
        events = [e for e in answer.text.split("\n\n") if e]
        assert events[0] == event("one").strip() and len(events) == 2
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "engine"
        assert live.router.reservations == 0 and len(live.members.waits) == 0
        assert live.members.breakers.state(stuck, live.now_s()).why == "stalled"
        for _ in range(4):
            assert (await post(app, stream=True)).status_code == 200
        assert ingress.sent[0] == stuck and stuck not in ingress.sent[1:]
        steps[0] += 1
        await until(lambda: stuck not in live.members.blocked().failing)
        assert live.members.breakers.state(stuck, live.now_s()).standing == "half_open"
    finally:
        reporting.cancel()


async def test_a_client_that_reads_slowly_is_no_stall(serve):
    _, live, _ = await serve(words, failover=SOON)
    wait = live.members.waits.begin("a")
    live.route(RouteRequest("slow", exclude=frozenset("b")))
    heard(live, "a", steps_total=7)

    async def report():
        while True:
            heard(live, "a", steps_total=7)
            await asyncio.sleep(0.1)

    reporting = asyncio.create_task(report())
    try:
        await asyncio.sleep(4 * SOON.stall_after_s)
        assert live.members.breakers.state("a", live.now_s()).standing == "closed"
    finally:
        reporting.cancel()
        live.members.waits.end("a", wait)
        live.release("slow", "done")


async def test_a_worker_that_is_taken_away_ends_its_streams_and_gets_nothing_new(serve):
    going = asyncio.Event()

    async def script(worker):
        yield [event("one")]
        await going.wait()
        yield [event("two")]

    ingress, live, app = await serve(script)
    post_one = asyncio.create_task(post(app, stream=True))
    await until(lambda: live.records and next(iter(live.records.values())).ttft_s is not None)
    leaves = ingress.sent[0]
    live.members.get(leaves).subscriber.connected = True
    stays = ({"a", "b"} - {leaves}).pop()
    ingress.registry.publish("d", {stays: live.members.get(stays).announced})
    await until(lambda: live.members.get(leaves).draining)
    assert live.explain(live_request()).worker == stays
    rows = {row["node"]: row for row in (await get(app, "/v1/nodes")).json()["nodes"]}
    assert (rows[leaves]["draining"], rows[leaves]["in_flight"]) == (True, 1)
    going.set()
    answer = await post_one
    assert answer.text.endswith(f"{event('two')}data: [DONE]\n\n")
    assert next(iter(live.records.values())).end == "done"
    await until(lambda: set(live.router.workers) == {stays})
    assert live.router.reservations == 0


async def test_a_worker_that_died_loses_its_requests_at_once_and_they_go_elsewhere(serve):
    async def script(worker):
        if len(ingress.sent) == 1:
            await asyncio.sleep(600)
        yield [event(worker)]

    ingress, live, app = await serve(script)
    busy(live)
    post_one = asyncio.create_task(post(app, stream=True))
    await until(lambda: ingress.sent)
    ingress.registry.remove("d", ingress.sent[0])
    answer = await post_one
    assert answer.status_code == 200 and ingress.sent[1] != ingress.sent[0]
    assert set(live.router.workers) == {ingress.sent[1]}
    assert live.router.reservations == 0


async def test_other_ingresses_requests_count_for_the_limit(serve):
    _, live, app = await serve(words, max_queue=2)
    arrived = [{"request_id": f"theirs-{i}", "new_tokens": 10} for i in range(2)]
    told = WorkerReport("a", live.now_s()).to_dict()
    live.members.reported(WorkerReport.from_dict(told | {"arrived": arrived}))
    answer = await post(app)
    assert (answer.status_code, code(answer)) == (429, "queue_full")
    live.members.reported(WorkerReport.from_dict(told | {"finished": ["theirs-0"]}))
    assert (await post(app, stream=True)).status_code == 200


async def test_a_first_health_check_waits_no_longer_than_it_may(serve, monkeypatch):
    monkeypatch.setattr(router.api.endpoints, "_FIRST_SIGHT_S", 0.05)
    ingress, live, _ = await serve(words)
    assert not live.members.synced, "these workers have no stream"
    await ingress.check_health()
    await ingress.check_health()


def live_request():
    return RouteRequest("asked")


async def test_a_request_that_comes_before_any_worker_is_known_waits_for_one(serve):
    ingress, _, app = await serve(words, workers=())
    early = asyncio.create_task(post(app, stream=True))
    await asyncio.sleep(0.05)
    assert not early.done() and ingress.sent == []
    ingress.registry.publish("d", {"late": announcement("late")})
    answer = await early
    assert answer.status_code == 200 and ingress.sent == ["late"]


async def test_a_fault_of_ours_between_decision_and_delivery_leaves_nothing_reserved(
    serve, monkeypatch
):
    ingress, live, app = await serve(words)

    def broken(*_):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(router.api.deliver, "routed_metadata", broken)
    assert (await post(app)).status_code == 500
    assert ingress.sent == [] and live.router.reservations == 0
    assert ingress._path.open == set()


async def test_a_late_second_end_does_not_release_a_later_request_of_the_same_id(serve):
    _, live, _ = await serve(words)
    stream = words("a")
    wait = live.members.waits.begin("a")
    decision = live.route(RouteRequest("job"))
    request = SimpleNamespace(attempt_over=lambda end: None)
    attempt = router.api.deliver.Attempt(live, request, decision, stream, wait)
    await attempt.over("client_gone")
    live.route(RouteRequest("job"))
    await attempt.over("client_gone")
    assert live.router.reservations == 1
    live.release("job", "unsent")


async def test_ready_tells_whether_a_worker_can_be_chosen(serve):
    ingress, live, app = await serve(words)
    app.get("/ready")(ingress.ready)
    answer = await get(app, "/ready")
    assert (answer.status_code, answer.json()) == (200, {"workers": 2})
    live.members._trip("a", "silent")
    assert (await get(app, "/ready")).json() == {"workers": 1}
    live.members._trip("b", "disconnected")
    answer = await get(app, "/ready")
    assert (answer.status_code, answer.json()) == (503, {"workers": 0})


async def test_health_fails_when_the_workers_are_followed_no_more(serve, monkeypatch):
    monkeypatch.setattr(router.api.endpoints, "_FIRST_SIGHT_S", 0.05)
    ingress, live, _ = await serve(words)
    await ingress.check_health()
    live.members.get("a").subscriber._tasks[0].cancel()
    await until(lambda: not live.members.get("a").subscriber.alive)
    with pytest.raises(RuntimeError, match="nobody follows worker a"):
        await ingress.check_health()


# -- requests that kill engines ------------------------------------------------------------------


class Engines:
    """Engines that die of one text, whoever sends it, and of nothing else."""

    def __init__(self, error=EngineDiedError):
        self.died, self.error, self.gate = [], error, asyncio.Event()
        self.gate.set()

    async def __call__(self, worker, text):
        await self.gate.wait()
        if text == "kill":
            self.died.append(worker)
        if worker in self.died:
            raise self.error(worker) if self.error is EngineDiedError else self.error()
        yield [event(worker)]


@pytest.fixture
async def killing(serve, monkeypatch):
    """Its `ask(text)` sends a chat of it to scripted engines."""

    async def make(error=EngineDiedError, workers=("a", "b", "c", "d"), **changes):
        engines = Engines(error)

        async def nothing(_worker):
            yield

        ingress, live, app = await serve(nothing, workers, (100,) * len(workers), **changes)

        async def call(body, _method, headers):
            worker = headers["x-kappa-pin"]
            ingress.sent.append(worker)
            async for item in engines(worker, body.messages[0]["content"]):
                yield item

        ingress._path.delivery._call = call

        async def ask(text, **more):
            said = [{"role": "user", "content": text}]
            return await post(app, messages=said, stream=True, **more)

        return SimpleNamespace(ingress=ingress, live=live, engines=engines, ask=ask)

    return make


@pytest.mark.parametrize("error", [EngineDiedError, ActorDiedError])
async def test_a_request_alone_in_an_engine_that_died_is_not_given_another(killing, capsys, error):
    it = await killing(error)
    answer = await it.ask("kill")
    assert (answer.status_code, code(answer)) == (503, "engine_died")
    (request_id,) = it.live.records
    assert request_id in answer.json()["error"]["message"]
    assert len(it.ingress.sent) == 1 and it.live.router.reservations == 0
    printed = "".join(capsys.readouterr())
    assert "request_killed_engine" in printed and request_id in printed and "kill " not in printed


async def test_content_that_was_in_two_engines_that_died_is_refused_at_once(killing):
    it = await killing()
    answers = [await it.ask("kill", user=f"{turn}") for turn in range(5)]
    assert [a.status_code for a in answers] == [503, 422, 422, 422, 422]
    assert {code(a) for a in answers[1:]} == {"killed_an_engine"}
    assert len(it.engines.died) == 2 and len(it.ingress.sent) == 2, "two engines of four, not all"
    assert (await it.ask("hello")).status_code == 200, "another content goes on"
    it.live._epoch_s += 601.0
    assert len(it.ingress.sent) == 3 and code(await it.ask("kill")) == "engine_died"


async def test_those_that_were_beside_it_are_answered_and_it_stops_after_two_engines(killing):
    it = await killing(max_queue=20)
    for worker in "abcd":  # wherever it goes, it was not alone there
        it.live.suspects.ended(worker, it.live.now_s())
    it.engines.gate.clear()
    texts = ["kill"] + [f"innocent {i}" for i in range(11)]
    asking = [asyncio.create_task(it.ask(text)) for text in texts]
    await until(lambda: it.live.router.reservations == 12 == len(it.ingress.sent))
    it.engines.gate.set()
    killer, *innocent = [await task for task in asking]
    assert (killer.status_code, code(killer)) == (422, "killed_an_engine")
    assert len(set(it.engines.died)) == 2
    lost = [a for a in innocent if a.status_code != 200]
    assert all(code(a) == "killed_an_engine" for a in lost), "only those in both engines"
    assert len(innocent) - len(lost) >= 5
    assert it.live.router.reservations == 0 and len(it.live.members.waits) == 0


async def test_a_killed_worker_with_several_requests_loses_none_of_them(killing):
    it = await killing(ActorDiedError, workers=("a", "b"))
    before = [asyncio.create_task(it.ask(f"before {i}")) for i in range(4)]
    assert [(await task).status_code for task in before] == [200] * 4
    it.ingress.sent.clear()
    it.engines.gate.clear()
    asking = [asyncio.create_task(it.ask(f"hello {i}")) for i in range(4)]
    await until(lambda: it.live.router.reservations == 4 == len(it.ingress.sent))
    it.engines.died.append("a")  # kill -9 of its process
    it.engines.gate.set()
    assert [(await task).status_code for task in asking] == [200] * 4
    assert len(it.live.suspects) == 0, "their second engines acquitted them"


async def test_another_tenants_same_content_is_not_refused(killing):
    digests = {digest_of(f"sk-{name}"): name for name in ("alice", "bob")}
    tenants = Tenants(operators=frozenset()).with_digests(digests)
    it = await killing(tenants=tenants)
    for _ in range(3):
        await it.ask("kill", key="sk-alice")
    assert len(it.ingress.sent) == 2
    assert code(await it.ask("kill", key="sk-bob")) == "engine_died"
