"""The fleet's arithmetic: what a request costs where, and queues that come and go."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from router.fleet import Fleet

SHAPE = model_shape("llama-3.1-8b")
NEVER = float("inf")


def announcement(worker, node="h100-pcie5", **changes):
    profile = node_profile(node)
    said = Announcement(
        worker=worker, model="m", node=profile, step=step_model(SHAPE, profile),
        kv_bytes_per_token=131072.0, emulated_model="", fingerprint="f", block_tokens=16,
        device_blocks=20_001, host_blocks=0, max_batch_tokens=8192, max_context_tokens=200_000,
        events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip
    return replace(said, **changes)


def fleet(*nodes):
    made = Fleet()
    for i, node in enumerate(nodes or ("h100-pcie5", "gh200-c2c")):
        made.join(announcement(f"w{i}", node), 0.0)
    return made


def ask(made, now_s=0.0, tokens=4000, cached=0, device=0):
    slots = made.ready(now_s, NEVER, frozenset())
    n = len(slots)
    return made.price(
        slots, now_s, prompt_tokens=tokens, output_tokens=100,
        device_tokens=np.full(n, float(device)), cached_tokens=np.full(n, float(cached)),
    )  # fmt: skip


def test_the_order_may_begin_elsewhere_and_everything_follows_it():
    made = Fleet(first=0.5)
    for i, node in enumerate(("h100-pcie5", "gh200-c2c", "pcie", "c2c")):
        made.join(announcement(f"w{i}", node), 0.0)
    offers = ask(made)
    assert offers.workers == ["w2", "w3", "w0", "w1"]
    names = [profile.name for profile in made.profiles(offers.slots)]
    assert names == [made.profiles(offers.slots[i : i + 1])[0].name for i in range(4)]
    assert [made.place(f"w{i}", offers.slots) for i in range(4)] == [2, 3, 0, 1]
    with pytest.raises(ValueError, match=r"first is 1\.0"):
        Fleet(first=1.0)


def test_an_idle_prefill_lasts_as_long_as_its_steps():
    made = fleet("h100-pcie5")
    step = step_model(SHAPE, node_profile("h100-pcie5"))
    one = ask(made, tokens=4000)
    assert one.compute_s[0] == pytest.approx(step.step_s([(4000, 0)]))
    # 20,000 tokens take three steps: pairs add up to the same triangle.
    three = ask(made, tokens=20_000)
    exact_s = sum(step.step_s([(new, at)]) for new, at in ((8192, 0), (8192, 8192), (3616, 16384)))
    assert three.compute_s[0] == pytest.approx(exact_s, rel=0.01)


def test_a_load_crosses_the_link_at_its_rate():
    offers = ask(fleet(), tokens=10_100, cached=10_000)
    rates = [63e9, 450e9]
    assert offers.load_s == pytest.approx([10_000 * 131072 / rate for rate in rates])
    assert offers.new_tokens.tolist() == [100.0, 100.0]


def test_reserved_work_is_a_queue_until_its_prompt_is_done():
    made = fleet("h100-pcie5")
    first = ask(made, tokens=8000, cached=6000)
    made.reserve("a", first, 0)
    made.reserve("b", ask(made, tokens=8000, cached=6000), 0)
    queued = ask(made)
    assert queued.link_backlog_s[0] == pytest.approx(2 * first.load_s[0])
    assert queued.gpu_backlog_s[0] == pytest.approx(2 * first.work_s[0])
    assert queued.waiting[0] == queued.in_flight[0] == 2
    made.prefilled("a", 1.0)
    made.prefilled("b", 1.0)
    done = ask(made, now_s=1.0)
    assert done.link_backlog_s[0] == done.gpu_backlog_s[0] == done.waiting[0] == 0
    assert done.in_flight[0] == 2 and done.resident_tokens[0] == 16_000


def test_a_queue_shrinks_with_time_by_no_more_than_the_engine_can_have_done():
    made = fleet("h100-pcie5")
    one_s = float(ask(made, tokens=8000).work_s[0])
    made.reserve("a", ask(made, tokens=8000), 0)
    made.reserve("b", ask(made, tokens=8000), 0)
    assert ask(made, now_s=one_s / 2).gpu_backlog_s[0] == pytest.approx(1.5 * one_s)
    # The first one is late: nobody knows more than that one of two is still to be done.
    assert ask(made, now_s=50.0).gpu_backlog_s[0] == pytest.approx(one_s)
    made.prefilled("a", 50.0)
    assert ask(made, now_s=50.0).gpu_backlog_s[0] == pytest.approx(one_s)


def test_what_was_priced_does_not_change_when_it_is_reserved():
    made = fleet()
    offers = ask(made)
    made.reserve("a", offers, 0)
    assert offers.in_flight.tolist() == [0.0, 0.0]


def test_use_fades_and_follows_the_work_received():
    made = fleet("h100-pcie5")
    work_s = 0.0
    for i in range(400):
        now_s = i * 0.1
        offers = ask(made, now_s, tokens=4000, cached=3000)
        work_s = float(offers.work_s[0])
        made.reserve(f"r{i}", offers, 0)
        made.prefilled(f"r{i}", now_s)
        made.release(f"r{i}", now_s)
    assert ask(made, 40.0).gpu_use[0] == pytest.approx(work_s / 0.1, rel=0.15)
    assert ask(made, 400.0).gpu_use[0] < 1e-6


def test_an_admission_corrects_what_was_reserved():
    made = fleet("h100-pcie5")
    made.reserve("a", ask(made, tokens=8000, cached=7000), 0)
    made.correct("a", 0, 8000)
    offers, fresh = ask(made), ask(fleet("h100-pcie5"), tokens=8000)
    assert offers.gpu_backlog_s[0] == pytest.approx(fresh.work_s[0])
    assert offers.link_backlog_s[0] == 0 and offers.queued_tokens[0] == 8000


def busy(made, *workers, prompts=30):
    for worker in workers:
        for i in range(prompts):
            offers = ask(made, tokens=20_000)
            made.reserve(f"{worker}{i}", offers, offers.workers.index(worker))


def test_the_crowd_counts_less_on_all_alike_when_the_soonest_first_token_is_late():
    idle, one, both = fleet("pcie", "pcie"), fleet("pcie", "pcie"), fleet("pcie", "pcie")
    busy(one, "w0")
    busy(both, "w0", "w1")
    plain_s = ask(idle).decode_s
    assert ask(one).decode_s.tolist() == plain_s.tolist(), "the other is idle"
    fewer = ask(both).decode_s / plain_s
    assert fewer[0] == fewer[1] and 0 < fewer[0] < 0.2
    busy(both, "w0", "w1")
    assert ask(both).decode_s[0] == pytest.approx(fewer[0] * plain_s[0] / 2, rel=0.1)


def test_calibration_scales_prices():
    made = fleet("h100-pcie5")
    before = ask(made, tokens=8000, cached=6000)
    made.calibrate(announcement("w0"), link_scale=3.0, compute_scale=2.0, overhead_s=0.5)
    after = ask(made, tokens=8000, cached=6000)
    assert after.load_s == pytest.approx(3 * before.load_s)
    assert after.compute_s == pytest.approx(2 * before.compute_s)
    assert after.ttft_s == pytest.approx(0.5 + after.load_s + after.compute_s)


def test_columns_are_stable_while_others_come_and_go():
    made = fleet("h100-pcie5", "gh200-c2c", "a100-pcie4")
    kept = made.slot("w2")
    made.reserve("a", ask(made), 0)
    made.leave("w0")
    assert made.slot("w2") == kept and len(made) == 2
    offers = ask(made)
    assert offers.workers == ["w1", "w2"] and offers.in_flight.sum() == 0
    made.join(announcement("w3"), 1.0)
    assert ask(made).workers == ["w3", "w1", "w2"]
    assert made.place("w2", made.ready(1.0, NEVER, frozenset())) == 2
    assert made.place("w0", made.ready(1.0, NEVER, frozenset())) == -1
    made.release("a", 2.0)  # Of a worker that is gone: nothing happens.
    for i in range(20):
        made.join(announcement(f"x{i}"), 1.0)
    assert len(ask(made)) == 23


def test_silent_and_excluded_workers_are_not_offered():
    made = fleet()
    made.seen("w1", 20.0)
    names = [made.workers[s] for s in made.ready(25.0, 10.0, frozenset())]
    assert names == ["w1"]
    assert not len(made.ready(25.0, 10.0, frozenset({"w1", "unknown"})))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_an_empty_fleet_has_no_queue(seed):
    rng, made, now_s, alive = random.Random(seed), fleet(), 0.0, []
    for i in range(300):
        now_s += rng.expovariate(5.0)
        if alive and rng.random() < 0.6:
            name = rng.choice(alive)
            kind = rng.random()
            if kind < 0.3:
                made.correct(name, rng.randrange(3000), rng.randrange(1, 3000))
            elif kind < 0.6:
                made.prefilled(name, now_s)
            else:
                made.release(name, now_s)
                alive.remove(name)
        else:
            tokens = rng.randrange(3001, 60_000)
            made.reserve(f"r{i}", ask(made, now_s, tokens, rng.randrange(3000)), rng.randrange(2))
            alive.append(f"r{i}")
        offers = ask(made, now_s)
        for part in (offers.link_backlog_s, offers.gpu_backlog_s, offers.waiting):
            assert (part >= -1e-9).all()
    for name in alive:
        made.release(name, now_s)
    idle = ask(made, now_s)
    for part in ("link_backlog_s", "gpu_backlog_s", "waiting", "in_flight", "queued_tokens",
                 "resident_tokens"):  # fmt: skip
        assert getattr(idle, part) == pytest.approx([0.0, 0.0], abs=1e-6), part


def fetched(made, tokens=4000.0):
    slots = made.ready(0.0, NEVER, frozenset())
    wanted = np.array([0.0, tokens])
    return made.price(
        slots, 0.0, prompt_tokens=5000, output_tokens=100, device_tokens=np.zeros(2),
        cached_tokens=wanted, fetch_tokens=wanted, fetch_from="w0",
    )  # fmt: skip


def with_network():
    made = Fleet()
    for name in ("w0", "w1"):
        made.join(announcement(name, net_bytes_per_s=25e9, host_blocks=1000), 0.0)
    return made


def test_a_fetch_takes_for_ever_where_there_is_no_room_for_it():
    made = with_network()
    assert fetched(made).fetch_s.tolist() == [0.0, np.inf]
    made.spare("w1", 4000.0)
    offer = fetched(made)
    assert offer.fetch_s[1] == pytest.approx(4000 * 131072 / 25e9)
    assert np.isinf(fetched(made, 4001.0).ttft_s[1])


def test_room_is_promised_until_the_request_has_used_it():
    made = with_network()
    made.spare("w1", 6000.0)
    made.reserve("a", fetched(made), 1)
    assert np.isinf(fetched(made).ttft_s[1])
    made.prefilled("a", 1.0)
    assert np.isfinite(fetched(made).ttft_s[1])
    made.promise("w1", 3000.0)
    assert np.isinf(fetched(made).ttft_s[1])
    made.promise("w1", -5000.0)
    made.promise("gone", 1.0)
    assert np.isfinite(fetched(made, 6000.0).ttft_s[1])
    assert np.isinf(fetched(made, 6001.0).ttft_s[1])


def test_a_device_holds_one_block_less_than_it_has():
    # Engines keep the first of 20,001 blocks of 16 tokens empty.
    assert ask(fleet("h100-pcie5")).capacity_tokens.tolist() == [20_000 * 16]


def test_a_transfer_keeps_the_cards_of_both_ends_busy_until_it_is_done():
    made = with_network()
    slots = made.ready(0.0, NEVER, frozenset())
    made.transfer(slots[:1], 2.0, 0.0)
    made.transfer(slots, 3.0, 0.0)
    # The second one waits for the first.
    assert fetched(made).net_backlog_s.tolist() == [5.0, 5.0]


def test_room_that_others_were_promised_stays_promised():
    made = with_network()
    made.spare("w1", 6000.0)
    made.reserve("a", fetched(made), 1)
    made.promise("w1", 1000.0)
    made.prefilled("a", 1.0)
    # The request's 4,000 are used up, and 1,000 of 6,000 are still to come.
    assert np.isfinite(fetched(made, 5000.0).ttft_s[1])
    assert np.isinf(fetched(made, 5001.0).ttft_s[1])
