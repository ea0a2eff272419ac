"""What clients saw, compared with a fault's promise; and the cluster once a fault is over."""

import pytest

from kappa_benchmarks.faults import trial
from kappa_benchmarks.faults.catalogue import Fault, fault_named
from kappa_benchmarks.faults.cluster import FaultsError
from kappa_benchmarks.faults.traffic import Observed, first_answer_s
from kappa_benchmarks.faults.trial import After, evaluate, settled, try_fault, try_faults

KILLED = Fault("killed", "a kill", make=None, first_answer_s=1.0, recovers=True)
BACK = After(recovery_s=30.0, start_s=27.0)


def whole(sent_s, took_s=0.5, status=200, **more):
    return Observed(sent_s, sent_s + took_s, sent_s + took_s, status, False, status == 200, **more)


def cut(sent_s, first_s, seen=True):
    error = "ClientPayloadError" if seen else ""
    return Observed(sent_s, first_s, sent_s + 2.0, 200, True, False, error=error)


GOOD = [whole(float(t)) for t in range(8, 14)]


def test_all_answered_and_back_in_time_is_kept():
    found = evaluate(KILLED, GOOD, 10.0, BACK)
    assert found.kept and found.lost == 0 and found.first_answer_s == pytest.approx(0.5)
    assert found.to_dict()["kept"] is True


@pytest.mark.parametrize("status", [500, 503, 429, 0])
def test_a_request_that_was_refused_is_lost_too(status):
    found = evaluate(KILLED, [*GOOD, whole(9.8, status=status)], 10.0, BACK)
    assert not found.kept and found.lost == 1
    assert found.failed == (f"1 of 7 requests lost (1 x {status})",)


def test_a_stream_that_had_begun_may_end_if_it_says_so():
    assert evaluate(KILLED, [*GOOD, cut(9.5, 9.7)], 10.0, BACK).kept
    found = evaluate(KILLED, [*GOOD, cut(9.5, 9.7, seen=False)], 10.0, BACK)
    assert found.failed == ("1 streams ended as if they were whole",)


def test_a_stream_that_had_not_begun_counts_as_lost():
    found = evaluate(KILLED, [*GOOD, cut(9.5, None)], 10.0, BACK)
    assert found.lost == 1 and not found.kept


def test_only_open_requests_may_be_lost_with_their_way_out():
    fault = Fault("decider", "its way out", make=None, may_lose_open=True)
    assert evaluate(fault, [*GOOD, whole(9.8, status=500)], 10.0, After()).kept
    assert not evaluate(fault, [*GOOD, whole(10.2, status=500)], 10.0, After()).kept


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (After(reservations=2, recovery_s=1.0, start_s=1.0), "2 reservations leaked"),
        (After(orphans=("7 x",), recovery_s=1.0, start_s=1.0), "1 orphan"),
        (After(recovery_s=30.0, start_s=20.0), "10.0 s more than the start"),
        (After(), "did not come back"),
        (After(recovery_s=1.0, start_s=1.0, shown=False), "not seen"),
        (After(recovery_s=1.0, start_s=1.0, complaints=("a lie",)), "a lie"),
    ],
)
def test_what_is_wrong_afterwards_breaks_the_promise(after, word):
    assert word in "; ".join(evaluate(KILLED, GOOD, 10.0, after).failed)


def test_the_first_answer_is_of_a_request_sent_afterwards():
    late = [whole(9.9, took_s=0.2), whole(10.5, took_s=0.6)]
    assert first_answer_s(late, 10.0) == pytest.approx(1.1)
    assert first_answer_s([whole(9.9)], 10.0) is None
    found = evaluate(KILLED, late[1:], 10.0, BACK)
    assert found.failed == ("first answer after 1.10 s, limit 1 s",)


def test_what_a_fault_may_refuse_is_no_loss_once_it_is_done():
    fault = Fault("decider", "its death", make=None, may_refuse=("503 decider_away",))

    def away(sent_s):
        return Observed(sent_s, None, sent_s, 503, False, False, error="503 decider_away")

    found = evaluate(fault, [*GOOD, away(10.5)], 10.0, After())
    assert found.kept and found.lost == 1
    assert "1 of" in evaluate(fault, [*GOOD, away(9.5)], 10.0, After()).failed[0]


# -- a cluster afterwards -------------------------------------------------------------------------


class Cluster:
    """A target that reports `found` of each request, and this number of reservations."""

    def __init__(self, found=(), reservations=0):
        self.found, self.held, self.family = found, reservations, self

    async def ask(self, document, streamed):
        return whole(0.0)

    def decisions(self, limit):
        predicted = {"device_tokens": 32, "cached_tokens": 0}
        return [{"predicted": predicted, "actual": self.found}]

    def reservations(self):
        return self.held

    def strays(self):
        return []

    def until(self, question, patience_s):
        return question() or None


@pytest.mark.parametrize(
    ("device", "cached", "wrong"),
    [
        (32, 0, None),
        (32, None, None),
        (16, 0, "32 device_tokens predicted, 16 found"),
        (None, None, "could not be checked"),
    ],
)
async def test_predictions_are_compared_with_what_was_found(monkeypatch, device, cached, wrong):
    monkeypatch.setattr(trial, "_PROBES", 1)
    cluster = Cluster({"device_tokens": device, "cached_tokens": cached})
    after = await settled(cluster, fault_named("events_lost"), cluster, None, None)
    assert len(after.complaints) == (wrong is not None)
    assert all(wrong in complaint for complaint in after.complaints)


@pytest.mark.parametrize(
    ("reservations", "word"), [(0, None), (2, "2 reser"), (-1, "does not report")]
)
async def test_reservations_that_nobody_reports_are_no_kept_promise(reservations, word):
    fault, cluster = fault_named("controller_killed"), Cluster(reservations=reservations)
    after = await settled(cluster, fault, cluster, True, None)
    failed = evaluate(fault, GOOD, 0.0, after).failed
    assert len(failed) == (word is not None) and all(word in why for why in failed)


class DyingCluster(Cluster):
    """One emulated worker and a GCS; `left` outlives it."""

    def __init__(self, left):
        super().__init__()
        self.left, self.killed = left, []

    def nodes(self):
        return [{"node": "a", "worker": "w", "engine": "emulated"}]

    def of_role(self, role):
        return [7] if role == "gcs" else []

    def survivors(self):
        assert self.killed == [7]
        return self.left


@pytest.mark.parametrize(("left", "kept"), [([], True), (["8 raylet/raylet"], False)])
async def test_nothing_may_outlive_a_cluster_whose_head_is_killed(monkeypatch, left, kept):
    cluster = DyingCluster(left)
    monkeypatch.setattr("kappa_benchmarks.faults.catalogue.kill", cluster.killed.extend)
    found = await try_fault(cluster, fault_named("ray_head_killed"), None, 0)
    assert found.kept == kept
    assert found.orphans == tuple(left)


async def test_faults_that_end_the_cluster_come_last_untried_ones_fail(monkeypatch):
    tried = []

    async def fails(target, fault, mix, seed, turn):
        tried.append(fault.name)
        raise FaultsError("not now")

    monkeypatch.setattr(trial, "try_fault", fails)
    faults = [fault_named("ray_head_killed"), fault_named("slow_link")]
    found = await try_faults(None, faults, None, 0)
    assert tried == ["slow_link", "ray_head_killed"]
    assert [one.failed for one in found] == [("not tried: not now",)] * 2


def test_fault_is_refused_on_other_engines_and_when_unknown():
    cluster = DyingCluster([])
    cluster.nodes = lambda: [{"node": "a", "worker": "w", "engine": "vllm"}]
    with pytest.raises(FaultsError, match="needs engines of kind emulated, not vllm"):
        fault_named("slow_link").action(cluster, 0)
    with pytest.raises(ValueError, match="there are worker_killed"):
        fault_named("meteor")
