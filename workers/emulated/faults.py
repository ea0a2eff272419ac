"""What is to go wrong in an emulated engine, told by a file while it runs.

`KAPPA_EMULATED_FAULTS` names a JSON file: `{"WORKER": {"link_slower": 10, "loads_fail": true,
"events": "lose"}}`, with `*` for every worker. Only emulated engines read it, so nothing of the
kind exists where tokens are real. A file that cannot be read is no fault at all, and is said once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import structlog

log = structlog.get_logger(__name__)

ENV = "KAPPA_EMULATED_FAULTS"
EventFault = Literal["", "lose", "repeat", "reorder"]
_EVENT_FAULTS = ("", "lose", "repeat", "reorder")
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """link_slower: a load lasts so many times as long as it should. loads_fail: none arrives.
    events: what happens to every second batch of KV events."""

    link_slower: float = 1.0
    loads_fail: bool = False
    events: EventFault = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineFaults:
        """Rebuild from JSON; ValueError names what is wrong."""
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown faults {unknown}: known are {[f.name for f in fields(cls)]}")
        made = cls(**data)
        if not made.link_slower > 0:
            raise ValueError(f"link_slower is {made.link_slower}: give a factor above zero")
        if made.events not in _EVENT_FAULTS:
            raise ValueError(f"events is {made.events!r}: choose one of {_EVENT_FAULTS}")
        return made


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
        now_s = self._clock()
        if self._path and now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._faults

    def _look(self) -> None:
        path = Path(self._path)
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            self._faults, self._seen = EngineFaults(), 0
            return
        if changed == self._seen:
            return
        self._seen = changed
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            self._faults = EngineFaults.from_dict(
                {**told.get("*", {}), **told.get(self._worker, {})}
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._faults = EngineFaults()
            log.warning("faults_unreadable", path=self._path, reason=str(error))
