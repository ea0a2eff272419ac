"""`kappa bench scheduler` on real vLLM: one policy on one bare engine on this machine.

The engine is vLLM with our worker and host tier, without Ray: scheduling, caching, batching and
loading are real. Paced, seconds are emulated (a step and a transfer last as long as the workload
says, times the dilation); at its own speed the dilation is that of a full step of this engine. One
run: empty both caches, compute the prefixes unpaced so that they
lie in the host tier, empty the device, then let the requests come. Waits and fills are read from
the engine's own reports (its stats channel and the scheduler's iteration log).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kappa.cost import StepModel
from kappa.model import kv_bytes_per_token
from kappa.model_config import shape_from_config
from kappa.protocol import HOST_TOKENS_KEY, REQUEST_ID_KEY, TENANT_KEY
from kappa_benchmarks.scheduling import mix
from kappa_benchmarks.scheduling.report import Played, Served
from kappa_benchmarks.vllm_engine import BareEngine, stats_in
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import CPU_ENV, EngineTier, transfer_config
from kappa_workers.vllm.options import PACE_KEY, SCHEDULER_KEY, STATS_KEY, STOCK, LinkRules

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **CPU_ENV})

from kappa_workers.paced.host_tier import HostTierWorker
from kappa_workers.paced.metered_worker import MeteredCPUWorker
from kappa_workers.vllm.load_sources import LOAD_SOURCES
from kappa_workers.vllm.options import LinkPace

_HOST_BYTES = 1 << 28
_VOCABULARY = (100, 4000)
_RUN_LIMIT_S = 600.0
_SCHEDULER = "kappa_workers.vllm.scheduler.FairScheduler"
# vLLM's own scheduler class, without even our measuring: to check that it costs nothing.
BARE = "bare"


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings that all engines of a bench share."""

    # Its folder; None: a tiny one is made here.
    model: str | None = None
    paced: bool = True
    # Real seconds per emulated one; 0: measured.
    dilation: float = 0.0


class BenchWorker(MeteredCPUWorker):
    """Our worker; its pace can be switched off while the caches are filled."""

    def kappa_paced(self, paced: bool) -> None:
        """Pace steps and transfers, or run them as fast as they go."""
        if not hasattr(self, "_kappa_paces"):
            self._kappa_paces = self._kappa_step_model, _tier().pace
        step, link = self._kappa_paces if paced else (None, LinkPace())
        self._kappa_step_model, _tier().pace = step, link

    def kappa_idle(self) -> bool:
        """Whether no transfer is under way."""
        return not any(link.has_unfinished() for link in _tier().links)


def _tier() -> HostTierWorker:
    tier = LOAD_SOURCES[0]
    assert isinstance(tier, HostTierWorker)
    return tier


def engine_arguments(
    policy: str, setting: mix.Setting, serving: Serving, folder: Path, blocks: int
) -> dict[str, Any]:
    """vLLM's arguments for a policy on a setting; `blocks`: usable ones (vLLM keeps one more)."""
    stats, dilation = stats_in(folder), serving.dilation
    token_s = setting.load_token_s * dilation
    link = {"token_s": token_s, "fixed_s": setting.load_fixed_s * dilation}
    rules = LinkRules(
        duplex="half" if setting.stores == "shared" else "full",
        order="fifo" if policy in ("fcfs", BARE) else "loads_first",
    )
    host = transfer_config(EngineTier(link=rules), _host_bytes(setting, serving), stats)
    additional: dict[str, Any] = {STATS_KEY: stats}
    if serving.paced:
        step = StepModel(mix.STEP_TOKEN_S, 0.0, 0.0, 0.0, mix.STEP_FIXED_S, dilation)
        additional[PACE_KEY] = step.to_dict()
        pace = {**link, "store_token_s": token_s, "dilation": dilation}
        host["kv_connector_extra_config"][PACE_KEY] = pace
    if policy != BARE:
        additional[SCHEDULER_KEY] = {
            "rule": STOCK if policy.startswith("fcfs") else policy,
            "config": {}, "link": link if serving.paced else None, "stats": stats,
            "log": str(folder / "iterations.jsonl"),
        }  # fmt: skip
    return {
        "model": serving.model or str(bench_model()), "skip_tokenizer_init": True,
        "dtype": "float32", "max_model_len": min(1024, blocks * mix.BLOCK_TOKENS),
        "block_size": mix.BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks + 1,
        "max_num_batched_tokens": mix.BUDGET_TOKENS, "max_num_seqs": mix.MAX_RUNNING,
        "enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": "kappa_benchmarks.scheduling.vllm_runs.BenchWorker",
        "additional_config": additional, "kv_transfer_config": host,
        **({} if policy == BARE else {"scheduler_cls": _SCHEDULER}),
    }  # fmt: skip


def _host_bytes(setting: mix.Setting, serving: Serving) -> int:
    """Room for every prefix of the workload, and as much again for what its requests store."""
    if serving.model is None:
        return _HOST_BYTES
    shape = shape_from_config(serving.model, kv_dtype="float32")
    requests = mix.workload_of(setting.workload).requests
    return int(2 * kv_bytes_per_token(shape) * sum(one.prompt_tokens for one in requests))


@cache
def bench_model() -> Path:
    """A tiny model in a new folder of its own; gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="kappa-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    corpus = [f"word{i} and number {i * 7919 % 10007}" for i in range(2000)]
    return make_tiny_model(folder / "model", corpus)


class Engine(BareEngine):
    """One policy on one setting, kept for several runs."""

    def __init__(self, policy: str, setting: mix.Setting, serving: Serving) -> None:
        os.environ.update(CPU_ENV)  # its processes inherit it
        self.policy, self.setting, self.dilation = policy, setting, serving.dilation
        blocks = mix.workload_of(setting.workload).blocks
        super().__init__(lambda at: engine_arguments(policy, setting, serving, at, blocks))
        self._log = self.folder / "iterations.jsonl"

    async def measured_dilation(self) -> float:
        """Real seconds of a full step of this engine over emulated ones: the median of three."""
        took = []
        for number in range(4):
            full = [mix.Request(mix.FRESH, 0, mix.BUDGET_TOKENS)]
            (ids,) = mix.prompts(full, number, 0, _VOCABULARY)
            start_s = time.monotonic()
            async for _ in self.generate(ids, 1, f"measure-{number}", {}):
                took.append(time.monotonic() - start_s)
        # The first step includes one-time work.
        emulated_s = mix.STEP_FIXED_S + mix.BUDGET_TOKENS * mix.STEP_TOKEN_S
        return statistics.median(took[1:]) / emulated_s

    async def play(self, run: int, offloaded: bool = True) -> Played:
        """One run; the same `run` has the same prompts under every policy.

        offloaded: prefixes lie in the host tier when their requests come, else they are nowhere.
        """
        workload = mix.workload_of(self.setting.workload, mix.SEED + run)
        requests = workload.requests
        ids = mix.prompts(requests, mix.SEED, run, _VOCABULARY)
        await self._fill(requests if offloaded else (), ids, run)
        start_s, start_wall_s = time.monotonic(), time.time()
        serving = (
            self._serve(f"{run}-{number}", one, ids[number], start_s)
            for number, one in enumerate(requests)
        )
        served = await asyncio.wait_for(asyncio.gather(*serving), _RUN_LIMIT_S)
        await asyncio.sleep(0.3)  # the last reports
        engine: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        for message in self.reports():
            _count(engine, message, self.dilation)
            if message["kind"] == "admit":
                one = served[int(str(message["request_id"]).partition("-")[2])]
                # A preempted request is admitted again.
                at_s = (message["t_s"] - start_wall_s) / self.dilation
                one.admitted_s = min(one.admitted_s, at_s)
        return Played(workload.blocks, list(served), self._iterations(start_s), engine)

    async def _serve(
        self, name: str, request: mix.Request, ids: list[int], start_s: float
    ) -> Served:
        await asyncio.sleep(max(start_s + request.at_s * self.dilation - time.monotonic(), 0.0))
        served = Served(request, self._since(start_s))
        # As the decider would: who it is, and what it expects the host tier to hold.
        said = {
            REQUEST_ID_KEY: name,
            TENANT_KEY: f"{request.tenant}.{name.partition('-')[0]}",
            HOST_TOKENS_KEY: request.prefix_tokens,
        }
        unique = f"{name}-{time.monotonic_ns()}"
        # For the rule that is about it: the others are compared without such a hint.
        priority = request.priority if self.policy == "priority" else 0
        async for output in self.generate(
            ids, request.output_tokens, unique, said, priority=priority
        ):
            if math.isnan(served.first_s):
                served.first_s = self._since(start_s)
                served.cached_tokens = output.num_cached_tokens or 0
            served.tokens += output.outputs[0].token_ids
        served.finished_s = self._since(start_s)
        return served

    async def _fill(self, requests: Sequence[mix.Request], ids: list[list[int]], run: int) -> None:
        """Empty both tiers; then put the prefixes into the host tier, and nothing on the device."""
        await self._llm.collective_rpc("kappa_paced", args=(False,))
        await self._settled()
        await self._llm.reset_prefix_cache(reset_connector=True)
        for request, tokens in zip(requests, ids, strict=False):
            if request.prefix_tokens:
                prefix, name = tokens[: request.prefix_tokens], f"fill-{time.monotonic_ns()}"
                async for _ in self.generate(prefix, 1, name, {TENANT_KEY: f"fill.{run}"}):
                    pass
        await self._settled()
        await self._llm.collective_rpc("kappa_paced", args=(True,))
        await self._llm.reset_prefix_cache()
        await asyncio.sleep(0.2)
        for _ in self.reports():
            pass

    async def _settled(self) -> None:
        for _ in range(2):
            while not all(await self._llm.collective_rpc("kappa_idle")):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)

    def _since(self, start_s: float) -> float:
        return (time.monotonic() - start_s) / self.dilation

    def _iterations(self, start_s: float) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        found = []
        for line in self._log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line half written
                iteration = json.loads(line)
                if iteration["started_s"] >= start_s:
                    iteration["started_s"] = (iteration["started_s"] - start_s) / self.dilation
                    found.append(iteration)
        self._log.write_text("")
        return found


_COUNTED = (
    "loads_made", "load_s", "stores_made", "store_s", "store_wait_s", "waits", "stores_dropped",
    "steps", "step_s", "step_tokens", "overruns",
)  # fmt: skip


def _count(engine: dict[str, float], message: Mapping[str, Any], dilation: float) -> None:
    kind = message["kind"]
    if kind in ("load", "store"):
        engine[f"{kind}s_made"] += 1
        engine[f"{kind}_s"] += message["took_s"] / dilation
    elif kind == "wait":
        engine["waits"] += 1
        engine["store_wait_s"] += message["took_s"] / dilation
    elif kind == "store_dropped":
        engine["stores_dropped"] += 1
    elif kind == "step":
        engine["steps"] += 1
        engine["step_s"] += message["took_s"] / dilation
        engine["step_tokens"] += message["tokens"]
        engine["overruns"] += bool(message["overrun"])
