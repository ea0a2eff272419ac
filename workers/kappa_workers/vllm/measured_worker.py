"""A part of a vLLM worker that says what it runs with and measures itself: in our workers, and in a
stock one by vLLM's `worker_extension_cls` (`kappa_workers.announcing`). Called by
`collective_rpc`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class MeasuredWorker:
    """A part of a worker of vLLM's; it defines no name that vLLM's workers have."""

    def kappa_profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """The peaks of this process (`kappa_engine.peaks.machine_peaks`), and if `request` has an
        `engine`, arguments of `measure_engine`, what this engine measures of itself."""
        from kappa_engine.peaks import machine_peaks
        from kappa_workers.vllm.measured_engine import measure_engine

        found = machine_peaks(request)
        if request.get("engine"):
            found |= measure_engine(self, *self._kappa_step_calls(), **request["engine"])
        return found

    def kappa_engine(self) -> dict[str, Any]:
        """As `engine_facts`; on a CPU without the weights: they are packed again there, and most of
        the packed ones are no parameters."""
        from kappa_workers.vllm.read_back import engine_facts

        worker: Any = self
        runner = worker.model_runner
        facts = engine_facts(worker.vllm_config, runner.kv_cache_config, runner.get_model())
        return {**facts, "weight_bytes": 0} if worker.device.type == "cpu" else facts

    def _kappa_step_calls(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The methods that run a step and sample its tokens."""
        worker: Any = self
        return worker.execute_model, worker.sample_tokens
