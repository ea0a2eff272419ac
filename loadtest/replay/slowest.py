"""The slowest requests of a run, kept while it is read: by first token, and by later tokens.

Ties go to the one that came first, so that one journal gives one report.
"""

from __future__ import annotations

import heapq
from typing import Any

from loadtest.replay.record import Record
from loadtest.replay.slow import split, why_slow, why_slow_tokens

KEPT = 25
KEPT_TOKENS = 10

_Heap = list[tuple[float, int, Record]]


class Slowest:
    """The worst requests so far."""

    def __init__(self, kept: int = KEPT, kept_tokens: int = KEPT_TOKENS) -> None:
        self._kept, self._kept_tokens = kept, kept_tokens
        self._by_ttft: _Heap = []
        self._by_tokens: _Heap = []
        self._count = 0

    def add(self, record: Record) -> None:
        """Look at one more; those that failed have their own place in a report."""
        self._count += 1
        if record.error or record.ttft_s is None:
            return
        _keep(self._by_ttft, self._kept, (record.ttft_s, -self._count, record))
        if record.tpot_s is not None:
            _keep(self._by_tokens, self._kept_tokens, (record.tpot_s, -self._count, record))

    def rows(self) -> list[dict[str, Any]]:
        """Those with the latest first token, the worst first, each with why."""
        return [
            {**_named(record), "ttft_s": ttft_s, **_parts(record), "why": why_slow(record)}
            for ttft_s, _, record in sorted(self._by_ttft, reverse=True)
        ]

    def token_rows(self) -> list[dict[str, Any]]:
        """Those with the slowest later tokens, the worst first, each with what is known."""
        return [
            {
                **_named(record),
                "tpot_s": tpot_s,
                "longest_gap_s": max(record.gaps_s, default=None),
                "why": why_slow_tokens(record),
            }
            for tpot_s, _, record in sorted(self._by_tokens, reverse=True)
        ]


def _keep(heap: _Heap, kept: int, item: tuple[float, int, Record]) -> None:
    if len(heap) < kept:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def _named(record: Record) -> dict[str, Any]:
    return {
        "session": record.session,
        "turn": record.turn,
        "tenant": record.tenant,
        "request_id": record.request_id,
        "scheduled_s": record.scheduled_s,
        "node": record.node,
        "paced": record.paced,
        "reason": record.reason,
        "ratio": record.ratio,
        "kappa_crit": record.crit,
        "input_tokens": record.input_tokens,
        "generated_tokens": record.generated_tokens,
    }


def _parts(record: Record) -> dict[str, Any]:
    """Predicted and actual, split alike."""
    found = split(record)
    predicted = record.predicted or {}
    names = ("queue_s", "load_s", "compute_s")
    return {
        "predicted": {
            "ttft_s": record.predicted_ttft_s,
            **{name: predicted.get(name) for name in names},
        },
        "actual": found.to_dict() if found else None,
        "expected_cached_tokens": record.cached_tokens,
        "actual_tokens": {
            name: (record.actual or {}).get(name)
            for name in ("device_tokens", "cached_tokens", "new_tokens")
        },
    }
