"""What is to go wrong in an emulated engine: `KAPPA_EMULATED_FAULTS` names a JSON file, read while
it runs, `{"WORKER": {"link_slower": 10, "loads_fail": true, "events": "lose"}}`, with `*` for every
worker. One that cannot be read is no fault at all, and is logged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog

from workers.own_engine.reports import KvPublisher

log = structlog.get_logger(__name__)

ENV = "KAPPA_EMULATED_FAULTS"
_LOOK_EVERY_S = 0.2


class EngineFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """link_slower: a load lasts so many times as long as it should. loads_fail: none arrives.
    events: what happens to every second batch of KV events."""

    link_slower: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    loads_fail: bool = False
    events: Literal["", "lose", "repeat", "reorder"] = ""


class FaultsFile:
    """The faults of one worker, read again when the file changes, a few times a second at most."""

    def __init__(self, path: str, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._worker, self._clock = path, worker, clock
        self._faults = EngineFaults()
        self._looked_s, self._seen = float("-inf"), 0

    @classmethod
    def of_environment(cls, worker: str) -> FaultsFile:
        """The file that the environment names, if it names one."""
        return cls(os.environ.get(ENV, ""), worker)

    def now(self) -> EngineFaults:
        """What goes wrong at this moment."""
        now_s, path = self._clock(), Path(self._path)
        if not self._path or now_s - self._looked_s < _LOOK_EVERY_S:
            return self._faults
        self._looked_s = now_s
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            self._faults, self._seen = EngineFaults(), 0
            return self._faults
        if changed != self._seen:
            self._seen = changed
            try:
                read = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
                mine = {**read.get("*", {}), **read.get(self._worker, {})}
                self._faults = msgspec.convert(mine, EngineFaults)
            except (OSError, msgspec.MsgspecError) as error:
                self._faults = EngineFaults()
                log.warning("faults_unreadable", path=self._path, reason=str(error))
        return self._faults


class FaultyPublisher(KvPublisher):
    """Loses, repeats or reorders every second batch, as a network could, while a fault says so."""

    def __init__(self, endpoint: str, faults: FaultsFile) -> None:
        super().__init__(endpoint)
        self._network_faults = faults
        self._late: tuple[int, list[bytes]] | None = None

    def send(self, number: int, frames: list[bytes]) -> None:
        fault = self._network_faults.now().events if number % 2 else ""
        if fault == "reorder":
            self._late = number, frames
        elif fault != "lose":
            for _ in range(2 if fault == "repeat" else 1):
                super().send(number, frames)
            if self._late is not None:
                super().send(*self._late)
                self._late = None
