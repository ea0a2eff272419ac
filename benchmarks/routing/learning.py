"""How well a node that announces the wrong speed is predicted after 200 requests.

    python -m benchmarks.routing.learning narrativeqa 0.3

Simulated, two unlike nodes. Each announces one constant 3 times too long or too short, or runs by
a law that is not ours; they report steps and loads, or (foreign) nothing. Errors are of the TTFT
that the router predicted, from the 200th request on, beside the announced speeds unlearnt and
beside a running median by node and length. And on four nodes, the p99 TTFT of requests that come
after one of them has halved its speed, over that of a run in which it always was so slow.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict, deque

import numpy as np

from kappa.shapes import model_shape
from simulator.clusters import KINDS, SimulatedCluster, cluster_named, numbered
from simulator.decode import EngineLaw
from simulator.faults import Faults, Misprofile, Resource, Straggler
from simulator.outcome import Outcome
from simulator.run import SimulationConfig, capacity_of, simulate, traffic_of
from workload.catalogue import workload_named

_REQUESTS, _LEARNT_AFTER = 600, 200
_KEPT = 16
_HALVED_AT_S, _WINDOW_S, _SEEDS = 40.0, 10, 5
_CONSTANTS: tuple[Resource, ...] = (
    "token", "pair", "weights", "context_token", "fixed", "link", "load_fixed", "compute",
)  # fmt: skip
_LAWS = {
    "compute and reads add up": EngineLaw(adds=True),
    "tiles of 128, padded batches": EngineLaw(tile_tokens=128, padded=True),
    "half rate at 256 tokens": EngineLaw(half_tokens=256.0),
    "link shared with compute": EngineLaw(link_slower=2.0),
}


def main(trace: str, load: float) -> None:
    """Print a row per wrong announcement, and how soon a halved speed is known."""
    nodes = tuple(numbered(KINDS["h100"], 1) + numbered(KINDS["a100"], 1))
    plain = SimulationConfig(
        cluster=SimulatedCluster("two", nodes), workload=workload_named(trace), load=load,
        shape=model_shape("llama-3.1-8b"), requests=_REQUESTS, policy="priced",
    )  # fmt: skip
    plain = plain.replaced(capacity_rps=capacity_of(plain))
    traffic = traffic_of(plain)
    print(f"{trace} at {load}: median / p90 error from request {_LEARNT_AFTER} on")
    print("| nodes | unlearnt | running median | learnt | learnt, foreign |\n|---|---|---|---|---|")
    arms = {"as announced": plain}
    for resource in _CONSTANTS:
        for times, factor in (("3", 1 / 3), ("1/3", 3.0)):
            # `factor` times the true rate is announced, and so that share of its seconds.
            wrong = tuple(Misprofile(node, resource, factor) for node in range(2))
            arms[f"{resource} announced {times} of the true seconds"] = plain.replaced(
                faults=Faults(misprofiles=wrong)
            )
    arms |= {name: plain.replaced(laws=(law,)) for name, law in _LAWS.items()}
    for name, config in arms.items():
        runs = [
            simulate(config.replaced(calibrate=calibrate, foreign=foreign), traffic=traffic)
            for calibrate, foreign in ((False, False), (True, False), (True, True))
        ]
        found = [_errors(run) for run in runs]
        found.insert(1, _errors(runs[1], running_median(runs[1])))
        cells = " | ".join(f"{100 * p50:.0f} / {100 * p90:.0f} %" for p50, p90 in found)
        print(f"| {name} | {cells} |", flush=True)
    middle_s = float(np.quantile(simulate(plain, traffic=traffic).records.arrival_s, 0.5))
    slow = Faults(stragglers=tuple(Straggler(node, middle_s, 1e9, 2.0) for node in range(2)))
    for foreign in (False, True):
        run = simulate(plain.replaced(faults=slow, foreign=foreign), traffic=traffic)
        who = "foreign" if foreign else "reporting"
        print(f"speed halved, {who}: within 15 % after {recovered(run, middle_s)} requests")
    for from_s, ratio in after_halving(plain.replaced(cluster=cluster_named("small"))).items():
        print(
            f"{from_s} to {from_s + _WINDOW_S} s after one of four nodes halves: p99 x {ratio:.2f}"
        )


def running_median(run: Outcome) -> np.ndarray:
    """What the median of the last requests of that length on that node would have predicted."""
    records = run.records
    latest: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
    predicted = np.full(len(records.ttft_s), np.nan)
    for k in np.argsort(records.arrival_s):
        kept = latest[int(records.node[k]), int(records.prompt_tokens[k]).bit_length()]
        if kept:
            predicted[k] = statistics.median(kept)
        if not np.isnan(records.ttft_s[k]):
            kept.append(float(records.ttft_s[k]))
    return predicted


def _errors(run: Outcome, predicted: np.ndarray | None = None) -> tuple[float, float]:
    records = run.records
    off = np.abs((records.predicted_s if predicted is None else predicted) / records.ttft_s - 1)
    late = off[np.argsort(records.arrival_s)[_LEARNT_AFTER:]]
    late = late[~np.isnan(late)]
    return float(np.median(late)), float(np.quantile(late, 0.9))


def after_halving(plain: SimulationConfig) -> dict[int, float]:
    """By seconds since one node halved its speed: p99 TTFT over that of a node that always was so
    slow, the same requests; windows over all seeds, geometric means over which node it is."""
    capacity_rps = capacity_of(plain)
    assert plain.load is not None
    count = int(capacity_rps * plain.load * (_HALVED_AT_S + 6 * _WINDOW_S))
    logs: dict[int, list[float]] = defaultdict(list)
    for node in range(len(plain.cluster.nodes)):
        windows: dict[tuple[int, float], list[np.ndarray]] = defaultdict(list)
        for seed in range(_SEEDS):
            config = plain.replaced(capacity_rps=capacity_rps, seed=seed, requests=count)
            traffic = traffic_of(config)
            for start_s in (0.0, _HALVED_AT_S):
                slow = Faults(stragglers=(Straggler(node, start_s, 1e9, 2.0),))
                records = simulate(config.replaced(faults=slow), traffic=traffic).records
                since_s = (records.arrival_s - _HALVED_AT_S) // _WINDOW_S * _WINDOW_S
                for from_s in range(0, 6 * _WINDOW_S, _WINDOW_S):
                    windows[from_s, start_s].append(records.ttft_s[since_s == from_s])
        p99 = {key: np.nanquantile(np.concatenate(of), 0.99) for key, of in windows.items()}
        for from_s in range(0, 6 * _WINDOW_S, _WINDOW_S):
            logs[from_s].append(float(np.log(p99[from_s, _HALVED_AT_S] / p99[from_s, 0.0])))
    return {from_s: float(np.exp(np.mean(of))) for from_s, of in logs.items()}


def recovered(run: Outcome, since_s: float) -> int:
    """Requests sent after `since_s` until ten in a row are off by at most 15 % in the middle."""
    records = run.records
    order = np.argsort(records.arrival_s)
    after = order[records.arrival_s[order] > since_s]
    off = np.abs(records.predicted_s[after] / records.ttft_s[after] - 1)
    runs = (i for i in range(len(off) - 10) if np.nanmedian(off[i : i + 10]) <= 0.15)
    return next(runs, -1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
