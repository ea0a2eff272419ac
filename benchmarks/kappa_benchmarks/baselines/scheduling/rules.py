"""Scheduling rules of other systems: the order of their queues, and their handling of misfits.

Each class names its own part and its origin; `kappa_benchmarks.baselines.scheduling.queue` holds
the common part. vLLM's "fcfs" is the product's (`kappa_scheduler.fcfs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kappa_benchmarks.baselines.scheduling.queue import Queue
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import Memory, Quote, Work

_HRRN_WAITING = 128
_HIGH_RATIO = 8.0


class Priority(Queue):
    """vLLM 0.29, policy "priority": lower numbers first, ties by arrival; stops at a misfit.

    The victim is the running request of the highest number, the latest of them.
    """

    name = "priority"

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        return sorted(self._waiting, key=_rank)

    def victim(self, running: Sequence[Work]) -> Work:
        """The running request of the highest number, the latest to arrive."""
        return max(running, key=_rank)


def _rank(work: Work) -> tuple[int, int]:
    return work.priority, work.seq


class Hrrn(Queue):
    """SGLang's "hrrn": highest response ratio next, aged by tokens.

    Ratio = 1 + (tokens that the engine ran since it began to wait) / (its uncached tokens): highest
    first, ties by arrival; stops at a misfit. Above 128 waiting it is first come first served. A
    request with next to nothing to compute goes first, however much VRAM it holds.
    """

    name = "hrrn"
    timed = True

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self._ran_tokens = 0
        # Of those that wait: the count when they did so at the start of an iteration, or None.
        self._began: dict[Work, int | None] = {}

    def add(self, work: Work, now_s: float) -> bool:
        """Queue it; its waiting begins with the next iteration."""
        self._began[work] = None
        return super().add(work, now_s)

    def returned(self, work: Work, now_s: float) -> None:
        """Queue it again; its waiting begins again."""
        self._began[work] = None
        super().returned(work, now_s)

    def aborted(self, work: Work, now_s: float) -> None:
        self._began.pop(work, None)
        super().aborted(work, now_s)

    def _admitted(self, work: Work, quote: Quote) -> None:
        del self._began[work]

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        for work in reversed(self._began):
            if self._began[work] is not None:
                break
            self._began[work] = self._ran_tokens
        if len(self._waiting) > _HRRN_WAITING:
            return super()._order(memory, now_s)
        ratios: dict[Work, float] = {}
        for work in self._waiting:
            quote = memory.quote(work)
            cached = 0 if quote is None else quote.device_tokens + quote.host_tokens
            waited = self._ran_tokens - (self._began[work] or 0)
            ratios[work] = waited / max(work.total_tokens - cached, 1)
        return sorted(ratios, key=lambda w: (-ratios[w], w.seq))

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """All who wait age by what ran."""
        self._ran_tokens += sum(tokens.values())


class Cap1(Queue):
    """Goes past what does not fit, with one high-ratio request in the engine at most.

    Order of arrival. High ratio: it has something to load, or cached at least 8 times what it
    computes. The fixed cap tried on vLLM: it frees the others and halves the link's use.
    """

    name = "cap1"
    packs = True
    strict = False

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self._high: set[Work] = set()

    def _capped(self, work: Work, quote: Quote) -> bool:
        return bool(self._high) and _high_ratio(work, quote)

    def _admitted(self, work: Work, quote: Quote) -> None:
        if _high_ratio(work, quote):
            self._high.add(work)

    def returned(self, work: Work, now_s: float) -> None:
        """It is not in the engine."""
        self._high.discard(work)
        super().returned(work, now_s)

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        self._high.discard(work)
        super().finished(work, output_tokens, now_s)


def _high_ratio(work: Work, quote: Quote) -> bool:
    cached = quote.device_tokens + quote.host_tokens
    return quote.host_tokens > 0 or cached >= _HIGH_RATIO * (work.total_tokens - cached)


class Greedy(Queue):
    """Fills VRAM, smallest footprint first (proposed for vLLM, issue 16969); starves the large.

    Blocks it would take now, fewest first, ties by arrival, until one does not fit.
    """

    name = "greedy"
    packs = True

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        blocks: dict[Work, int] = {}
        for work in self._waiting:
            quote = memory.quote(work)
            blocks[work] = 0 if quote is None else quote.blocks
        return sorted(blocks, key=lambda w: (blocks[w], w.seq))
