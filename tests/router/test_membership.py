"""Membership over real worker streams: joins, deaths, silence, stalls, several deciders."""

import asyncio
import time

import pytest

from kappa.protocol import WorkerReport
from kappa_router.config import RouterConfig
from kappa_router.decision import NoWorkerError
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import Member, MembershipRule, progress_of
from kappa_router.live.waiting import WorkerLostError, unless_lost
from kappa_router.policy import policy_named
from tests.router.building import ask_counting as ask
from tests.router.patience import until
from tests.router.stream_worker import SIZE

pytestmark = pytest.mark.vllm


@pytest.fixture
async def decider(registry):
    """Makes live routers that follow one registry."""
    made = []

    def make(first=0.0, **rule):
        config = RouterConfig(policy=policy_named("ttft"), secret=12345, first=first)
        made.append(LiveRouter(config, rule=MembershipRule(**rule)))
        return made[-1]

    make.registry = registry
    yield make
    for live in made:
        await live.close()
        assert not live.members._closing


async def ready(live, registry, *workers):
    registry.publish("d", {w.name: w.announcement() for w in workers})
    await until(lambda: len(live.router.workers) == len(workers) and live.members.synced)
    await until(lambda: all(live.router.workers[w.name].report for w in workers))


async def alone(decider, worker, **rule):
    """A live router, and the one worker that it is ready with."""
    live, only = decider(**rule), worker()
    await ready(live, decider.registry, only)
    return live, only


def device_tokens(live, tokens=2 * SIZE + 1):
    return live.explain(ask("asked", tokens)).chosen.counts.device_tokens


# -- one that goes -------------------------------------------------------------------------------


async def test_broken_connection_invalidates_before_ray_knows(decider, worker):
    live, w = await alone(decider, worker)
    w.store(1, 2)
    await until(lambda: device_tokens(live) == 2 * SIZE)
    w.arrives("theirs")
    await until(lambda: live.router.in_flight == 1)
    live.route(ask())
    wait = live.members.waits.begin("w")
    w.stream.close()
    await until(lambda: "w" in live.members.blocked().gone)
    with pytest.raises(NoWorkerError):
        live.explain(ask("next"))
    assert live.router.index.stats()["blocks"] == 0
    assert (live.router.reservations, live.router.in_flight) == (1, 1), "ours ends with its decider"
    with pytest.raises(WorkerLostError, match="disconnected"):
        await unless_lost(wait, asyncio.Event().wait())
    live.members.waits.end("w", wait)


async def test_returning_worker_is_probed_with_its_blocks_known(decider, worker, tmp_path):
    live, w = await alone(decider, worker)
    w.store(1, 2)
    await until(lambda: device_tokens(live) == 2 * SIZE)
    live.members.connection("w", up=False)
    live.members.get("w").subscriber._broken = True
    assert "w" in live.members.blocked().gone
    await until(lambda: "w" not in live.members.blocked().gone)
    await until(lambda: device_tokens(live) == 2 * SIZE)
    assert live.members.breakers.state("w", live.now_s()).standing == "half_open"
    live.route(ask())
    live.first_token("r")
    assert live.members.breakers.state("w", live.now_s()).standing == "closed"
    live.release("r", "done")


async def test_worker_that_changes_its_model_is_dropped(decider, worker):
    live, w = await alone(decider, worker)
    w.store(1, 2)
    await until(lambda: device_tokens(live) == 2 * SIZE)
    decider.registry.publish("d", {"w": w.announcement(fingerprint="other")})
    await until(lambda: not live.router.workers)
    assert "fingerprint" in live.members.refused["w"]
    assert live.router.index.stats()["blocks"] == 0


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"block_tokens": 2 * SIZE}])
async def test_worker_that_differs_never_joins_nor_shares_an_entry(decider, worker, change):
    live, a, b = decider(), worker("a"), worker("b")
    await ready(live, decider.registry, a)
    decider.registry.publish("d", {"a": a.announcement(), "b": b.announcement(**change)})
    await until(lambda: "b" in live.members.refused)
    b.store(1, 2)
    a.store(1, start=500)
    await until(lambda: live.router.index.stats()["blocks"] == 1)
    assert set(live.router.workers) == {"a"} and device_tokens(live) == 0


async def test_idle_worker_that_is_taken_away_leaves_at_once(decider, worker):
    live, _ = await alone(decider, worker)
    decider.registry.publish("d", {})
    await until(lambda: not live.router.workers)


async def test_worker_that_drains_for_too_long_is_given_up(decider, worker):
    live, _ = await alone(decider, worker, drain_s=0.3)
    live.route(ask())
    decider.registry.publish("d", {})
    await until(lambda: live.members.get("w").draining)
    await until(lambda: not live.router.workers)
    assert live.records["r"].end == "worker_died" and live.router.reservations == 0


# -- several deciders ----------------------------------------------------------------------------


async def test_deciders_know_each_others_requests_soon(decider, worker):
    one, two = decider(), decider(first=0.5)
    a, b = worker("a"), worker("b")
    await ready(one, decider.registry, a, b)
    await ready(two, decider.registry, a, b)
    chosen = one.route(ask("r", 1000)).worker
    start_s = time.monotonic()
    there = one.records["r"].sent_as
    {"a": a, "b": b}[chosen].arrives(there, new=1000)
    await until(lambda: two.router.remote_in_flight_on(chosen) == 1)
    print(f"known to the other after {1e3 * (time.monotonic() - start_s):.1f} ms")
    assert one.router.in_flight == 1, "its own is not counted twice"
    assert two.explain(ask("s", 1000)).worker != chosen
    {"a": a, "b": b}[chosen].finishes(there)
    one.release("r", "done")
    await until(lambda: two.router.in_flight == 0)


async def test_new_decider_learns_blocks_and_requests_from_the_worker(decider, worker):
    old, w = decider(), worker()
    await ready(old, decider.registry, w)
    w.store(1, 2)
    w.arrives("before")
    await until(lambda: old.router.in_flight == 1 and device_tokens(old) == 2 * SIZE)
    new = decider(first=0.5)
    await until(lambda: new.members.synced)
    assert device_tokens(new) == 2 * SIZE, "from the snapshot: the events are long over"
    await until(lambda: new.router.in_flight == 1)
    w.finishes("before")
    await until(lambda: new.router.in_flight == old.router.in_flight == 0)


async def test_decider_that_goes_leaves_nothing_with_the_other(decider, worker):
    one, two, w = decider(), decider(first=0.5), worker()
    await ready(one, decider.registry, w)
    await ready(two, decider.registry, w)
    one.route(ask("r"))
    there = one.records["r"].sent_as
    w.arrives(there)
    await until(lambda: two.router.in_flight == 1)
    await one.close()
    w.finishes(there)  # Ray cancels a call without a caller
    await until(lambda: two.router.in_flight == 0)
    assert all(link == gpu == 0.0 for link, gpu in two.router.backlogs_s(two.now_s()).values())


async def test_report_of_a_deciders_id_is_not_taken_for_anothers(decider, worker):
    one, two, w = decider(), decider(first=0.5), worker()
    await ready(one, decider.registry, w)
    await ready(two, decider.registry, w)
    one.route(ask("job-1", 500, tenant="alice"))
    two.route(ask("job-1", 500, tenant="bob"))
    bobs = two.records["job-1"].sent_as
    w.arrives(bobs)
    await until(lambda: one.router.remote_in_flight_on("w") == 1)
    assert two.router.remote_in_flight_on("w") == 0, "its own is not counted twice"
    w.admit(bobs, device=0, host=32, new=468)
    w.step(bobs)
    await until(lambda: two.records["job-1"].ttft_s is not None)
    await until(lambda: one.router.workers["w"].report.steps_total == 1)
    alices = one.records["job-1"]
    assert (alices.admitted, alices.spent, alices.ttft_s) == (None, None, None)
    assert not one.router.flights["job-1"].prefilled
    w.finishes(bobs)
    await until(lambda: one.router.remote_in_flight_on("w") == 0)
    assert one.router.in_flight == 1


async def test_report_of_an_earlier_request_of_an_id_is_too_late(decider, worker):
    live, w = await alone(decider, worker)
    live.route(ask("job-1"))
    earlier = live.records["job-1"].sent_as
    live.release("job-1", "client_gone")
    live.route(ask("job-1"))
    w.step(earlier)
    await until(lambda: live.router.workers["w"].report.steps_total == 1)
    assert live.records["job-1"].ttft_s is None


# -- time ----------------------------------------------------------------------------------------


async def test_clock_that_is_set_changes_nothing(decider, worker, monkeypatch):
    live, w = await alone(decider, worker, stall_after_s=1.0)
    before_s, reported_s = live.now_s(), live.router.workers["w"].report.time_s
    real = time.time
    for jump_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        w.arrives(f"r{jump_s}")
        await until(lambda at=reported_s: live.router.workers["w"].report.time_s > at)
        assert 0 <= live.now_s() - before_s < 60
        assert live.explain(ask("s")).worker == "w"
        reported_s = live.router.workers["w"].report.time_s
    assert live.members.breakers.state("w", live.now_s()).standing == "closed"


# -- stalls --------------------------------------------------------------------------------------


def stalled_s(member, now_s, steps=1.0, busy=True):
    return member.stalled_s((steps,), busy=busy, now_s=now_s)


def test_engine_stalls_while_it_has_work_and_makes_no_progress():
    member = Member("d", {}, subscriber=None)
    assert [stalled_s(member, t) for t in (0.0, 4.0, 5.5)] == [0.0, 4.0, 5.5]
    assert stalled_s(member, 6.0, steps=2.0) == 0.0, "progress"
    assert stalled_s(member, 10.0, steps=2.0) == 4.0
    assert stalled_s(member, 20.0, steps=2.0, busy=False) == 0.0, "idle"
    assert stalled_s(member, 24.0, steps=2.0) == 4.0


def test_steps_loads_and_iterations_are_progress():
    before = progress_of(WorkerReport("w", 1.0))
    for what in ("steps_total", "iterations_total", "load_tokens_total", "step_tokens_total"):
        assert progress_of(WorkerReport("w", 2.0, **{what: 1})) != before
    assert progress_of(WorkerReport("w", 2.0, waiting=3)) == before
