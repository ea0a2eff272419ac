"""The fleet's arithmetic: what a request costs where, and queues that come and go."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kappa.hardware import NodeProfile
from kappa.step_seconds import FACTORS
from kappa_router.calibration import Calibration
from kappa_router.decision import Held, PricedPrompt
from kappa_router.fleet import Fleet
from tests.router.building import NEVER, announcement, estimate, fleet_of, join


def test_order_may_begin_elsewhere_and_everything_follows_it():
    made = Fleet(first=0.5)
    for i, node in enumerate(("h100-pcie5", "gh200-c2c", "pcie", "c2c")):
        join(made, announcement(f"w{i}", node))
    estimates = estimate(made)
    assert estimates.workers == ["w2", "w3", "w0", "w1"]
    names = [node.name for node in estimates.nodes]
    assert names == ["pcie", "c2c", "h100-pcie5", "gh200-c2c"]
    with pytest.raises(ValueError, match=r"first is 1\.0"):
        Fleet(first=1.0)


def test_queue_shrinks_by_no_more_than_the_engine_can_do():
    made = fleet_of("h100-pcie5")
    one_s = float(estimate(made, tokens=8000).work_s[0])
    a = made.reserve("a", estimate(made, tokens=8000), 0)
    made.reserve("b", estimate(made, tokens=8000), 0)
    assert estimate(made, now_s=one_s / 2).gpu_backlog_s[0] == pytest.approx(1.5 * one_s)
    # The first one is late: all that is known is that one of two is still to be done.
    assert estimate(made, now_s=50.0).gpu_backlog_s[0] == pytest.approx(one_s)
    made.prefilled(a, 50.0)
    assert estimate(made, now_s=50.0).gpu_backlog_s[0] == pytest.approx(one_s)


def test_corrected_head_of_a_queue_counts_as_done_when_late():
    made = fleet_of("h100-pcie5")
    a, b = (made.reserve(name, estimate(made, tokens=8000), 0) for name in "ab")
    for flight in (a, b):
        made.correct(flight, 0, 4000)
        # The first one is late: it may be done, and nothing of the second.
        assert estimate(made, now_s=50.0).gpu_backlog_s[0] == pytest.approx(b.gpu_s)


def busy(made, *workers, prompts=30):
    for worker in workers:
        for i in range(prompts):
            estimates = estimate(made, tokens=20_000)
            made.reserve(f"{worker}{i}", estimates, estimates.workers.index(worker))


def test_interference_counts_less_when_every_worker_is_late():
    one, both = fleet_of("pcie", "pcie"), fleet_of("pcie", "pcie")
    busy(one, "w0")
    busy(both, "w0", "w1")
    alone_s, together_s = estimate(one).interference_s, estimate(both).interference_s
    assert 0 < alone_s[1] < 0.001 * alone_s[0], "nothing is in flight on the other"
    assert together_s[0] == together_s[1] and 0 < together_s[0] < 0.2 * alone_s[0]


def test_speed_without_factors_is_its_constants_alone():
    made = fleet_of("h100-pcie5")
    speed, alone_s = Calibration(announcement("w0", "h100-pcie5")).speed, estimate(made).work_s[0]
    made.calibrate("w0", replace(speed, factors=(math.log(2.0),) * FACTORS), 0.0)
    assert estimate(made).work_s[0] == pytest.approx(2 * alone_s)
    made.calibrate("w0", replace(speed, factors=()), 0.0)
    assert estimate(made).work_s[0] == alone_s


def test_places_are_stable_while_others_come_and_go():
    made = fleet_of("h100-pcie5", "gh200-c2c", "a100-pcie4")
    kept = made.slot("w2")
    made.reserve("a", estimate(made), 0)
    made.leave("w0")
    assert made.slot("w2") == kept and len(made) == 2
    estimates = estimate(made)
    assert estimates.workers == ["w1", "w2"] and estimates.in_flight.sum() == 0
    join(made, announcement("w3"), 1.0)
    assert estimate(made).workers == ["w3", "w1", "w2"]
    for i in range(20):
        join(made, announcement(f"x{i}"), 1.0)
    assert len(estimate(made)) == 23


def test_silent_and_excluded_workers_are_not_offered():
    made = fleet_of()
    made.reported("w1", 20.0, 0.0)
    names = [made.names[s] for s in made.ready(25.0, 10.0, frozenset())]
    assert names == ["w1"]
    assert not len(made.ready(25.0, 10.0, frozenset({"w1", "unknown"})))


@pytest.mark.parametrize("seed", range(20))
def test_empty_fleet_has_no_queue_after_any_history(seed):
    rng, made, now_s, alive = random.Random(seed), fleet_of(), 0.0, []
    for i in range(300):
        now_s += rng.expovariate(5.0)
        if alive and rng.random() < 0.6:
            flight = rng.choice(alive)
            kind = rng.random()
            if kind < 0.3:
                made.correct(flight, rng.randrange(3000), rng.randrange(1, 3000))
            elif kind < 0.6:
                made.prefilled(flight, now_s)
            else:
                made.release(flight, now_s)
                alive.remove(flight)
        else:
            tokens = rng.randrange(3001, 60_000)
            priced = estimate(made, now_s, tokens, rng.randrange(3000))
            alive.append(made.reserve(f"r{i}", priced, rng.randrange(2)))
        estimates = estimate(made, now_s)
        for part in (estimates.link_backlog_s, estimates.gpu_backlog_s, estimates.waiting):
            assert (part >= -1e-9).all()
    for flight in alive:
        made.release(flight, now_s)
    idle = estimate(made, now_s)
    for part in ("link_backlog_s", "gpu_backlog_s", "waiting", "in_flight", "queued_tokens",
                 "resident_tokens"):  # fmt: skip
        assert getattr(idle, part) == pytest.approx([0.0, 0.0], abs=1e-6), part


def test_prefix_on_disk_costs_what_reading_it_takes_besides():
    disk = NodeProfile("d", "gpu", "link", 50e9, 1e15, 3e12, disk_bytes_per_s=2e9)
    made = Fleet()
    join(made, replace(announcement("w0", "h100-pcie5"), node=disk))
    kv_bytes = announcement("w0", "h100-pcie5").kv_bytes_per_token
    from_host, half = estimate(made, cached=1000), estimate(made, cached=1000, disk=500)
    read_s = 500 * kv_bytes / 2e9
    assert half.load_s - from_host.load_s == pytest.approx(read_s)
    assert half.ttft_s - from_host.ttft_s == pytest.approx(read_s)
    assert half.candidate(0).counts.disk_tokens == 500
    # Admitted with 200 of them on disk after all, the link is free that much sooner.
    flight = made.reserve("r", half, 0)
    made.correct(flight, 1000, 3001, 200)
    assert flight.link_s == pytest.approx(1000 * kv_bytes / 50e9 + 200 * kv_bytes / 2e9)


def fetched(made, tokens=4000.0):
    slots, wanted = made.ready(0.0, NEVER, frozenset()), np.array([0.0, tokens])
    held = Held(np.zeros(2), wanted, np.zeros(2))
    return made.estimate(slots, 0.0, PricedPrompt(5000, 100), held, ("w0", wanted))


def with_network():
    made = Fleet()
    for name in ("w0", "w1"):
        join(made, announcement(name, net_bytes_per_s=25e9))
    return made


def test_fetch_takes_for_ever_where_there_is_no_room_for_it():
    made = with_network()
    assert fetched(made).fetch_s.tolist() == [0.0, np.inf]
    made.reported("w1", 0.0, 4000.0)
    offer = fetched(made)
    assert offer.fetch_s[1] == pytest.approx(4000 * 131072 / 25e9)
    assert np.isinf(fetched(made, 4001.0).ttft_s[1])


def test_transfer_keeps_both_ends_busy_until_it_is_done():
    made = fleet_of()
    slots = made.ready(1.0, NEVER, frozenset())
    made.transfer(slots[:1], 2.0, 1.0)
    made.transfer(slots, 3.0, 1.0)
    # The second one waits for the first: until 1 + 2 + 3.
    assert estimate(made, 1.5).net_backlog_s.tolist() == [4.5, 4.5]
    assert estimate(made, 9.0).net_backlog_s.tolist() == [0.0, 0.0]


def test_room_that_others_were_promised_stays_promised():
    made = with_network()
    made.reported("w1", 0.0, 9000.0)
    a = made.reserve("a", fetched(made), 1)
    made.reserve("b", fetched(made, 1000.0), 1)
    made.prefilled(a, 1.0)
    # The first one's 4,000 are used up, and 1,000 of 9,000 are still to come.
    assert np.isfinite(fetched(made, 8000.0).ttft_s[1])
    assert np.isinf(fetched(made, 8001.0).ttft_s[1])


def test_worker_that_did_not_say_runs_any_number_at_a_time():
    made = Fleet()
    join(made, announcement("w0"))
    join(made, announcement("w1", max_sequences=3))
    slots = made.ready(0.0, NEVER, frozenset())
    assert [made.records["max_sequences"][slot] for slot in slots] == [np.inf, 3.0]
