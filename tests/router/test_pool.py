"""The workers of one model: who may join, what they hold, and what other deciders sent them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.protocol import Admission, Arrival, WorkerReport
from kappa_router.decision import MismatchError, RouteRequest
from kappa_router.engine_queue import EngineJob
from kappa_router.index.kv_event_types import WorkerReset
from kappa_simulator.loop import Loop
from tests.router import building
from tests.router.building import NEVER, SIZE, announcement, hasher_of, prompt, stored

STEP = announcement("w").step


def router(*workers, forecast=True, **options):
    return building.router(
        *workers, calibrate=False, stale_after_s=NEVER,
        forecast_workers=len(workers) if forecast else 0, **options,
    )  # fmt: skip


def report(worker="a", time_s=1.0, **what):
    return WorkerReport(worker, time_s, **what)


def arrival(name="r", new=4000, **what):
    return Arrival(name, new_tokens=new, **what)


def ask(name, tokens=4000):
    return RouteRequest(name, np.arange(tokens) % 1000, max_tokens=1)


def empty(made, now_s=1.0):
    return all(link_s == gpu_s == 0.0 for link_s, gpu_s in made.backlogs_s(now_s).values())


# -- workers ------------------------------------------------------------------------------------


def test_first_worker_sets_what_the_pool_serves():
    made = router("a")
    with pytest.raises(MismatchError, match=r"worker b has fingerprint g, the pool f"):
        made.join(announcement("b", fingerprint="g"), 0.0)
    assert list(made.workers) == ["a"]
    made.leave("a")
    made.join(announcement("b", fingerprint="g", block_tokens=32), 0.0)
    assert hasher_of(made).block_tokens == 32


def test_worker_of_other_blocks_is_refused_with_any_fingerprint():
    with pytest.raises(MismatchError, match="32"):
        router("a").join(announcement("b", block_tokens=32), 0.0)


def test_worker_that_leaves_takes_its_requests_and_blocks():
    made = router("a", "b")
    made.blocks([stored("a", prompt(160)), stored("b", prompt(160))])
    for i in range(6):
        made.route(building.ask(f"r{i}", seed=i), 1.0)
    on_a = made.in_flight_on("a")
    lost = made.leave("a")
    assert 0 < len(lost) == on_a
    assert made.reservations == 6 - on_a == made.in_flight_on("b")
    assert made.index.workers() == ("b",)
    assert made.leave("a") == []
    assert not made.release(lost[0], 2.0)
    assert made.first_token(lost[0], 2.0) is None


def test_blocks_of_a_worker_that_is_gone_are_not_kept():
    made = router("a", "b")
    made.leave("a")
    made.blocks([WorkerReset("a"), stored("a", prompt(160))])
    assert made.index.stats()["blocks"] == 0
    assert made.index.workers() == ("b",)


def test_worker_that_comes_back_finds_its_forecast_empty():
    made = router("a")
    made.workers["a"].queue.submit(EngineJob("r", 1.0, 0, 0, 10, 10), 1.0)
    made.leave("a")
    made.join(announcement("a"), 2.0)
    assert len(made.workers["a"].queue) == 0


def test_calibration_begins_again_when_the_node_changes():
    made = router("a")
    learnt = made.workers["a"].calibration
    made.join(announcement("a"), 2.0)
    assert made.workers["a"].calibration is learnt
    made.join(replace(announcement("a"), kv_bytes_per_token=1.0), 3.0)
    assert made.workers["a"].calibration is not learnt


def test_report_is_a_sign_of_life_and_corrects_the_forecast():
    made = router("a")
    state = made.workers["a"]
    for name in "rs":
        state.queue.submit(EngineJob(name, 1.0, 64, 64, 9000, 10), 1.0)
    admitted = (Admission("r", 128, 0, 100), Admission("unknown", 1, 1, 1))
    made.report(report(admitted=admitted, prefilled=("s", "unknown")), 1.001)
    assert state.seen_s == 1.001
    jobs = state.queue._jobs
    assert (jobs["r"].footprint_tokens, jobs["s"].decoding) == (128 + 100, True)
    made.report(report("unknown"), 9.0)
    assert state.seen_s == 1.001


# -- tiers that several workers share -------------------------------------------------------------

BLOCKS = 20
TOKENS = np.arange(BLOCKS * SIZE + 5)


def sharing(*servers):
    """A router of workers w0, w1, ... with these servers ("": none) as their host tiers."""
    return router(
        *(announcement(f"w{i}", tier="lmcache" if s else "own", shared_tier=s)
          for i, s in enumerate(servers)), forecast=False,
    )  # fmt: skip


def cached(made):
    candidates = made.explain(RouteRequest("r", TOKENS, 8), 1.0).candidates
    return [c.counts.cached_tokens for c in candidates]


def hold(made, worker, blocks, first=0, tier="host"):
    hashes = hasher_of(made).prefix_hashes(TOKENS)
    made.index.hold(worker, tier, hashes[first : first + blocks])


def test_worker_is_priced_with_what_its_server_has():
    made = sharing("s", "s", "")
    hold(made, "w0", BLOCKS)
    assert cached(made) == [320, 320, 0]
    made.index.drop("w0", "host", hasher_of(made).prefix_hashes(TOKENS)[-5:])
    assert cached(made) == [240, 240, 0], "blocks that left the server count for none"


def test_server_has_device_blocks_behind_each_workers_own():
    made = sharing("s", "s")
    hold(made, "w0", 8, tier="device")
    hold(made, "w0", 2, first=8)
    hold(made, "w1", 4, tier="device")
    assert cached(made) == [32, 96]


def test_servers_are_kept_apart_and_own_tiers_unshared():
    made = sharing("s", "s", "t", "t", "")
    hold(made, "w0", 6)
    hold(made, "w2", 4)
    assert cached(made) == [96, 96, 64, 64, 0]


def test_worker_that_left_its_server_shares_no_more():
    made = sharing("s", "s", "s")
    hold(made, "w0", 6)
    made.join(announcement("w1"), 0.0)
    assert cached(made) == [96, 0, 96]
    made.leave("w0")
    assert cached(made) == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_workers_of_a_server_reach_as_far_and_hold_no_less(held):
    made = sharing(*["s"] * len(held))
    for i, (device, host) in enumerate(held):
        hold(made, f"w{i}", device, tier="device")
        hold(made, f"w{i}", host, first=device)
    reach = max(device + host for device, host in held) * SIZE
    candidates = made.explain(RouteRequest("r", TOKENS, 8), 1.0).candidates
    for (_, host), candidate in zip(held, candidates, strict=True):
        counts = candidate.counts
        assert counts.device_tokens + counts.cached_tokens == reach
        assert counts.cached_tokens >= host * SIZE


# -- what other deciders sent --------------------------------------------------------------------


@pytest.mark.parametrize("forecast", [True, False])
def test_remote_request_counts_until_it_is_finished(forecast):
    made = router("a", "b", forecast=forecast)
    made.report(report(arrived=(arrival(),)), 1.0)
    assert made.route(ask("mine"), 1.0).worker == "b"
    assert (made.reservations, made.in_flight, made.remote_in_flight_on("a")) == (1, 2, 1)
    made.release("mine", 1.0)
    made.report(report(finished=("r",)), 1.0)
    assert (made.in_flight, made.remote_in_flight_on("a")) == (0, 0)
    assert empty(made)


@pytest.mark.parametrize("forecast", [True, False])
def test_remote_request_is_worth_what_the_same_one_of_ours_is(forecast):
    ours, others = (router("a", forecast=forecast) for _ in range(2))
    ours.route(RouteRequest("r", np.arange(4000), max_tokens=8), 1.0)
    others.report(report(arrived=(arrival(max_tokens=8),)), 1.0)
    assert others.backlogs_s(1.0)["a"] == pytest.approx(ours.backlogs_s(1.0)["a"])
    admission = report(admitted=(Admission("r", 0, 0, 1000),))
    for made in (ours, others):
        made.report(admission, 1.0)
    assert others.backlogs_s(1.0)["a"] == pytest.approx(ours.backlogs_s(1.0)["a"])


def test_own_request_is_not_taken_for_another_deciders():
    made = router("a")
    made.route(ask("r"), 1.0)
    before = made.backlogs_s(1.0)
    made.report(report(arrived=(arrival("r"),)), 1.0)
    made.report(report(in_flight=(arrival("r"),)), 1.0)
    assert made.backlogs_s(1.0) == before and made.in_flight == 1
    made.report(report(finished=("r",)), 1.0)
    assert made.in_flight == 1, "its decider says when it is over"
    made.release("r", 1.0)
    assert empty(made)


def test_id_of_another_decider_that_comes_here_is_reserved_once():
    made = router("a")
    made.report(report(arrived=(arrival("r"),)), 1.0)
    made.route(ask("r"), 1.0)
    made.release("r", 1.0)
    assert made.in_flight == 0 and empty(made)


def test_report_of_all_in_flight_replaces_what_was_known():
    made = router("a", "b")
    made.report(report(arrived=(arrival("gone"), arrival("stays"))), 1.0)
    made.report(report("b", arrived=(arrival("elsewhere"),)), 1.0)
    made.report(report(in_flight=(arrival("stays"), arrival("new", prefilled=True))), 1.0)
    assert (made.remote_in_flight_on("a"), made.remote_in_flight_on("b")) == (2, 1)
    # A request is no backlog once its prompt is done.
    only_one = router("a", "b")
    only_one.report(report(arrived=(arrival("stays"),)), 1.0)
    assert made.backlogs_s(1.0)["a"] == pytest.approx(only_one.backlogs_s(1.0)["a"])
    made.report(report(in_flight=()), 1.0)
    assert made.remote_in_flight_on("a") == 0 and made.backlogs_s(1.0)["a"] == (0.0, 0.0)


def test_others_tell_of_requests_and_not_of_the_worker():
    made = router(announcement("a"))
    made.report(report(running=3), 1.0)
    made.others(report(arrived=(arrival("r"), arrival("s"))), 5.0)
    state = made.workers["a"]
    assert made.remote_in_flight_on("a") == 2
    assert (state.seen_s, state.report.running) == (1.0, 3), "the worker itself was not heard"
    made.others(report(arrived=(arrival("r", prefilled=True),)), 5.0)
    assert made.flights["r"].prefilled and made.remote_in_flight_on("a") == 2
    made.others(report(finished=("r", "s", "of nobody")), 6.0)
    made.others(report("gone", arrived=(arrival("t"),)), 6.0)
    assert made.in_flight == 0


@pytest.mark.parametrize("forecast", [True, False])
def test_what_is_told_of_a_request_is_worth_the_same_elsewhere(forecast):
    one, other = (router(announcement("a"), forecast=forecast) for _ in range(2))
    one.route(ask("r"), 1.0)
    (told,) = one.sent()["a"]
    assert (told.request_id, told.new_tokens, told.max_tokens) == ("r", 4000, 1)
    other.others(report(arrived=(told,)), 1.0)
    assert other.backlogs_s(1.0) == one.backlogs_s(1.0)
    assert other.sent() == {"a": ()}, "it is not its own"


def test_id_that_two_workers_report_counts_once_where_it_began():
    made = router("a", "b")
    made.report(report("a", arrived=(arrival("r"),)), 1.0)
    made.report(report("b", arrived=(arrival("r"),)), 1.0)
    made.report(report("b", finished=("r",)), 1.0)
    assert (made.remote_in_flight_on("a"), made.remote_in_flight_on("b")) == (1, 0)
    made.report(report("a", finished=("r",)), 1.0)
    assert made.in_flight == 0 and empty(made)


@pytest.mark.parametrize("how", ["leave", "invalidate"])
def test_worker_that_goes_takes_the_others_requests_along(how):
    made = router("a", "b")
    made.report(report(arrived=(arrival("r"), arrival("s"))), 1.0)
    made.leave("a") if how == "leave" else made.invalidate("a", 1.0)
    assert made.in_flight == 0
    if how == "invalidate":
        assert made.backlogs_s(1.0)["a"] == (0.0, 0.0)
        made.report(report(in_flight=(arrival("r"),)), 1.0)
        assert made.remote_in_flight_on("a") == 1, "reported again, known again"


def test_uninformed_request_of_another_decider_counts_as_one():
    made = router("a", "b")
    made.report(report(arrived=(Arrival("r"),)), 1.0)
    assert made.explain(ask("x"), 1.0).worker == "b"


def test_former_workers_word_on_a_moved_request_is_not_believed():
    made = router("a", "b")
    first = made.route(ask("r"), 1.0).worker
    second = ({"a", "b"} - {first}).pop()
    made.route(replace(ask("r"), exclude=frozenset({first}), retry=True), 1.0)
    waiting = made.backlogs_s(1.0)[second]
    made.report(report(first, admitted=(Admission("r", 0, 0, 10),), prefilled=("r",)), 1.0)
    assert made.backlogs_s(1.0)[second] == waiting


@pytest.mark.parametrize("wrong", [{"new_tokens": -1}, {"host_tokens": 1.5}, {"max_tokens": "9"}])
def test_arrival_that_counts_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkerReport.from_dict(report().to_dict() | {"arrived": [{"request_id": "r", **wrong}]})


# -- herding ------------------------------------------------------------------------------------


def waits_s(count, *, reporting=True, spread=True, forecast=False, delay_s=0.002, requests=1200):
    """Seconds that each request waited for its first-come worker, at a load of 0.8.

    `count` routers share 8 workers; a decision reaches its worker after `delay_s`, and a worker's
    report every router. reporting: workers report arrivals and ends; if not, admissions and
    prefills only, which mean nothing to a router that does not know the request.
    """
    workers, loop, rng = [f"w{i}" for i in range(8)], Loop(), np.random.default_rng(0)
    routers = [
        router(*workers, forecast=forecast, first=i / count if spread else 0.0)
        for i in range(count)
    ]
    sizes = rng.integers(1000, 8000, requests).tolist()
    service_s = [STEP.real_s([(tokens, 0)]) for tokens in sizes]
    free_s, waited_s = dict.fromkeys(workers, 0.0), []

    def decide(i):
        made = routers[int(rng.integers(count))]
        # Nothing is cached: every prompt is its own.
        request = RouteRequest(f"r{i}", np.arange(sizes[i]) + 10_000 * i, max_tokens=1)
        worker = made.route(request, loop.now_s).worker
        loop.at(loop.now_s + delay_s, serve, (i, made, worker))

    def serve(sent):
        i, made, worker = sent
        name, now_s = f"r{i}", loop.now_s
        start_s = max(now_s, free_s[worker])
        end_s = free_s[worker] = start_s + service_s[i]
        waited_s.append(start_s - now_s)
        if reporting:
            publish(worker, now_s, arrived=(Arrival(name, new_tokens=sizes[i]),))
        publish(worker, start_s, admitted=(Admission(name, 0, 0, sizes[i]),))
        publish(worker, end_s, prefilled=(name,))
        if reporting:
            publish(worker, end_s, finished=(name,))
        loop.at(end_s + delay_s, lambda _: made.release(name, loop.now_s))

    def publish(worker, at_s, **what):
        sent = report(worker, at_s, **what)
        loop.at(at_s + delay_s, lambda _: [made.report(sent, loop.now_s) for made in routers])

    gaps_s = rng.exponential(np.mean(service_s) / (0.8 * len(workers)), requests)
    for i, at_s in enumerate(np.cumsum(gaps_s).tolist()):
        loop.at(at_s, decide, i)
    loop.run()
    assert all(made.in_flight == 0 for made in routers), "a reservation leaked"
    return waited_s


@pytest.mark.parametrize("forecast", [True, False])
def test_routers_that_know_each_other_queue_less(forecast):
    def mean_s(count, **options):
        return float(np.mean(waits_s(count, forecast=forecast, **options)))

    one, two, blind = mean_s(1), mean_s(2), mean_s(2, reporting=False)
    same_order = mean_s(2, spread=False)
    assert two < 1.6 * one, "two deciders decide almost as well as one"
    assert blind > 1.3 * two, "what workers report is worth something"
    assert same_order > two, "and so is breaking ties differently"
