"""The log of every process: for people or as JSON, to standard output and a file.

One call at start, in the decider, in each replica and in each process of its engine, so that all
write the same keys in the same order. The id of the request that a line belongs to comes from the
context that the ASGI middleware binds. What JSON cannot hold becomes text; a line never fails.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

FIRST_KEYS = ("time", "level", "event", "request_id", "tenant")
"""Keys that begin a line, where it has them."""


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
        self._each(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._each(lambda stream: stream.flush())

    def _each(self, do: Callable[[TextIO], object]) -> None:
        for stream in list(self._streams):
            try:
                do(stream)
            except (OSError, ValueError):
                self._streams.remove(stream)


def destination(log_file: str | None) -> Tee:
    """Standard output, and the file if one is given; `ValueError` if that cannot be opened."""
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


def configure(log_format: str, log_file: str | None = None, level: str = "INFO") -> None:
    """Set structlog up for this process.

    log_format: `console` or `json`. log_file: lines are appended there, too; several processes may
    share it. level: DEBUG shows more; everything else is what Ray's drivers filter themselves.

    Raises:
        ValueError: the file cannot be opened.
    """
    out = destination(log_file)
    processors: list[Any] = [structlog.contextvars.merge_contextvars, stamped]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, as_json]
    else:
        # Plain tracebacks: with locals they would show prompts.
        plain = structlog.dev.plain_traceback
        processors.append(
            structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=plain)
        )
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if level == "DEBUG" else logging.INFO
        ),
        logger_factory=structlog.PrintLoggerFactory(out),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )


class RateLimit(logging.Filter):
    """Lets one line a minute through: for libraries that complain of every failure."""

    def __init__(self, every_s: float = 60.0, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s, self._now_s = every_s, now_s
        self._next_s = -1.0
        self.held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line may pass; those held back in between are counted in the next."""
        now_s = self._now_s()
        if now_s < self._next_s:
            self.held_back += 1
            return False
        self._next_s = now_s + self._every_s
        if self.held_back:
            record.msg = f"{record.getMessage()} ({self.held_back} lines like this held back)"
            record.args = ()
            self.held_back = 0
        return True
