"""A worker that fails: its requests go elsewhere or end with an error, and it is left alone.

Engines are scripts; Envoy, gates, decider, breakers and second attempts are real.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

import kappa_router.cluster.replica
from kappa.protocol import EngineDiedError, WorkerReport
from kappa.settings.routing import FailoverSettings
from kappa_router.decision import RouteRequest
from tests.router.patience import until
from tests.router.scripted import Engine, Whole, announcement, code, crowd, event, get, post, words

pytestmark = pytest.mark.ray

LONG_PAUSE_S = 1000.0
SLOW = FailoverSettings(failures=2, pause_s=LONG_PAUSE_S, longest_pause_s=LONG_PAUSE_S)
# Of a loop that stands still half a second counts, and of its watch a quarter.
SOON = FailoverSettings(stall_after_s=1.0, failures=2, pause_s=0.05, longest_pause_s=0.1)


async def broken(_worker):
    raise RuntimeError("secret")
    yield


async def never(_worker):
    await asyncio.Event().wait()
    yield


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

FAILURES = {
    "fails": "error",
    "answers_500": "error",
    "streams_an_error": "error",
    "engine_dies": "worker_died",
    "process_dies": "worker_died",
    "drains": "error",
    "not_there": "unsent",
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_request_that_its_worker_failed_is_served_by_another(serve, failure):
    asked = []

    async def script(worker):
        asked.append(worker)
        if len(asked) == 1 and failure == "fails":
            raise RuntimeError("secret")
        if len(asked) == 1 and failure == "answers_500":
            yield Whole({"error": {"message": "secret"}}, 500)
            return
        if len(asked) == 1 and failure == "streams_an_error":
            yield ['data: {"error": {"message": "secret", "code": 500}}\n\n']
            return
        if len(asked) == 1 and failure == "engine_dies":
            raise EngineDiedError(worker)
        if len(asked) == 1 and failure == "process_dies":
            closing.append(asyncio.ensure_future(here.workers[worker].port.close(0.0)))
            await asyncio.Event().wait()
        yield Whole({"said": worker}) if len(asked) % 2 else [event(worker)]

    closing = []
    _, live, here = await serve(script)
    crowd(live)
    first = live.explain(RouteRequest("asked")).worker
    other = ({"a", "b"} - {first}).pop()
    if failure == "drains":
        here.workers[first].gate.draining = True
        asked.append(first)
    if failure == "not_there":
        await here.workers[first].port.close(0.0)
        asked.append(first)
    answer = await post(here, stream=True)
    assert answer.status_code == 200 and answer.text.startswith(event(other))
    assert asked == [first, other]
    await here.idle()
    (record,) = live.records.values()
    assert (record.end, record.attempt, record.decision.worker) == ("done", 1, other)
    line = f'kappa_retries_total{{node="{first}",why="{FAILURES[failure]}"}} 1.0'
    assert line in (await get(here, "/metrics")).text
    assert breaker(live, first).standing == ("open" if failure == "engine_dies" else "closed")
    assert breaker(live, first).failures == (failure not in ("engine_dies", "not_there"))
    # One that is not streamed is as well off.
    asked[:] = [first, other]
    answer = await post(here)
    assert answer.status_code == 200 and answer.json()["said"] in asked
    await asyncio.gather(*closing)


async def test_engine_refusal_is_not_tried_elsewhere(serve):
    async def refused(_worker):
        yield Whole({"error": {"message": "no such voice", "code": 400}}, 400)

    async def ended(_worker):
        yield Whole({"error": {"message": "Internal server error", "code": 500}}, 500)

    engines, live, here = await serve(refused)
    for _ in range(3):
        answer = await post(here, stream=True)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such voice")
        await here.idle()
    engines.script = ended
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for _ in range(6):  # more than what opens a breaker
        assert code(await post(here, response_format=form), 400) == "invalid_grammar"
        await here.idle()
    assert len(engines.sent) == 9
    assert all(breaker(live, worker).failures == 0 for worker in "ab")
    assert {record.end for record in live.records.values()} == {"refused"}


async def test_last_workers_failure_is_answered_when_none_is_left(serve):
    _, live, here = await serve(broken, workers=("a",))
    answer = await post(here, stream=True)
    assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert "the engine failed" in answer.text and "secret" not in answer.text
    await here.idle()
    (record,) = live.records.values()
    assert record.end == "error"


async def test_failing_worker_is_left_alone_then_taken_back(serve):
    failed = {"a"}

    async def script(worker):
        if worker in failed:
            raise RuntimeError
        yield [event(worker)]

    engines, live, here = await serve(script, failover=SLOW)

    async def ask():
        assert (await post(here, stream=True)).status_code == 200
        await here.idle()

    for _ in range(20):
        await ask()
        if breaker(live, "a").standing == "open":
            break
    assert (breaker(live, "a").standing, breaker(live, "a").why) == ("open", "errors")
    rows = {row["node"]: row for row in (await get(here, "/v1/nodes")).json()["nodes"]}
    assert rows["a"]["breaker"] == {"state": "open", "why": "errors", "failures": 2, "opened": 1}
    samples = (await get(here, "/metrics")).text
    assert 'kappa_breaker_open{node="a",worker="a"} 1.0' in samples
    assert 'kappa_breaker_opened_total{node="a",why="errors"} 1.0' in samples
    before = len(engines.sent)
    await ask()
    assert engines.sent[before:] == ["b"]
    assert list(live.records.values())[-1].avoided == ("a",)
    failed.clear()
    live._epoch_s += LONG_PAUSE_S  # the pause is over
    async with asyncio.timeout(30.0):
        while breaker(live, "a").standing != "closed":
            await ask()
    assert "a" in engines.sent[before + 1 :]


async def test_failing_worker_is_asked_where_all_fail(serve):
    engines, live, here = await serve(broken, failover=SLOW)
    for _ in range(4):
        assert (await post(here, stream=True)).status_code == 503
        await here.idle()
    assert "closed" not in {breaker(live, worker).standing for worker in "ab"}
    sent = len(engines.sent)
    assert (await post(here, stream=True)).status_code == 503
    assert len(engines.sent) > sent


# -- workers that hang, or leave ------------------------------------------------------------------


async def test_stalled_engine_is_left_alone_until_it_moves(serve):
    patient = SLOW.model_copy(update={"stall_after_s": 1.0})
    engines, live, here = await serve(never, failover=patient)
    stuck, steps = live.explain(RouteRequest("asked")).worker, [7]
    asking = asyncio.create_task(post(here, stream=True))
    await until(lambda: engines.sent)
    engines.script = words
    async with reporting(live, "ab", lambda worker: steps[0] if worker == stuck else 1):
        await until(lambda: breaker(live, stuck).why == "stalled")
        for _ in range(4):
            assert (await post(here, stream=True)).status_code == 200
        assert engines.sent[0] == stuck and stuck not in engines.sent[1:]
        steps[0] += 1
        await until(lambda: stuck not in live.members.blocked().failing)
        assert breaker(live, stuck).standing == "half_open"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await here.idle()


async def test_removed_worker_ends_its_streams_and_gets_no_new_ones(serve):
    going = asyncio.Event()

    async def script(worker):
        yield [event("one")]
        await going.wait()
        yield [event("two")]

    engines, live, here = await serve(script)
    asking = asyncio.create_task(post(here, stream=True))
    await until(lambda: engines.sent)
    leaves = engines.sent[0]
    live.members.get(leaves).subscriber.connected = True
    stays = ({"a", "b"} - {leaves}).pop()
    here.registry.publish("d", {stays: here.announced[stays]})
    await until(lambda: live.members.get(leaves).draining)
    assert live.explain(RouteRequest("asked")).worker == stays
    rows = {row["node"]: row for row in (await get(here, "/v1/nodes")).json()["nodes"]}
    assert (rows[leaves]["draining"], rows[leaves]["in_flight"]) == (True, 1)
    going.set()
    assert (await asking).text.endswith(f"{event('two')}data: [DONE]\n\n")
    await here.idle()
    assert next(iter(live.records.values())).end == "done"
    await until(lambda: set(live.router.workers) == {stays})


# -- the decider itself ----------------------------------------------------------------------------


async def test_other_deciders_requests_count_for_the_limit(serve):
    _, live, here = await serve(max_queue=2)
    arrived = [{"request_id": f"theirs-{i}", "new_tokens": 10} for i in range(2)]
    theirs = WorkerReport("a", live.now_s()).to_dict()
    live.members.reported(WorkerReport.from_dict(theirs | {"arrived": arrived}))
    assert code(await post(here), 429) == "queue_full"
    live.members.reported(WorkerReport.from_dict(theirs | {"finished": ["theirs-0"]}))
    assert (await post(here, stream=True)).status_code == 200


async def test_early_request_waits_for_the_first_worker(serve):
    engines, _, here = await serve(workers=())
    early = asyncio.create_task(post(here, stream=True))
    await asyncio.sleep(0.05)
    assert not early.done() and engines.sent == []
    late = Engine("late", engines)
    try:
        announced = {**announcement("late"), "http": late.port.endpoint}
        here.registry.publish("d", {"late": announced})
        assert (await early).status_code == 200 and engines.sent == ["late"]
    finally:
        await late.port.close(0.0)


async def test_ready_and_health_say_whether_workers_are_usable(serve, monkeypatch):
    monkeypatch.setattr(kappa_router.cluster.replica, "FIRST_SIGHT_S", 0.05)
    _, live, here = await serve()
    answer = await get(here, "/ready")
    assert (answer.status_code, answer.json()) == (200, {"workers": 2})
    live.members._trip("a", "silent")
    assert (await get(here, "/ready")).json() == {"workers": 1}
    live.members._trip("b", "disconnected")
    answer = await get(here, "/ready")
    assert (answer.status_code, answer.json()) == (503, {"workers": 0})
    # The first time it waits for what the workers hold; these have no stream.
    assert not live.members.synced
    await here.decider.check_health()
    await here.decider.check_health()
    live.members.get("a").subscriber._tasks[0].cancel()
    await until(lambda: not live.members.get("a").subscriber.alive)
    with pytest.raises(RuntimeError, match="nobody follows worker a"):
        await here.decider.check_health()
