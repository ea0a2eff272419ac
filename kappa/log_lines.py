"""Log lines as JSON objects: the same keys in the same order from every process.

Plain functions in the shape of structlog's processors, so that ingress and workers, which may not
import each other, write alike. Anything that JSON cannot hold becomes text; a line never fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO

FIRST_KEYS = ("time", "level", "event", "request_id", "tenant")
"""What a line begins with, where it has it."""


def stamped(_logger: object, method: str, line: MutableMapping[str, Any]) -> dict[str, Any]:
    """A line with its level and, in UTC to the microsecond, its time."""
    now_s = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    stamp = f"{whole}.{int(now_s % 1 * 1e6):06d}Z"
    level = "error" if method in ("exception", "critical", "fatal") else method
    return {"time": stamp, "level": level, **line}


def as_json(_logger: object, _method: str, line: MutableMapping[str, Any]) -> str:
    """A line as one JSON object without line breaks."""
    first = {key: line[key] for key in FIRST_KEYS if line.get(key) is not None}
    rest = {key: value for key, value in line.items() if key not in FIRST_KEYS}
    return json.dumps({**first, **rest}, default=repr, skipkeys=True, separators=(",", ":"))


class Tee:
    """Writes each line to several streams; one that fails is left out from then on."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = list(streams)

    def write(self, text: str) -> int:
        """Write to all; a full disk or a closed pipe must not fail a request."""
        for stream in list(self._streams):
            try:
                stream.write(text)
            except (OSError, ValueError):
                self._streams.remove(stream)
        return len(text)

    def flush(self) -> None:
        """Flush all."""
        for stream in list(self._streams):
            try:
                stream.flush()
            except (OSError, ValueError):
                self._streams.remove(stream)


def destination(log_file: str | None) -> Tee:
    """Standard output, and the file if one is given; several processes may append to it.

    Raises:
        ValueError: the file cannot be opened, with its name and why.
    """
    if log_file is None:
        return Tee(sys.stdout)
    try:
        # Line by line and in append mode: lines of several processes do not mix.
        file = Path(log_file).open(  # noqa: SIM115  # lives as long as the process
            "a", buffering=1, encoding="utf-8"
        )
    except OSError as error:
        raise ValueError(
            f"observing.log_file {log_file}: cannot be written: {error.strerror}"
        ) from None
    return Tee(sys.stdout, file)
