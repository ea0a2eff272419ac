"""How a replica finds out what its engine runs with and what its machine can do: asked of the
engine's worker process, measured once per machine, model and versions, and kept in a file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from kappa.host import Lock
from kappa.model import kv_bytes_per_token
from kappa_workers.host_memory import engine_version
from kappa_workers.identity import Profile, WorkerPlan, check_measured, of_all_ranks
from kappa_workers.nvml import gpus_and_driver
from kappa_workers.paced.disk_file import DiskError, measure_disk
from kappa_workers.vllm.arguments import STOCK_TIER

log = structlog.get_logger(__name__)

_PROFILE_TIMEOUT_S = 60.0
_READ_BACK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.1
# Raise it when the same fields come to mean something else.
_PROFILE_FORMAT = 4


class Measuring:
    """A part of an `LLMServer`; its engine answers the methods of
    `kappa_workers.vllm.measured_worker`."""

    # The plan as it was given: measurements of earlier starts are found by it.
    _given: WorkerPlan
    # The same with what the engine chose.
    _plan: WorkerPlan
    _worker: str
    _rank: int
    engine: Any
    collective_rpc: Callable[..., Awaitable[list[Any]]]

    async def _read_back(self) -> WorkerPlan:
        """The plan with what the engine chose where it was given nothing. RuntimeError: it does not
        say, and a limit is not given either."""
        plan = self._plan
        if plan.engine.kind != "vllm":
            return plan
        try:
            call = self.collective_rpc("kappa_engine")
            return plan.started(await asyncio.wait_for(call, _READ_BACK_TIMEOUT_S))
        except Exception as error:
            missing = plan.limits.missing
            if missing:
                raise RuntimeError(
                    f"the engine does not say what it chose ({error!r}): give "
                    + ", ".join(f"engine.{name}" for name in missing)
                ) from error
            log.warning("read_back_failed", worker=self._worker, error=repr(error))
            return plan

    async def _measure(self, *, again: bool = False) -> Profile:
        """This machine and engine, as measured now or at an earlier start; its disk as it is now.
        again: measure the machine even if it is known. The engine measures itself only before it
        serves: its blocks are written over."""
        if self._plan.engine.kind == "vllm" and self._plan.tier == STOCK_TIER:
            return Profile({}, "host_tier stock: nothing of ours runs in the engine to measure it")
        async with _alone(self._profile_path().with_suffix(".lock")):
            found = await self._measure_alone(again=again)
            return await self._with_disk(found) if self._plan.engine.disk_bytes else found

    def _unanswered(self) -> int | None:
        """Requests that the engine has not answered, whichever way they came; None: not known."""
        client = getattr(self.engine, "_engine_client", None)
        return client.output_processor.get_num_unfinished_requests() if client else None

    async def _with_disk(self, found: Profile) -> Profile:
        folder, block_bytes = Path(str(self._plan.engine.disk_dir)), int(self._plan.block_bytes)
        try:
            disk = await asyncio.to_thread(measure_disk, folder, block_bytes)
        except DiskError as error:
            return replace(found, error=f"{found.error} {error}".strip())
        return replace(found, measured={**found.measured, "disk": disk})

    async def _measure_alone(self, *, again: bool) -> Profile:
        known, request = self._cached_profile(), self._plan.profile_request()
        if known and not again:
            return Profile(known)
        if not again:
            request["engine"] = self._plan.engine_request(self._rank)
        try:
            results = await asyncio.wait_for(
                self.collective_rpc("kappa_profile", args=(request,)), _PROFILE_TIMEOUT_S
            )
        except Exception as error:
            log.warning("profile_failed", worker=self._worker, error=repr(error))
            reason = f"profile failed, serving with the catalogue's figures: {error!r}"
            return Profile({}, reason)
        measured, path = of_all_ranks(results), self._profile_path()
        if "load_fixed_s" in measured:
            token_bytes = kv_bytes_per_token(self._plan.served)
            measured["load_token_s"] = token_bytes / measured["h2d_bytes_per_s"]
        if "unmeasured" in known:  # of the engine nothing is measured again
            measured = {**known, "peaks": measured["peaks"], "gemm": measured["gemm"]}
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measured))
        return Profile(measured)

    def _cached_profile(self) -> dict[str, Any]:
        """The measurements of an earlier start; empty if there are none, or if their file was
        changed."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = dict(json.loads(self._profile_path().read_text()))
            check_measured(known)
            return known
        return {}

    def _profile_path(self) -> Path:
        # Of the settings: it is looked for before the engine has chosen.
        served, limits = self._given.served, self._given.limits
        machine = f"{os.uname().nodename}-{os.uname().machine}-{os.cpu_count()}"
        machine += f"-{self._given.gpus}-{gpus_and_driver() if self._given.gpus else ''}"
        machine += f"-{engine_version()}-{os.environ.get('OMP_NUM_THREADS')}-{_PROFILE_FORMAT}"
        key = f"{machine}-{served.name}-{served.hidden}-{limits.dtype}-{limits.block_tokens}"
        # The engine's own measurements and sizes: a paced engine has none.
        key += f"-{sorted(self._given.engine_request(self._rank))}-{self._given.tier}"
        key += f"-{limits.max_batch_tokens}-{limits.max_sequences}-{limits.max_context_tokens}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return Path(self._plan.cache_dir) / "profiles" / f"{digest}.json"


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncGenerator[None, None]:
    """One replica of this machine at a time measures, and those after it find what it measured.
    Waits no longer than a measurement may take, and goes on without a folder to lock in."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
            held.callback(lock.release)
            end_s = time.monotonic() + _PROFILE_TIMEOUT_S
            while not lock.take() and time.monotonic() < end_s:
                await asyncio.sleep(_LOCK_POLL_S)
        yield
