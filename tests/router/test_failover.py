"""A worker that fails: its requests go elsewhere or end with an error, and it is left alone.

Ray's delivery is a script; who is there, breakers, retries and HTTP are real.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

import router.api.cluster_face
import router.api.deliver
from kappa.protocol import EngineDiedError, WorkerReport
from kappa.settings.routing import FailoverSettings
from router.decision import RouteRequest
from router.live.replica_registry import PinGoneError
from tests.router.scripted import announcement, code, event, get, post, until, words

pytestmark = pytest.mark.ray

LONG_PAUSE_S = 1000.0
SLOW = FailoverSettings(failures=2, pause_s=LONG_PAUSE_S, longest_pause_s=LONG_PAUSE_S)
SOON = FailoverSettings(stall_after_s=0.5, failures=2, pause_s=0.05, longest_pause_s=0.1)
ONE, TWO = event("one").strip(), event("two").strip()


async def whole(_worker):
    content = {"choices": [{"message": {"content": "hello"}}]}
    usage = SimpleNamespace(completion_tokens=1)
    yield SimpleNamespace(usage=usage, model_dump_json=lambda: json.dumps(content))


async def broken(_worker):
    raise RuntimeError("secret")
    yield


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


def busy(live):
    """Others were in each engine a moment ago, so that nobody is alone there."""
    for worker in live.router.workers:
        live.suspects.ended(worker, live.now_s())


def error_event(status):
    error = {"message": "secret detail", "type": "t", "param": None, "code": status}
    return f"data: {json.dumps({'error': error})}\n\n"


def events_of(answer):
    return [one for one in answer.text.split("\n\n") if one]


def check_ends_with_an_engines_error(answer, *before):
    *events, last = events_of(answer)
    assert events == list(before) and "secret" not in answer.text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine"


def breaker(live, worker):
    return live.members.breakers.state(worker, live.now_s())


def report(live, worker, **what):
    live.members.reported(WorkerReport(worker, live.now_s(), **what))


@asynccontextmanager
async def reporting(live, workers, steps, **what):
    """All the while these workers report the number of steps that `steps(worker)` says."""

    async def run():
        while True:
            for worker in workers:
                report(live, worker, steps_total=steps(worker), **what)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()


# -- failures --------------------------------------------------------------------------------------


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
    assert (await post(app, stream=True)).status_code == 400
    assert len(ingress.sent) == 1 and breaker(live, ingress.sent[0]).failures == 0


async def test_an_engines_failure_inside_a_stream_ends_it_in_our_words(serve):
    async def script(_worker):
        yield [event("one")]
        yield [event("two"), error_event(500), "data: [DONE]\n\n"]

    _, live, app = await serve(script)
    check_ends_with_an_engines_error(await post(app, stream=True), ONE, TWO)
    (record,) = live.records.values()
    assert (record.end, live.router.reservations) == ("error", 0)


async def test_the_last_workers_failure_is_the_answer_where_nobody_else_is_left(serve):
    _, live, app = await serve(broken, workers=("a",))
    answer = await post(app, stream=True)
    assert code(answer, 500) == "engine" and "secret" not in answer.text
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
        if breaker(live, "a").standing == "open":
            break
    assert (breaker(live, "a").standing, breaker(live, "a").why) == ("open", "errors")
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
    async with asyncio.timeout(30.0):
        while breaker(live, "a").standing != "closed":
            assert (await post(app, stream=True)).status_code == 200
    assert "a" in ingress.sent[before + 1 :]


async def test_where_all_fail_one_that_fails_is_still_asked(serve):
    ingress, live, app = await serve(broken, failover=SLOW)
    for _ in range(4):
        assert (await post(app, stream=True)).status_code == 500
    assert "closed" not in {breaker(live, worker).standing for worker in "ab"}
    sent = len(ingress.sent)
    assert (await post(app, stream=True)).status_code == 500
    assert len(ingress.sent) > sent


async def test_a_fault_of_ours_between_decision_and_delivery_leaves_nothing_reserved(
    serve, monkeypatch
):
    ingress, live, app = await serve()

    def fails(*_):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(router.api.deliver, "routed_metadata", fails)
    assert (await post(app)).status_code == 500
    assert ingress.sent == [] and live.router.reservations == 0
    assert ingress._path.open == set()


async def test_a_late_second_end_does_not_release_a_later_request_of_the_same_id(serve):
    _, live, _ = await serve()
    wait = live.members.waits.begin("a")
    request = SimpleNamespace(attempt_over=lambda end: None)
    decision = live.route(RouteRequest("job"))
    attempt = router.api.deliver.Attempt(live, request, decision, words("a"), wait)
    await attempt.over("client_gone")
    live.route(RouteRequest("job"))
    await attempt.over("client_gone")
    assert live.router.reservations == 1
    live.release("job", "unsent")


# -- workers that fall silent, stand still, leave or die ------------------------------------------


@pytest.mark.parametrize("reports", [False, True])
async def test_a_silent_worker_or_one_that_stands_still_loses_those_it_has_not_begun(
    serve, reports
):
    async def script(worker):
        if worker == stuck:
            await asyncio.sleep(600)
        yield [event(worker)]

    ingress, live, app = await serve(script, failover=SOON)
    stuck = live.explain(RouteRequest("asked")).worker
    report(live, stuck, steps_total=7)
    async with reporting(live, [stuck] if reports else [], lambda _: 7):
        answer = await post(app, stream=True)
        assert answer.status_code == 200 and ingress.sent[0] == stuck != ingress.sent[1]
        assert breaker(live, stuck).why == ("stalled" if reports else "silent")
        if not reports:
            assert stuck in live.members.blocked().gone
            report(live, stuck, steps_total=8)
            assert stuck not in live.members.blocked().gone, "it reports again"


async def test_a_stream_of_a_worker_that_stays_silent_ends_with_an_error_event(serve):
    async def script(worker):
        yield [event("one")]
        await asyncio.sleep(600)

    _, live, app = await serve(script, failover=SOON, stale_after_s=0.8)
    for worker in "ab":
        report(live, worker, steps_total=1)
    check_ends_with_an_engines_error(await post(app, stream=True), ONE)
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
    stuck, steps = live.explain(RouteRequest("asked")).worker, [7]
    async with reporting(live, "ab", lambda worker: steps[0] if worker == stuck else 1):
        check_ends_with_an_engines_error(await post(app, stream=True), ONE)
        assert live.router.reservations == 0 and len(live.members.waits) == 0
        assert breaker(live, stuck).why == "stalled"
        for _ in range(4):
            assert (await post(app, stream=True)).status_code == 200
        assert ingress.sent[0] == stuck and stuck not in ingress.sent[1:]
        steps[0] += 1
        await until(lambda: stuck not in live.members.blocked().failing)
        assert breaker(live, stuck).standing == "half_open"


async def test_a_client_that_reads_slowly_is_no_stall(serve):
    _, live, _ = await serve(failover=SOON)
    wait = live.members.waits.begin("a")
    live.route(RouteRequest("slow", exclude=frozenset("b")))
    live.first_token("slow")
    async with reporting(live, "a", lambda _: 7):
        await asyncio.sleep(4 * SOON.stall_after_s)
        assert breaker(live, "a").standing == "closed"
    live.members.waits.end("a", wait)
    live.release("slow", "done")


async def test_a_worker_that_is_taken_away_ends_its_streams_and_gets_nothing_new(serve):
    going = asyncio.Event()

    async def script(worker):
        yield [event("one")]
        await going.wait()
        yield [event("two")]

    ingress, live, app = await serve(script)
    asking = asyncio.create_task(post(app, stream=True))
    await until(lambda: live.records and next(iter(live.records.values())).ttft_s is not None)
    leaves = ingress.sent[0]
    live.members.get(leaves).subscriber.connected = True
    stays = ({"a", "b"} - {leaves}).pop()
    ingress.registry.publish("d", {stays: live.members.get(stays).announced})
    await until(lambda: live.members.get(leaves).draining)
    assert live.explain(RouteRequest("asked")).worker == stays
    rows = {row["node"]: row for row in (await get(app, "/v1/nodes")).json()["nodes"]}
    assert (rows[leaves]["draining"], rows[leaves]["in_flight"]) == (True, 1)
    going.set()
    assert (await asking).text.endswith(f"{event('two')}data: [DONE]\n\n")
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
    asking = asyncio.create_task(post(app, stream=True))
    await until(lambda: ingress.sent)
    ingress.registry.remove("d", ingress.sent[0])
    assert (await asking).status_code == 200 and ingress.sent[1] != ingress.sent[0]
    assert set(live.router.workers) == {ingress.sent[1]}
    assert live.router.reservations == 0


# -- the ingress itself ----------------------------------------------------------------------------


async def test_other_ingresses_requests_count_for_the_limit(serve):
    _, live, app = await serve(max_queue=2)
    arrived = [{"request_id": f"theirs-{i}", "new_tokens": 10} for i in range(2)]
    theirs = WorkerReport("a", live.now_s()).to_dict()
    live.members.reported(WorkerReport.from_dict(theirs | {"arrived": arrived}))
    assert code(await post(app), 429) == "queue_full"
    live.members.reported(WorkerReport.from_dict(theirs | {"finished": ["theirs-0"]}))
    assert (await post(app, stream=True)).status_code == 200


async def test_a_request_that_comes_before_any_worker_is_known_waits_for_one(serve):
    ingress, _, app = await serve(workers=())
    early = asyncio.create_task(post(app, stream=True))
    await asyncio.sleep(0.05)
    assert not early.done() and ingress.sent == []
    ingress.registry.publish("d", {"late": announcement("late")})
    assert (await early).status_code == 200 and ingress.sent == ["late"]


async def test_ready_says_whether_a_worker_can_be_chosen(serve):
    _, live, app = await serve()
    answer = await get(app, "/ready")
    assert (answer.status_code, answer.json()) == (200, {"workers": 2})
    live.members._trip("a", "silent")
    assert (await get(app, "/ready")).json() == {"workers": 1}
    live.members._trip("b", "disconnected")
    answer = await get(app, "/ready")
    assert (answer.status_code, answer.json()) == (503, {"workers": 0})


async def test_health_waits_once_and_fails_when_the_workers_are_followed_no_more(
    serve, monkeypatch
):
    monkeypatch.setattr(router.api.cluster_face, "_FIRST_SIGHT_S", 0.05)
    ingress, live, _ = await serve()
    assert not live.members.synced, "these workers have no stream"
    await ingress.check_health()
    await ingress.check_health()
    live.members.get("a").subscriber._tasks[0].cancel()
    await until(lambda: not live.members.get("a").subscriber.alive)
    with pytest.raises(RuntimeError, match="nobody follows worker a"):
        await ingress.check_health()
