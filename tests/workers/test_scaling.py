"""How many workers a pool should have: enough for what arrives and what waits, and no flapping."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from kappa_workers.scaling import BACKLOG_KEY, DEMAND_KEY, ScalingRule, WorkerLoad, loads_in

RULE = ScalingRule(target_backlog_s=5.0, target_utilisation=0.8)


def loads(*pairs):
    return [WorkerLoad(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        # Arrivals are served at the target utilisation.
        ([(0.0, 0.8)] * 2, 2), ([(0.0, 1.0)] * 2, 3),
        # What waits is cleared within the target seconds.
        ([(20.0, 0.0)], 4), ([(20.0, 0.8)], 5),
        # An idle pool shrinks to one.
        ([(0.0, 0.0)] * 3, 1), ([(0.0, 0.0)], 1),
        # None shrinks to where it would grow again: 0.78 of 0.8 is just enough for one.
        ([(0.0, 0.39)] * 2, 2), ([(0.0, 0.35)] * 2, 1),
    ],
)  # fmt: skip
def test_rule_wants_workers_for_arrivals_and_backlog(told, wanted):
    assert RULE.wanted(loads(*told), len(told)) == wanted


def test_workers_that_reported_nothing_or_nonsense_do_not_count():
    figures = {
        BACKLOG_KEY: {"a": 1.0, "b": math.nan, "c": 2.0, "gone": 9.0},
        DEMAND_KEY: {"a": 0.5, "b": 0.5, "d": 0.5, "gone": 1.0},
    }
    assert loads_in(figures, ["a", "b", "c", "d"]) == [WorkerLoad(1.0, 0.5)]
    assert loads_in({}, ["a"]) == []


def play(arrivals, start, rule=RULE, start_s=30, down_after_s=60, most=12):
    """A pool under the rule, second by second: work arrives, is shared, waits. New workers take
    `start_s`; a smaller number is taken up after `down_after_s` of being wanted. Returns the
    number wanted and the backlog per worker, by second."""
    running, starting, backlog_s, lower_since = start, [], 0.0, None
    wanted_at, backlog_at = [], []
    for second, work in enumerate(arrivals):
        starting = [left - 1 for left in starting]
        running += sum(left <= 0 for left in starting)
        starting = [left for left in starting if left > 0]
        backlog_s = max(backlog_s + work - running, 0.0)
        told = [WorkerLoad(backlog_s / running, work / running)] * running
        current = running + len(starting)
        wanted = min(rule.wanted(told, current), most)
        if wanted > current:
            starting += [start_s] * (wanted - current)
        lower_since = (lower_since or second) if wanted < current else None
        if lower_since is not None and second - lower_since >= down_after_s:
            running, starting, lower_since = max(wanted, 1), [], None
        wanted_at.append(running + len(starting))
        backlog_at.append(backlog_s / running)
    return wanted_at, backlog_at


def test_a_step_of_load_is_met_and_its_backlog_cleared():
    number, backlog = play([0.5] * 100 + [4.0] * 400, start=1)
    assert number[99] == 1
    # 4 seconds of work a second need 5 workers at 80 %; one more than that is kept.
    assert 5 <= number[-1] <= 6 and backlog[-1] == 0.0
    assert max(number) > 6, "the backlog of the minutes before was to be cleared faster"


def test_a_steady_noisy_load_does_not_make_the_pool_flap():
    rng = np.random.default_rng(4)
    # Serve averages over 20 s before it asks.
    work = np.convolve(rng.normal(3.0, 0.6, 2000), np.ones(20) / 20, mode="valid")
    number, _ = play(list(work), start=4)
    changes = int(np.count_nonzero(np.diff(number[60:])))
    assert changes <= 4, number[::60]
    assert set(number[60:]) <= {4, 5}


def test_a_load_that_ends_lets_the_workers_go():
    number, _ = play([4.0] * 200 + [0.1] * 200, start=5)
    assert number[199] == 5 and number[-1] == 1


class Context(SimpleNamespace):
    """What Ray Serve hands to a policy, as far as ours reads it."""


def test_the_serve_policy_asks_the_rule():
    from ray.serve._private.common import DeploymentID, ReplicaID

    from kappa_workers.scaling_policy import BacklogPolicy

    replicas = [ReplicaID(str(i), DeploymentID("pool", "kappa")) for i in range(2)]
    policy = BacklogPolicy(target_backlog_s=5.0, target_utilisation=0.8)
    told = {
        BACKLOG_KEY: dict.fromkeys(replicas, 10.0),
        DEMAND_KEY: dict.fromkeys(replicas, 0.8),
    }
    asked = Context(aggregated_metrics=told, running_replicas=replicas, target_num_replicas=2)
    assert policy(asked) == (6, {})
    silent = Context(aggregated_metrics=None, running_replicas=replicas, target_num_replicas=2)
    assert policy(silent) == (2, {})


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments")
def test_serve_builds_the_policy_by_name_with_its_arguments():
    import ray.cloudpickle
    from ray.serve.config import AutoscalingConfig

    from kappa.settings.pools import ScalingSettings
    from kappa_deploy.app.plan import autoscaling

    made = AutoscalingConfig(**autoscaling(ScalingSettings(max_replicas=3, target_backlog_s=2.0)))
    assert (made.min_replicas, made.max_replicas) == (1, 3)
    # As Serve's controller gets it: by value.
    policy_class = ray.cloudpickle.loads(made.policy.get_serialized_policy_def())
    policy = policy_class(**made.policy.policy_kwargs)
    context = Context(
        aggregated_metrics={BACKLOG_KEY: {"r": 6.0}, DEMAND_KEY: {"r": 0.0}},
        running_replicas=["r"],
        target_num_replicas=1,
    )
    assert policy(context)[0] == 3
