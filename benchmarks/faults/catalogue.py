"""The faults that are tried, by name: what is done, on which cluster, and what is promised then.

One list for the command line, the tests and the runbook. A promise is a limit on what clients and
the cluster's own figures may show; `benchmarks.faults.evaluation` compares them with it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["emulated", "vllm"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    engine: of the cluster that it is tried on. title: what is done. lasts_s: how long the fault
    stays before it is healed; 0: nothing has to be healed. may_lose_open: requests that were open
    at that moment may fail (their one way to the client is gone); all others must be answered.
    first_answer_s: after it, somebody answers within so much. recovers: a killed worker must be
    back within its own start time and `recovery_extra_s`. ends_cluster: nothing serves afterwards;
    tried last. shows: what else must be seen, in words.
    """

    name: str
    title: str
    engine: Engine = "emulated"
    lasts_s: float = 0.0
    may_lose_open: bool = False
    first_answer_s: float | None = None
    recovers: bool = False
    recovery_extra_s: float = 5.0
    ends_cluster: bool = False
    shows: str = ""


FAULTS: tuple[Fault, ...] = (
    Fault("worker_killed", "kill -9 of a worker's process", first_answer_s=1.0, recovers=True),
    Fault(
        "worker_stalled", "SIGSTOP of a worker's process, SIGCONT after a while", lasts_s=20.0,
        first_answer_s=1.0, shows="others answer meanwhile; it serves again, or its successor does",
    ),
    Fault(
        "ingress_killed", "kill -9 of the ingress", may_lose_open=True,
        shows="a new ingress answers, and its index is filled from the workers' snapshots",
    ),
    Fault("controller_killed", "kill -9 of Ray Serve's controller", shows="a new one is there"),
    Fault(
        "slow_link", "a node's loads last ten times as long", lasts_s=25.0,
        shows="the node's link scale rises in /v1/nodes",
    ),
    Fault(
        "loads_fail", "no load from a node's host tier arrives", lasts_s=15.0,
        shows="failed loads are counted; their prompts are computed",
    ),
    Fault(
        "events_lost", "every second batch of KV events of a node is lost", lasts_s=10.0,
        shows="gaps are counted; afterwards predictions of cached tokens are exact",
    ),
    Fault(
        "events_repeated", "every second batch of KV events comes twice", lasts_s=10.0,
        shows="afterwards predictions of cached tokens are exact",
    ),
    Fault(
        "events_reordered", "every second batch of KV events comes after the next", lasts_s=10.0,
        shows="afterwards predictions of cached tokens are exact",
    ),
    Fault("worker_clock_forward", "a worker's clock jumps an hour ahead", lasts_s=10.0,
          shows="the worker goes on being chosen"),
    Fault("worker_clock_back", "a worker's clock jumps an hour back", lasts_s=10.0,
          shows="the worker goes on being chosen"),
    Fault("ingress_clock_forward", "the ingress' clock jumps an hour ahead", lasts_s=10.0,
          shows="all workers are chosen again within a second"),
    Fault("ingress_clock_back", "the ingress' clock jumps an hour back", lasts_s=10.0,
          shows="all workers are chosen again within a second"),
    Fault(
        "disk_full", "no file below the cache folder can be written, then a worker starts anew",
        recovers=True, recovery_extra_s=10.0, shows="the worker joins and serves",
    ),
    Fault(
        "poisoned_profile", "the cached profile is nonsense, then a worker starts anew",
        recovers=True, recovery_extra_s=10.0, shows="the worker joins with the profile it had",
    ),
    Fault(
        "ray_head_killed", "kill -9 of Ray's GCS, without which there is no cluster",
        ends_cluster=True, shows="`kappa serve` ends, and nothing that it started is left",
    ),
    Fault(
        "engine_killed", "kill -9 of a vLLM engine's process", engine="vllm", first_answer_s=1.0,
        recovers=True,
    ),
    Fault(
        "vllm_worker_killed", "kill -9 of a vLLM worker's process", engine="vllm",
        first_answer_s=1.0, recovers=True, shows="its engine's processes are gone, too",
    ),
)  # fmt: skip


def fault_named(name: str) -> Fault:
    """A fault by its name.

    Raises:
        ValueError: there is none; names all.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"no fault {name!r}: there are {', '.join(f.name for f in FAULTS)}")
