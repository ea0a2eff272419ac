"""How the ingress' process writes its log: for people or as JSON, to standard output and a file.

One call at start. The id of the request that a line belongs to comes from the context that the
ASGI middleware binds, so whoever logs need not pass it on. `workers.logs` does the same for the
workers' processes, in the same form (`kappa.log_lines`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog

from kappa.log_lines import as_json, destination, stamped

_LEVELS = {"DEBUG": logging.DEBUG}
_SPARSE_S = 60.0


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
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS.get(level, logging.INFO)),
        logger_factory=structlog.PrintLoggerFactory(out),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )


class Sparse(logging.Filter):
    """Lets one line a minute through: for libraries that complain of every failure."""

    def __init__(
        self, every_s: float = _SPARSE_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
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
