"""The router as a whole: what it reserves, gives back, prices and refuses."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kappa.model import gemm_flops
from kappa.protocol import Admission, WorkerReport
from kappa_router.config import RouterConfig
from kappa_router.decision import NoWorkerError, RouteRequest, without_candidates
from kappa_router.policy import LeastTtft, policy_named
from kappa_router.router import Router
from tests.router.building import (
    KV_BYTES,
    NEVER,
    SHAPE,
    SIZE,
    announcement,
    ask,
    hasher_of,
    outcome,
    prompt,
    router,
    stored,
)

# -- reservations -------------------------------------------------------------------------------


def test_reservation_is_released_once():
    made = router("a")
    assert made.route(ask(), 1.0).worker == "a"
    assert made.reservations == made.in_flight_on("a") == len(made.workers["a"].queue) == 1
    assert made.release("r", 2.0)
    assert not made.release("r", 2.0)
    assert made.reservations == len(made.workers["a"].queue) == 0


def test_id_that_is_routed_again_holds_one_reservation():
    made = router("a", "b")
    first = made.route(ask(), 1.0)
    second = made.route(ask(exclude=frozenset({first.worker})), 1.0)
    assert second.worker != first.worker
    assert made.reservations == 1
    assert len(made.workers[first.worker].queue) == 0


def test_first_token_is_counted_once():
    made = router("a")
    made.route(ask(), 1.0)
    assert made.first_token("r", 1.5) == pytest.approx(0.5)
    assert made.first_token("r", 1.6) is None
    assert made.first_token("unknown", 1.6) is None
    assert [job.decoding for job in made.workers["a"].queue._jobs.values()] == [True]


def test_output_lengths_are_learnt_from_complete_streams_only():
    made = router("a")
    for name, count, complete in (("x", 7, True), ("y", 900, False), ("z", 0, True)):
        made.route(ask(name), 1.0)
        made.tokens(name, count)
        made.release(name, 2.0, complete=complete)
    made.tokens("gone", 5)
    assert made.models["m"].outputs.guess(0) == 7
    assert made.models["m"].outputs.guess(3) == 3


def test_crowded_request_teaches_less_than_a_lone_one():
    made = router("a", stale_after_s=100.0)
    calibration = made.workers["a"].calibration
    for i in range(12):
        made.route(ask(f"r{i}", seed=i), 1.0 + i)
        made.route(ask(f"s{i}", seed=100 + i), 1.0 + i)
        made.first_token(f"r{i}", 1.1 + i)
        made.first_token(f"s{i}", 1.9 + i)
        made.release(f"r{i}", 1.95 + i)
        made.release(f"s{i}", 1.95 + i)
    # Half of them took 0.1 s, and those that came behind them 0.9 s.
    assert 0.08 < calibration.overhead_s < 0.3


# -- prices -------------------------------------------------------------------------------------


def test_idle_worker_is_priced_by_load_and_compute():
    made = router("a")
    made.blocks([stored("a", prompt(160)), stored("a", prompt(320), tier="host")])
    chosen = made.explain(ask(tokens=400), 1.0).chosen
    counts = chosen.counts
    assert (counts.device_tokens, counts.cached_tokens, counts.new_tokens) == (160, 160, 80)
    assert chosen.load_s == pytest.approx(160 * KV_BYTES / 54e9)
    announced = announcement("a")
    assert chosen.compute_s == pytest.approx(announced.step.real_s([(80, 320)]))
    assert chosen.ttft_s == pytest.approx(chosen.load_s + chosen.compute_s, abs=1e-6)
    assert chosen.queue_s == pytest.approx(0.0, abs=1e-6)
    assert (chosen.tpot_impact_s, chosen.backlog_s, chosen.in_flight) == (0.0, 0.0, 0)
    # As many tokens as could be loaded while 80 are computed, over these.
    assert chosen.kappa_crit == pytest.approx(chosen.compute_s * 54e9 / (KV_BYTES * 80))
    assert chosen.bound == "compute"
    # Products reach 0.711 of the data sheet's FLOP/s.
    rate = 0.711 * 989e12
    literal = gemm_flops(SHAPE) * 54e9 / (rate * KV_BYTES)
    assert announced.kappa_literal == pytest.approx(literal)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 100, 160])
def test_one_token_at_least_is_left_to_compute(tokens, tier):
    made = router("a")
    made.blocks([stored("a", prompt(160)), stored("a", prompt(160), tier=tier)])
    made.blocks([stored("a", prompt(64))])
    counts = made.explain(ask(tokens=tokens), 1.0).chosen.counts
    assert counts.total_tokens == tokens
    assert 1 <= counts.new_tokens <= SIZE


def test_empty_prompt_is_priced_as_one_token():
    assert router("a").explain(ask(tokens=0), 1.0).chosen.counts.new_tokens == 1


def test_worker_that_holds_the_prompt_is_chosen():
    made = router("a", "b")
    made.blocks([stored("b", prompt(1600))])
    decision = made.route(ask(tokens=1700), 1.0)
    assert (decision.worker, decision.reason) == ("b", "less_compute")
    assert decision.kind == "device"
    assert without_candidates(decision).candidates == ()


def test_decision_names_the_soonest_of_the_others():
    made = router("a", announcement("b", "gh200-c2c"), announcement("c", "a100-pcie4"))
    made.blocks([stored("c", prompt(1600))])
    decision = made.route(ask(tokens=1700), 1.0)
    by_worker = {one.worker: one for one in decision.candidates}
    assert decision.worker == "c"
    other = min((by_worker["a"], by_worker["b"]), key=lambda one: one.ttft_s)
    assert decision.soonest_other == (other.node.name, other.ttft_s)
    assert without_candidates(decision).soonest_other is None
    assert router("a").route(ask(), 1.0).soonest_other is None


def test_salt_sets_prompts_apart():
    made = router("a")
    made.blocks([stored("a", prompt(160))])
    assert made.explain(ask(tokens=170, salt=5), 1.0).chosen.counts.device_tokens == 0


def test_busy_worker_is_avoided():
    made = router("a", "b")
    first = made.route(ask("x", tokens=5000), 1.0)
    second = made.route(ask("y", tokens=5000, seed=1), 1.0)
    assert first.worker != second.worker
    assert second.reason == "shorter_queue"


def test_prediction_includes_the_overhead():
    made = router("a", stale_after_s=NEVER)
    before_s = made.explain(ask(), 1.0).chosen.ttft_s
    for i in range(20):
        outcome(made, 0.4, 2.0 + i)
    after = made.explain(ask(), 30.0).chosen
    assert after.ttft_s == pytest.approx(before_s + 0.4, rel=0.05)
    assert after.queue_s == pytest.approx(0.0, abs=1e-6)


def test_explaining_reserves_nothing_and_changes_no_prediction():
    explained, quiet = router("a", "b"), router("a", "b")
    for i in range(8):
        at_s = 1.0 + 0.003 * i
        for made in (explained, quiet):
            made.route(ask(f"r{i}", tokens=3000, seed=i), at_s)
        for k in range(5):
            explained.explain(ask("other", tokens=500 * k + 1, seed=99), at_s + 0.0005 * k)
        assert explained.reservations == quiet.reservations == i + 1
    for worker, state in explained.workers.items():
        assert len(state.queue) == explained.in_flight_on(worker) == quiet.in_flight_on(worker)
    ours, theirs = (m.explain(ask("x", seed=50), 1.05) for m in (explained, quiet))
    assert [c.ttft_s for c in ours.candidates] == pytest.approx(
        [c.ttft_s for c in theirs.candidates], abs=1e-9
    )


# -- who may be chosen --------------------------------------------------------------------------


def test_excluded_worker_is_not_chosen():
    assert router("a", "b").route(ask(exclude=frozenset({"a"})), 1.0).worker == "b"


def test_silent_worker_is_not_chosen_until_it_reports():
    made = router("a", "b", stale_after_s=10.0)
    made.report(WorkerReport("b", 5.0), 5.0)
    assert [c.worker for c in made.explain(ask(), 12.0).candidates] == ["b"]
    made.report(WorkerReport("a", 12.0), 12.0)
    assert len(made.explain(ask(), 12.0).candidates) == 2


def test_error_counts_known_excluded_and_silent_workers():
    with pytest.raises(NoWorkerError, match=r"0 known"):
        Router(RouterConfig(policy=policy_named("ttft"), secret=1)).route(ask(), 1.0)
    made = router("a", "b", "c")
    made.report(WorkerReport("c", 40.0), 40.0)
    with pytest.raises(NoWorkerError, match=r"3 known, 1 excluded, 2 not heard from .* 10 s"):
        made.route(ask(exclude=frozenset({"c"})), 45.0)
    assert made.reservations == 0


@pytest.mark.parametrize("policy", ["ttft", "threshold"])
def test_request_without_tokens_goes_to_the_least_backlog(policy):
    made = router("a", "b", policy=policy)
    busy = made.route(ask("x", tokens=9000), 1.0).worker
    decision = made.route(ask("y", tokens=None), 1.0)
    assert decision.worker != busy
    assert (decision.reason, decision.policy) == ("uninformed_least_backlog", "least_backlog")
    assert not decision.informed and decision.prompt_tokens == 0
    made.first_token("y", 1.5)
    calibration = made.workers[decision.worker].calibration
    assert calibration.overhead_s == 0.0 and calibration.compute_scale == 1.0
    assert made.release("y", 2.0)


def test_admission_corrects_the_prediction_for_others():
    made = router("a")
    made.route(ask("x", tokens=20_000), 1.0)
    before_s = made.explain(ask("y", seed=1), 1.01).chosen.queue_s
    admitted = (Admission("x", 19_984, 0, 16),)
    made.report(WorkerReport("a", 1.01, admitted=admitted), 1.01)
    assert made.explain(ask("y", seed=1), 1.01).chosen.queue_s < before_s / 5


# -- whatever happens ---------------------------------------------------------------------------


class Reservations(RuleBasedStateMachine):
    """Requests in flight are those routed, less those released or lost, on each worker."""

    def __init__(self):
        super().__init__()
        self.made = router("a", "b", stale_after_s=1e9)
        self.now_s = 1.0
        self.flying: dict[str, str] = {}
        self.count = 0

    def tick(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.made.workers)
    @rule(tokens=st.integers(0, 900), seed=st.integers(0, 3), known=st.booleans())
    def route(self, tokens, seed, known):
        name = f"r{self.count}"
        self.count += 1
        decision = self.made.route(ask(name, tokens if known else None, seed), self.now_s)
        self.flying[name] = decision.worker
        for candidate in decision.candidates:
            counts = candidate.counts
            assert counts.device_tokens + counts.cached_tokens <= max(tokens - 1, 0)
            assert counts.new_tokens >= 1
            assert candidate.ttft_s > 0
            assert min(candidate.queue_s, candidate.tpot_impact_s, candidate.backlog_s) >= 0

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def route_again(self, data):
        name = data.draw(st.sampled_from(sorted(self.flying)))
        self.flying[name] = self.made.route(ask(name, 50), self.now_s).worker

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds):
        self.tick(seconds)

    @rule(worker=st.sampled_from("abc"))
    def join(self, worker):
        self.made.join(announcement(worker, "gh200-c2c" if worker == "c" else "h100-pcie5"), 1.0)

    @rule(worker=st.sampled_from("abc"))
    def leave(self, worker):
        lost = self.made.leave(worker)
        assert sorted(lost) == sorted(r for r, at in self.flying.items() if at == worker)
        for name in lost:
            del self.flying[name]

    @rule(worker=st.sampled_from("abc"), tokens=st.integers(0, 900), seed=st.integers(0, 3),
          tier=st.sampled_from(["device", "host"]))  # fmt: skip
    def store(self, worker, tokens, seed, tier):
        self.made.blocks([stored(worker, prompt(tokens, seed), tier)])

    @rule(data=st.data(), device=st.integers(0, 500), host=st.integers(0, 500))
    def report(self, data, device, host):
        name = data.draw(st.sampled_from([*sorted(self.flying), "unknown"]))
        worker = self.flying.get(name, "a")
        admitted = (Admission(name, device, host, 9),)
        prefilled = data.draw(st.sampled_from([(), (name,)]))
        report = WorkerReport(worker, self.now_s, admitted=admitted, prefilled=prefilled)
        self.made.report(report, self.now_s)

    @rule(data=st.data())
    def first_token(self, data):
        name = data.draw(st.sampled_from([*sorted(self.flying), "unknown"]))
        self.made.first_token(name, self.now_s)

    @rule(data=st.data(), complete=st.booleans())
    def release(self, data, complete):
        name = data.draw(st.sampled_from([*sorted(self.flying), "unknown"]))
        released = self.made.release(name, self.now_s, complete=complete)
        assert released == (self.flying.pop(name, None) is not None)

    @invariant()
    def all_is_accounted_for(self):
        assert self.made.reservations == len(self.flying)
        for worker, state in self.made.workers.items():
            here = sum(at == worker for at in self.flying.values())
            assert len(state.queue) == self.made.in_flight_on(worker) == here


TestReservations = Reservations.TestCase
TestReservations.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# -- peers' caches and hashes from outside ------------------------------------------------------


def fetching(net_bytes_per_s, spare_blocks=10_000, policy="priced_fetch"):
    made = Router(RouterConfig(policy=policy_named(policy), secret=7, forecast_workers=0))
    for worker in ("a", "b"):
        made.join(announcement(worker, net_bytes_per_s=net_bytes_per_s), 0.0)
    made.report(WorkerReport("b", 0.5, host_spare_blocks=spare_blocks), 0.5)
    made.blocks([stored("a", prompt(20_000), tier="device")])
    made.index.hold("a", "host", hasher_of(made).prefix_hashes(prompt(20_000)))
    for i in range(6):
        made.route(ask(f"busy{i}", tokens=25_000, seed=50 + i, exclude=frozenset({"b"})), 1.0)
    return made


def test_prefix_is_fetched_from_a_busy_peer():
    decision = fetching(25e9).route(ask(tokens=20_000), 1.0)
    assert (decision.worker, decision.reason) == ("b", "peer_fetch")
    assert decision.fetch.source_worker == "a" and decision.fetch.tokens > 19_000
    assert decision.chosen.counts.cached_tokens == decision.fetch.tokens


def test_fetch_needs_a_network_and_a_policy_that_fetches():
    assert fetching(0.0).route(ask(tokens=20_000), 1.0).fetch is None
    made = fetching(25e9)
    made.config = replace(made.config, policy=policy_named("priced"))
    assert made.route(ask(tokens=20_000), 1.0).fetch is None


def test_fetch_needs_room_beside_what_was_promised():
    blocks = 20_000 // SIZE
    assert fetching(25e9, spare_blocks=0).route(ask(tokens=20_000), 1.0).fetch is None
    made = fetching(25e9, spare_blocks=blocks + blocks // 2)
    assert made.route(ask("first", tokens=20_000), 1.0).fetch is not None
    assert made.route(ask("second", tokens=20_000), 1.0).fetch is None
    # The first one is over, and its room is free again.
    made.release("first", 1.0)
    assert made.route(ask("third", tokens=20_000), 1.0).fetch is not None


def test_hashes_from_outside_are_as_good_as_token_ids():
    made = router("a", "b", forecast_workers=0)
    hashes = hasher_of(made).prefix_hashes(prompt(1600))
    made.index.hold("b", "host", hashes[:50])
    request = RouteRequest("r", prefix_hashes=hashes, prompt_tokens=1600, max_tokens=5)
    chosen = made.route(request, 1.0).chosen
    assert (chosen.worker, chosen.counts.cached_tokens, chosen.counts.new_tokens) == ("b", 800, 800)


def test_large_pool_is_priced_without_forecasts():
    small = router(*"abcd")
    large = router(*"abcde")
    for made in (small, large):
        made.route(ask("x", tokens=5000), 1.0)
    assert sum(len(s.queue) for s in small.workers.values()) == 1
    assert sum(len(s.queue) for s in large.workers.values()) == 0
    link_s, gpu_s = large.backlogs_s(1.0)[large.route(ask("y", tokens=5000), 1.0).worker]
    assert (link_s, gpu_s) == (0.0, 0.0)
    assert max(gpu for _, gpu in large.backlogs_s(1.0).values()) > 0


_FIRST_REQUEST = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from kappa_router.decision import RouteRequest
from tests.router.building import ask, prompt, router

def loops():
    return {
        f"{name}.{key}": len(value.signatures)
        for name, module in sys.modules.items() if name.split(".")[0] in ("kappa_router", "kappa")
        for key, value in vars(module).items() if isinstance(value, Dispatcher)
    }

options = {"policy": "priced_fetch", "admission": True, "forecast_workers": 0}
made = router("w0", "w1", "w2", **options)
before = loops()
assert sum(before.values()) > 5, before
made.route(ask("array", tokens=1000), 1.0)
made.route(RouteRequest("list", prompt(5000).tolist(), max_tokens=10), 1.0)
made.route(RouteRequest("narrow", prompt(500).astype(np.int32), max_tokens=10), 1.0)
made.fleet.backlog_s("w0", 2.0)
assert loops() == before, (before, loops())
"""


def test_first_request_waits_for_no_compiler():
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_REQUEST], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- what a policy remembers --------------------------------------------------------------------


class Recording(LeastTtft):
    """Keeps where requests went."""

    def __init__(self):
        self.went = []

    def routed(self, estimates, index, request_id=""):
        self.went.append((estimates.workers[index], estimates.prompt_tokens))

    def progressed(self, request_id, now_s, *, ended):
        self.went.append((request_id, now_s, ended))


def test_policy_learns_where_informed_requests_went():
    policy = Recording()
    made = Router(RouterConfig(policy=policy, secret=7))
    made.join(announcement("a"), 0.0)
    made.join(announcement("b"), 0.0)
    made.route(ask("blind", tokens=None), 1.0)
    assert policy.went == []
    chosen = made.route(ask("informed", tokens=100), 1.0).worker
    assert policy.went == [(chosen, 100)]
    made.first_token("informed", 2.0)
    made.release("informed", 3.0)
    assert policy.went[1:] == [("informed", 2.0, False), ("informed", 3.0, True)]


@pytest.mark.parametrize(("outcomes", "calibrates"), [(2, True), (3, False)])
def test_calibration_ends_after_as_many_outcomes_as_are_set(outcomes, calibrates):
    made = router("a", calibrate_requests=2)
    for i in range(outcomes):
        made.route(ask(f"r{i}", seed=i), float(i))
        made.first_token(f"r{i}", i + 0.1)
    assert made.calibrating is calibrates


def test_handed_prefix_comes_into_the_host_tier():
    made = router("a")
    made.blocks([stored("a", prompt(165)[:16])])
    estimates = made.explain(ask(tokens=165, handed_tokens=40), 1.0).estimates
    # Of 40 tokens handed over, 32 are whole blocks of 16, the first of which the device holds.
    assert estimates.device_tokens.tolist() == [16.0]
    assert estimates.cached_tokens.tolist() == [16.0]
    assert estimates.new_tokens.tolist() == [133.0]


def test_handed_prefix_is_read_from_no_disk():
    made, tokens = router("a"), prompt(165)
    made.blocks([stored("a", tokens[:16]), stored("a", tokens[:64], tier="disk")])
    alone = made.explain(ask(tokens=165), 1.0).estimates
    handed = made.explain(ask(tokens=165, handed_tokens=40), 1.0).estimates
    # Behind the device's 16 the disk holds 48; of these 16 are handed over.
    assert (alone.cached_tokens.tolist(), alone.disk_tokens.tolist()) == ([48.0], [48.0])
    assert (handed.cached_tokens.tolist(), handed.disk_tokens.tolist()) == ([48.0], [32.0])
