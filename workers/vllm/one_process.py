"""vLLM's engine on a CPU in one process instead of two. A second one is started because OpenMP's
threads are bound before it; ours are not (`workers.vllm.arguments.CPU_ENV`), so a worker of one
rank runs where it is scheduled, as on a GPU: one import of vLLM less, no queue in shared memory."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine


class OneProcessEngine(VLLMEngine):
    """Ray's vLLM engine, whose only rank runs in the engine's own process."""

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> Any:
        if config.parallel_config.world_size == 1:
            # Here rather than in the arguments, where Ray and vLLM each put "mp" in its place.
            config.parallel_config.distributed_executor_backend = "uni"
        return super()._start_async_llm_engine(args, config, placement_group)
