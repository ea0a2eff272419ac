"""What is asked of a cluster once a fault is over; that no answer is no good one."""

import pytest

from benchmarks.faults import trial
from benchmarks.faults.actions import Action
from benchmarks.faults.catalogue import fault_named
from benchmarks.faults.evaluation import Observed, evaluate
from benchmarks.faults.trial import _settled, _wrong_predictions

FINE = Observed(0.0, 0.1, 0.2, 200, streamed=False, complete=True)


class Cluster:
    """A target that reports `found` of each request, and so many reservations."""

    def __init__(self, found, reservations=0):
        self.found, self.held, self.family = found, reservations, self

    async def ask(self, document, streamed):
        return FINE

    def decisions(self, limit):
        predicted = {"device_tokens": 32, "cached_tokens": 0}
        return [{"predicted": predicted, "actual": self.found}]

    def reservations(self):
        return self.held

    def strays(self):
        return []

    def until(self, question, patience_s):
        return question()


@pytest.fixture(autouse=True)
def one_probe(monkeypatch):
    monkeypatch.setattr(trial, "_PROBES", 1)


@pytest.mark.parametrize(
    ("device", "cached", "lie"),
    [
        (32, 0, None),
        (32, None, None),
        (16, 0, "32 device_tokens predicted, 16 found"),
        (None, None, "could not be checked"),
    ],
)
async def test_predictions_are_held_against_what_was_found_if_anything_was_told(
    device, cached, lie
):
    cluster = Cluster({"device_tokens": device, "cached_tokens": cached})
    lies = await _wrong_predictions(cluster, cluster)
    assert len(lies) == (lie is not None) and all(lie in said for said in lies)


@pytest.mark.parametrize(("reservations", "word"), [(0, None), (2, "2 reser"), (-1, "nobody says")])
async def test_reservations_that_nobody_tells_of_are_no_kept_promise(reservations, word):
    cluster, fault = Cluster({}, reservations), fault_named("controller_killed")
    after = await _settled(cluster, fault, cluster, Action(lambda: None), True, None)
    failed = evaluate(fault, [FINE], 0.0, after).failed
    assert len(failed) == (word is not None) and all(word in said for said in failed)


class DyingCluster(Cluster):
    """One emulated worker and a GCS; `left` outlives it."""

    def __init__(self, left):
        super().__init__({})
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
    monkeypatch.setattr("benchmarks.faults.actions.kill", cluster.killed.extend)
    monkeypatch.setattr(cluster, "until", lambda question, patience_s: question() or None)
    found = await trial.try_fault(cluster, fault_named("ray_head_killed"), None, 0)
    assert found.kept == kept
    assert found.orphans == tuple(left)


async def test_what_ends_the_cluster_is_tried_last(monkeypatch):
    tried = []

    async def try_fault(target, fault, mix, seed, turn):
        tried.append(fault.name)
        raise trial.FaultsError("not now")

    monkeypatch.setattr(trial, "try_fault", try_fault)
    await trial.try_faults(
        None, [fault_named("ray_head_killed"), fault_named("slow_link")], None, 0
    )
    assert tried == ["slow_link", "ray_head_killed"]
