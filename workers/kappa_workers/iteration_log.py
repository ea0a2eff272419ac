"""The record of an engine's iterations: totals for the worker's report and, on request, JSON lines.
Totals leave every tenth of a second and whenever the engine falls idle; they are cumulative, so a
lost message costs nothing. The engine does not wait for a disk: lines that it is too slow for
are left out, where it is full they end, and the log says so once."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Full, Queue

import structlog

from kappa.protocol import Charge

log = structlog.get_logger(__name__)

_SEND_EVERY_S = 0.1
_MOST_LINES = 10_000
_MOST_PENDING = 64


@dataclass(slots=True)
class Iteration:
    """One iteration, as it was scheduled; seconds of the engine's own clock."""

    started_s: float
    tokens: int = 0
    budget_tokens: int = 0
    # Blocks held after it was scheduled.
    blocks: int = 0
    capacity_blocks: int = 0
    # Whether a request waited before it.
    queued: bool = False
    # Requests after it, by state.
    waiting: int = 0
    loading: int = 0
    running: int = 0
    admitted: int = 0
    # Requests that were planned and then not admitted by the engine.
    returned: int = 0
    preempted: int = 0
    # Requests left waiting, by reason.
    passed: Mapping[str, int] = field(default_factory=dict)
    # Whether it ran in the engine's own order.
    stock: bool = False
    # Seconds that the rule took.
    plan_s: float = 0.0
    # Seconds until its tokens were sampled.
    step_s: float = 0.0


class IterationLog:
    """Follows an engine's iterations from schedule to sample. send: puts a message on the stats
    channel, without blocking. path: file for JSON lines.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, send: Callable[[dict[str, object]], None], path: str | None = None) -> None:
        self._send = send
        self._gaps = False
        self._pending: deque[Iteration] = deque(maxlen=_MOST_PENDING)
        self._passed: Counter[str] = Counter()
        self._iterations = self._queued = self._preemptions = 0
        self._budget_fill = self._vram_fill = 0.0
        self._last_end_s = self._last_sent_s = 0.0
        self._sent_charges: dict[str, Charge] = {}
        self._lines: Queue[Iteration | None] = Queue(_MOST_LINES)
        self._writer: threading.Thread | None = None
        if path:
            self._start_writer(Path(path))

    def scheduled(self, iteration: Iteration) -> None:
        self._pending.append(iteration)

    def ended(self, now_s: float) -> Iteration | None:
        """The oldest iteration under way has its tokens; returns it, its seconds filled in.
        Iterations that overlap share the time: each counts from the end of the one before."""
        if not self._pending:
            return None
        it = self._pending.popleft()
        it.step_s = now_s - max(it.started_s, self._last_end_s)
        self._last_end_s = now_s
        self._iterations += 1
        self._preemptions += it.preempted
        if it.passed:
            self._passed.update(it.passed)
        if it.queued:
            self._queued += 1
            self._budget_fill += it.tokens / max(it.budget_tokens, 1)
            self._vram_fill += it.blocks / max(it.capacity_blocks, 1)
        if self._writer is not None:
            try:
                self._lines.put_nowait(it)
            except Full:
                self._left_out("the disk is too slow")
        return it

    def due(self, now_s: float, idle: bool) -> bool:
        return idle or now_s - self._last_sent_s >= _SEND_EVERY_S

    def publish(
        self,
        now_s: float,
        counts: tuple[int, int, int],
        rule_errors: int,
        charges: Mapping[str, Charge],
    ) -> None:
        """Send the totals, and the charges that changed; counts: of requests that wait, load and
        run."""
        self._last_sent_s = now_s
        changed = {t: c for t, c in charges.items() if self._sent_charges.get(t) != c}
        self._sent_charges.update(changed)
        waiting, loading, running = counts
        self._send(
            {
                "kind": "iterations",
                "iterations": self._iterations,
                "queued_iterations": self._queued,
                "budget_fill": self._budget_fill,
                "vram_fill": self._vram_fill,
                "passed": dict(self._passed),
                "preemptions": self._preemptions,
                "rule_errors": rule_errors,
                "charges": {tenant: list(charge) for tenant, charge in changed.items()},
                "waiting": waiting,
                "loading": loading,
                "running": running,
            }
        )

    def _left_out(self, why: str) -> None:
        if not self._gaps:
            self._gaps = True
            log.warning("iteration_log_has_gaps", reason=why)

    def close(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            try:
                self._lines.put(None, timeout=1.0)
            except Full:
                return
            self._writer.join(timeout=2.0)

    def _start_writer(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"the scheduler's log {path} cannot be written: {error.strerror}; give another "
                "path, or none"
            ) from None

        def write() -> None:
            try:
                with file:
                    while (iteration := self._lines.get()) is not None:
                        file.write(json.dumps(asdict(iteration)) + "\n")
                        if self._lines.empty():
                            file.flush()
            except OSError as error:
                self._left_out(str(error))

        self._writer = threading.Thread(target=write, name="kappa-iterations", daemon=True)
        self._writer.start()
