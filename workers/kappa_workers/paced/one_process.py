"""vLLM's engine on a CPU: one process beside its replica instead of two, forked from the replica.

vLLM has a second process because OpenMP's threads are bound before it starts; ours are not bound
(`kappa_workers.vllm.arguments.CPU_ENV`), so the only rank runs in the engine's process. A fork has
imported vLLM already, which takes eight seconds of a core, and shares those pages. vLLM itself
forks, but not from an actor of Ray's, since a child must leave the actor's connections and threads
alone: ours closes the connections and never calls Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import stat
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from ray._raylet import setproctitle  # type: ignore[attr-defined]
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.v1.engine import utils

from kappa_workers.vllm_plugin import end_with_owner

# A lock that a thread of the replica held while it forked is never released in the child: one that
# has not loaded its model by then ends, and the replica, and Ray starts both again.
_LOADED_WITHIN_S = 300.0


class EngineProcess(ForkProcess):
    """vLLM's engine in a fork of a replica."""

    def start(self) -> None:
        """Fork; what was imported until then the collector leaves alone in both from now on: each
        page that it marked would be one that they no longer share."""
        gc.collect()
        gc.freeze()
        super().start()

    def run(self) -> None:
        """As its target says, without what belongs to the replica."""
        from vllm.v1.engine.core import EngineCoreProc

        faulthandler.dump_traceback_later(_LOADED_WITHIN_S, exit=True)
        close_connections()
        # Ray has moved the words that vLLM's own way of naming a process looks for.
        setproctitle(f"VLLM::{self.name}")
        end_with_owner()
        serve = EngineCoreProc.run_busy_loop

        def loaded(core: Any) -> Any:
            faulthandler.cancel_dump_traceback_later()
            # Weights as they were read, of which the model holds copies in another order.
            ctypes.CDLL(None).malloc_trim(0)
            return serve(core)

        EngineCoreProc.run_busy_loop = loaded
        super().run()


class _Forking(ForkContext):
    Process = EngineProcess  # type: ignore[assignment]


class OneProcessEngine(VLLMEngine):
    """Ray's vLLM engine with its only rank in the engine's own process."""

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> Any:
        if config.parallel_config.world_size == 1:
            # Here rather than in the arguments, where Ray and vLLM each put "mp" in its place.
            config.parallel_config.distributed_executor_backend = "uni"
            utils.get_mp_context = _Forking
        return super()._start_async_llm_engine(args, config, placement_group)


def close_connections() -> None:
    """Close every socket of this process. In a fork these are its parent's: the peers would take
    the parent for alive as long as the fork lives."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
