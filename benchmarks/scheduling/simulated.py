"""`kappa bench scheduler` in simulated time: one policy on one node, on the bench's workloads.

The same requests, sizes and link as on real vLLM (`mix`), on the simulator's node. Runs differ in
the seed of the durations' noise and drawn arrivals. `fcfs` is stock vLLM, first come first served
on the link as well; all others, `fcfs_link` too, have our host tier's order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.scheduling import mix
from benchmarks.scheduling.report import Played, Served, row_of
from kappa.cost import StepModel
from scheduler.link_order import FIFO, FULL, HALF, LOADS_FIRST
from simulator.clusters import NodeModel
from simulator.loop import Loop, Noise
from simulator.memory import SimulatedJob
from simulator.node import JobEvents, Node

NOISE = 0.03
_HOST_BLOCKS = 1 << 40


class WatchedNode(Node):
    """A node that keeps a record of its iterations, as the engine's log does; idle times too."""

    iterations: list[dict[str, Any]]

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
    return replace(
        _mix_node(setting, blocks),
        rule="fcfs" if policy == "fcfs_link" else policy,
        link_order=FIFO if policy == "fcfs" else LOADS_FIRST,
        duplex=HALF if setting.stores == "shared" else FULL,
    )


def _mix_node(setting: mix.Setting, blocks: int) -> NodeModel:
    block_s = mix.BLOCK_TOKENS * setting.load_token_s
    step = StepModel(mix.STEP_TOKEN_S, 0.0, 0.0, 0.0, mix.STEP_FIXED_S)
    return NodeModel(
        step=step,
        announced_step=step,
        block_tokens=mix.BLOCK_TOKENS,
        device_blocks=blocks,
        host_blocks=_HOST_BLOCKS,
        load_block_s=block_s,
        store_block_s=block_s,
        load_fixed_s=mix.LINK_FIXED_S,
        budget_tokens=mix.BUDGET_TOKENS,
        max_running=mix.MAX_RUNNING,
    )


def play(
    model: NodeModel, workload: mix.Workload, seed: int, noise: float = NOISE
) -> tuple[Played, Node]:
    """One run of requests on a node; prefixes lie in its host tier, the device is empty.

    Raises:
        RuntimeError: requests were left that the rule would never admit.
    """
    loop = Loop()
    asks = workload.asks
    served = [Served(ask, ask.at_s) for ask in asks]

    def admitted(job: SimulatedJob) -> None:
        if served[job.key].admitted_s is None:
            served[job.key].admitted_s = loop.now_s

    def first_token(job: SimulatedJob) -> None:
        served[job.key].first_s = loop.now_s
        served[job.key].cached_tokens = job.device_tokens + job.cached_tokens

    def finished(job: SimulatedJob) -> None:
        served[job.key].finished_s = loop.now_s

    rngs = [np.random.default_rng((seed, i)) for i in range(2)]
    node = WatchedNode(
        0, model, loop, (Noise(rngs[0], noise), Noise(rngs[1], noise)),
        JobEvents(first_token, finished, admitted),
    )  # fmt: skip
    node.iterations = []
    for key, ask in enumerate(asks):
        loop.at(ask.at_s, node.submit, _job(node, key, ask))
    loop.run()
    node.close()
    left = [s for s in served if s.finished_s is None]
    if left:
        raise RuntimeError(f"{model.rule}: {len(left)} of {len(asks)} requests never ended")
    return Played(workload, served, node.iterations, {}), node


def _job(node: Node, key: int, ask: mix.Ask) -> SimulatedJob:
    """A request with blocks of its own, its prefix in the node's host tier."""
    size = node.model.block_tokens
    blocks = (ask.prompt_tokens + ask.output_tokens) // size
    ids = np.arange(blocks, dtype=np.uint64) + np.uint64((key + 1) << 32)
    node.memory.put_in_host(ids, ask.prefix_tokens // size)
    return SimulatedJob(
        key, ask.prompt_tokens, ask.output_tokens, ids, ask.at_s, ask.output_tokens,
        ask.tenant, ask.priority,
    )  # fmt: skip


def runs_of(policy: str, setting: mix.Setting, runs: int) -> list[dict[str, Any]]:
    """A row for each of several seeds."""
    setting.check(tuple(mix.WORKLOADS))
    found = []
    for run in range(runs):
        workload = mix.workload_of(setting.workload, mix.SEED + run)
        played, node = play(node_of(policy, setting, workload.blocks), workload, run)
        row = row_of(policy, setting, "simulator", played)
        if row["budget_fill"] is not None:
            row["budget_fill"] *= mix.BUDGET_TOKENS / node.model.budget_tokens
        found.append(row)
    return found
