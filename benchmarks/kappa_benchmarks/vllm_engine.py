"""vLLM's engine without Ray: prompts of token ids in, outputs and the engine's own reports out.

Its processes are this one's children. They report loads, stores and steps over our stats channel.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq


class BareEngine:
    """One engine, which is started inside a running event loop."""

    def __init__(self, arguments: Callable[[Path], Mapping[str, Any]]) -> None:
        """Start it: about 13 s. arguments: vLLM's, given the folder in which `stats_in` lies."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._directory = tempfile.TemporaryDirectory(prefix="kappa-bench-")
        self.folder = Path(self._directory.name)
        self._context = zmq.Context()
        self._stats = self._context.socket(zmq.PULL)
        self._stats.set_hwm(1_000_000)
        self._stats.bind(stats_in(self.folder))
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(self.folder)))
        except BaseException:
            # A context that is collected with a message left in it blocks for ever.
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """End its processes."""
        self._llm.shutdown()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    async def generate(
        self, ids: Sequence[int], tokens: int, name: str, extra_args: Mapping[str, Any],
        logprobs: int | None = None, priority: int = 0,
    ) -> AsyncIterator[Any]:  # fmt: skip
        """vLLM's outputs of one request, each with its new tokens; the answer has exactly `tokens`
        tokens. logprobs: how many of the likeliest tokens get one."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False,
            logprobs=logprobs, output_kind=RequestOutputKind.DELTA, extra_args=dict(extra_args),
        )  # fmt: skip
        prompt, ranked = {"prompt_token_ids": list(ids)}, {"priority": priority} if priority else {}
        async for output in self._llm.generate(prompt, params, name, **ranked):
            yield output

    def reports(self) -> Iterator[dict[str, Any]]:
        """Messages of the stats channel since the last call."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield msgspec.msgpack.decode(self._stats.recv(zmq.NOBLOCK))


def stats_in(folder: Path) -> str:
    """The stats channel's address."""
    return f"ipc://{folder}/stats"
