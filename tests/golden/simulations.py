"""Simulated runs: 5 traces x 3 clusters x {priced, ttft} x {fair, fcfs}, a row of figures each."""

import hashlib

import numpy as np

from kappa.shapes import model_shape
from kappa_simulator.clusters import cluster_named
from kappa_simulator.faults import Faults
from kappa_simulator.run import SimulationConfig, simulate, traffic_of
from kappa_workload.catalogue import workload_named

CLUSTERS = ("mixed", "small", "uniform")
POLICIES = ("priced", "ttft")
SCHEDULERS = ("fair", "fcfs")
REQUESTS = 300
NOISE_SIGMA = 0.03  # what `kappa simulate` plays by default
# Requests/s of each trace on the clusters above, about 0.8 of their capacity when this was
# written. Finding the capacity of documents takes seconds; None asks for it where it is quick.
RATES_RPS = {
    "narrativeqa": (97.2, 16.1, 79.3),
    "finqa": (37.8, 7.12, 31.1),
    "mooncake": (None, None, None),
    "sharegpt": (None, None, None),
    "miniswe": (328.0, 79.3, 303.0),
}


def simulations():
    """Row by "trace, cluster, policy, scheduler"."""
    rows = {}
    for trace, rates_rps in RATES_RPS.items():
        workload = workload_named(trace)
        for cluster, rate_rps in zip(CLUSTERS, rates_rps, strict=True):
            config = SimulationConfig(
                cluster=cluster_named(cluster), workload=workload,
                shape=model_shape("llama-3.1-8b"), requests=REQUESTS, rate_rps=rate_rps,
                load=0.8 if rate_rps is None else None, faults=Faults(noise_sigma=NOISE_SIGMA),
            )  # fmt: skip
            traffic = traffic_of(config)
            for policy in POLICIES:
                for scheduler in SCHEDULERS:
                    run = config.replaced(policy=policy, scheduler=scheduler)
                    outcome = simulate(run, traffic=traffic)
                    rows[f"{trace}, {cluster}, {policy}, {scheduler}"] = figures(outcome)
    return rows


def figures(outcome):
    """Whole numbers as a digest, seconds as sums that a change of any one of them changes.

    Rounding and hashing seconds would turn the last bit of one into another digest; figures of
    floats are therefore compared with a tolerance (`tests.golden.goldens.RELATIVE`).
    """
    records = outcome.records
    return {
        "rate_rps": outcome.rate_rps,
        "workers": digest(records.node),
        "tokens": digest(
            np.stack([records.device_tokens, records.cached_tokens, records.new_tokens])
        ),
        "ttft_s": seconds(records.ttft_s),
        "e2e_s": seconds(records.e2e_s),
        "end_s": outcome.end_s,
    }


def digest(numbers):
    """Of whole numbers, whatever the byte order."""
    return hashlib.sha256(np.ascontiguousarray(numbers, dtype="<i8").tobytes()).hexdigest()[:16]


def seconds(values):
    """Mean and two quantiles to read, and a sum weighted by place to notice what they do not."""
    values = np.nan_to_num(values, nan=-1.0)
    weights = 1.0 + np.arange(len(values)) / len(values)
    return {
        "mean": float(values.mean()),
        "p50": float(np.quantile(values, 0.5)),
        "p99": float(np.quantile(values, 0.99)),
        "weighted": float(values @ weights / len(values)),
    }
