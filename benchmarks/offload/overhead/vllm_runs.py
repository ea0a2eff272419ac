"""The driver of `kappa bench offload-overhead`: one bare, paced vLLM engine per node.

Real: vLLM with our worker and host tier, without Ray, its scheduling, prefix caching, block copies
and steps. Emulated: how long a step and a load last; both last as long as the named node would take
for the emulated model, times the dilation. Stores are real but take no emulated time: the paper
leaves the write path out, and here it must not queue before loads. Prefixes are computed unpaced
once, so that they lie in the host tier; a host hit empties the device first, and a device hit
follows it, when the load has put the prefix there. What a request really did is counted from
the worker's own reports of bytes copied and tokens computed, not from what a lookup claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.offload.overhead.points import Arm, Limits, Point, Sample
from benchmarks.scheduling.vllm_runs import bench_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.protocol import REQUEST_ID_KEY
from workers.vllm.arguments import CPU_ENV, EngineLimits, Pace, engine_kwargs

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **CPU_ENV})

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

_VOCABULARY = (100, 4000)
_REQUEST_LIMIT_S = 60.0
_REPORT_LIMIT_S = 5.0
_RESET_LIMIT_S = 20.0
# A step that starts within 20 ms of another's end is paced from that end: keep clear of it.
_GAP_S = 0.025


class OverheadNode:
    """One paced engine and its counters; asks one request at a time.

    Args:
        profile: the node that it is paced as.
        shape: the model whose bytes and FLOPs its pace is made of.
        dilation: wall seconds per emulated second.
        limits: sizes of the engine.
        seed: of prefixes and new tokens; the same on every node.
    """

    def __init__(
        self, profile: NodeProfile, shape: ModelShape, dilation: float, limits: Limits, seed: int
    ) -> None:
        """Start the engine: about 13 s."""
        os.environ.update(CPU_ENV)  # its processes inherit it
        self.name, self.dilation = profile.name, dilation
        self._rng = np.random.default_rng(seed)
        self._folder = tempfile.TemporaryDirectory(prefix="kappa-overhead-")
        endpoint = f"ipc://{self._folder.name}/stats"
        self._context = zmq.Context()
        self._stats = self._context.socket(zmq.PULL)
        self._stats.set_hwm(1_000_000)
        self._stats.bind(endpoint)
        paced = replace(profile, source="paced", dilation=dilation)
        arguments = engine_arguments(Pace(shape, paced), limits, endpoint)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._prefixes: dict[Point, list[int]] = {}
        self._asked = 0
        self._ended_s = 0.0

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def fill(self, points: Sequence[Point]) -> None:
        """Put every point's prefix into the host tier, unpaced."""
        await self._llm.collective_rpc("kappa_paced", args=(False,))
        await self._reset(host_too=True)
        for point in points:
            self._prefixes[point] = self._tokens(point.cached_tokens)
            await self._generate(self._prefixes[point], "fill")
        await self._idle()
        await self._llm.collective_rpc("kappa_paced", args=(True,))
        await self._reset()

    async def ask(self, point: Point, arm: Arm) -> Sample:
        """One request; a device hit needs a host hit of its point before it."""
        if arm == "host":
            await self._reset()
        prefix = [] if arm == "new" else self._prefixes[point]
        prompt = prefix + self._tokens(point.new_tokens)
        await asyncio.sleep(max(self._ended_s + _GAP_S - time.monotonic(), 0.0))
        for _ in self._messages():  # of stores, and of the request before
            pass
        self._asked += 1
        name = f"{arm}-{self._asked}"
        ttft_s = await self._generate(prompt, name)
        messages = await self._reports(name)
        self._ended_s = time.monotonic()
        steps = [message for message in messages if message["kind"] == "step"]
        loads = [message for message in messages if message["kind"] == "load"]
        computed = sum(message["tokens"] for message in steps)
        loaded = sum(message["tokens"] for message in loads)
        return Sample(
            point, arm, ttft_s / self.dilation, computed, loaded,
            sum(message["bytes"] for message in loads), len(prompt) - computed - loaded,
            sum(bool(message["overrun"]) for message in steps),
        )  # fmt: skip

    async def _generate(self, prompt: list[int], name: str) -> float:
        """Real seconds to the only token of an answer."""
        params = SamplingParams(
            max_tokens=1, ignore_eos=True, temperature=0.0, detokenize=False,
            extra_args={REQUEST_ID_KEY: name},
        )  # fmt: skip
        request = f"{name}-{time.monotonic_ns()}"
        start_s = time.monotonic()
        first_s = None
        async with asyncio.timeout(_REQUEST_LIMIT_S):
            async for _ in self._llm.generate({"prompt_token_ids": prompt}, params, request):
                first_s = first_s or time.monotonic()
        if first_s is None:
            raise RuntimeError(f"{self.name}: {name} ended without a token")
        return first_s - start_s

    async def _reports(self, name: str) -> list[dict[str, Any]]:
        """Everything reported since the request was sent, up to its own prefill's step."""
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(_REPORT_LIMIT_S):
            while not any(name in m["prefilled"] for m in found if m["kind"] == "step"):
                await asyncio.sleep(0.001)
                found += self._messages()
        return found

    async def _reset(self, host_too: bool = False) -> None:
        """Empty the device; it says no while blocks are still being stored."""
        async with asyncio.timeout(_RESET_LIMIT_S):
            await self._idle()
            while not await self._llm.reset_prefix_cache(reset_connector=host_too):
                await asyncio.sleep(0.005)

    async def _idle(self) -> None:
        while not all(await self._llm.collective_rpc("kappa_idle")):
            await asyncio.sleep(0.005)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(*_VOCABULARY, size=count).tolist()

    def _messages(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(zmq.Again):
            while True:
                yield msgspec.msgpack.decode(self._stats.recv(zmq.NOBLOCK))


def engine_arguments(pace: Pace, limits: Limits, endpoint: str) -> dict[str, Any]:
    """A worker's own vLLM arguments, for a bare engine whose stores take no emulated time."""
    model = bench_model()
    sizes = EngineLimits(
        limits.context_tokens, limits.block_tokens,
        # vLLM keeps one block to itself.
        limits.device_tokens // limits.block_tokens + 1, limits.host_tokens * TINY_TOKEN_BYTES,
        limits.step_tokens, 1, "float32",
    )  # fmt: skip
    arguments = engine_kwargs(sizes, endpoint, "", pace)
    del arguments["kv_events_config"]
    arguments["kv_transfer_config"]["kv_connector_extra_config"]["kappa_pace"]["store_token_s"] = 0
    return arguments | {
        "model": str(model), "skip_tokenizer_init": True, "disable_log_stats": True,
        "use_tqdm_on_load": False, "worker_cls": "benchmarks.scheduling.vllm_runs.BenchWorker",
    }  # fmt: skip


# Keys and values of one KV head of 32 dimensions in float32, over two layers (workers.tiny_model).
TINY_TOKEN_BYTES = 2 * 2 * 32 * 4
