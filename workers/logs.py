"""How a worker's processes write their log: for people or as JSON, to standard output and a file.

One call at start, in the replica and in each process of its engine. `router.observing.logs` does
the same for the ingress, in the same form (`kappa.log_lines`).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from kappa.log_lines import as_json, destination, stamped

_LEVELS = {"DEBUG": logging.DEBUG}


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
