"""`kappa bench scheduler` in simulated time: one policy on one node, on the bench's workloads.

The same requests, sizes and link as on real vLLM (`mix`), on the simulator's node. Runs differ in
the seed of the durations' noise and drawn arrivals. `fcfs` is stock vLLM, first come first served
on the link as well; all others, `fcfs_link` too, have our host tier's order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kappa.cost import StepModel
from kappa_benchmarks.scheduling import mix
from kappa_benchmarks.scheduling.report import Played, Row, Served, row_of
from kappa_scheduler.link_order import FIFO, FULL, HALF, LOADS_FIRST
from kappa_simulator.clusters import NodeModel
from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop, Noise
from kappa_simulator.node import JobEvents, Node

_NOISE = 0.03
_HOST_BLOCKS = 1 << 40


class WatchedNode(Node):
    """A node that keeps a record of its iterations, as the engine's log does; idle times too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.iterations: list[Row] = []

    def _plan_next(self) -> None:
        super()._plan_next()
        tokens = 0
        if self._step is not None:
            tokens = sum(new for _, new, _ in self._step.chunks)
        if self._step is not None or self._run is not None:
            tokens += self._decoding.requests
        self.iterations.append(
            {
                "started_s": self._loop.now_s, "tokens": tokens, "blocks": self.memory.held,
                "queued": self.scheduler.was_queued,
            }
        )  # fmt: skip


def node_of(policy: str, setting: mix.Setting, blocks: int) -> NodeModel:
    """The bench's engine as a simulated node, under a policy."""
    block_s = mix.BLOCK_TOKENS * setting.load_token_s
    step = StepModel(mix.STEP_TOKEN_S, 0.0, 0.0, 0.0, mix.STEP_FIXED_S)
    return NodeModel(
        step=step, block_tokens=mix.BLOCK_TOKENS, device_blocks=blocks,
        host_blocks=_HOST_BLOCKS, load_block_s=block_s, store_block_s=block_s,
        load_fixed_s=setting.load_fixed_s, budget_tokens=mix.BUDGET_TOKENS,
        max_running=mix.MAX_RUNNING, rule="fcfs" if policy == "fcfs_link" else policy,
        link_order=FIFO if policy == "fcfs" else LOADS_FIRST,
        duplex=HALF if setting.stores == "shared" else FULL,
    )  # fmt: skip


def play(model: NodeModel, workload: mix.Workload, seed: int) -> Played:
    """One run of requests on a node; prefixes lie in its host tier, the device is empty.

    Raises:
        RuntimeError: requests were left that the rule would never admit.
    """
    loop = Loop()
    served = [Served(one, one.at_s) for one in workload.requests]

    def admitted(job: SimulatedJob) -> None:
        served[job.key].admitted_s = min(served[job.key].admitted_s, loop.now_s)

    def first_token(job: SimulatedJob) -> None:
        served[job.key].first_s = loop.now_s
        served[job.key].cached_tokens = job.device_tokens + job.cached_tokens

    def finished(job: SimulatedJob) -> None:
        served[job.key].finished_s = loop.now_s

    rngs = [np.random.default_rng((seed, i)) for i in range(2)]
    noises = Noise(rngs[0], _NOISE), Noise(rngs[1], _NOISE)
    node = WatchedNode(0, model, loop, noises, JobEvents(first_token, finished, admitted))
    for key, one in enumerate(workload.requests):
        # Blocks of its own, its prefix in the node's host tier.
        blocks = (one.prompt_tokens + one.output_tokens) // model.block_tokens
        ids = np.arange(blocks, dtype=np.uint64) + np.uint64((key + 1) << 32)
        node.memory.put_in_host(ids, one.prefix_tokens // model.block_tokens)
        job = SimulatedJob(
            key, one.prompt_tokens, one.output_tokens, ids, one.at_s, one.output_tokens,
            one.tenant, one.priority if model.rule == "priority" else 0,
        )  # fmt: skip
        loop.at(one.at_s, node.submit, job)
    loop.run()
    node.close()
    left = sum(math.isinf(one.finished_s) for one in served)
    if left:
        raise RuntimeError(f"{model.rule}: {left} of {len(served)} requests never ended")
    loads = {"load_s": node.link.up.load_s}
    return Played(workload.blocks, served, node.iterations, loads)


def runs_of(policy: str, setting: mix.Setting, runs: int) -> list[Row]:
    """A row for each of several seeds."""
    found = []
    for run in range(runs):
        workload = mix.workload_of(setting.workload, mix.SEED + run)
        played = play(node_of(policy, setting, workload.blocks), workload, run)
        found.append(row_of(policy, setting, "simulator", played))
    return found
