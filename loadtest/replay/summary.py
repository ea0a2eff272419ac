"""What a load test found: one pass over its records, in memory that does not grow with them.

The words are those of the simulator's output (`simulator/outcome.py`): `ttft_s`, `tpot_s`, `e2e_s`,
`goodput_rps`, `slo`, `jain`, `nodes`. Latencies count from when a request was due, so a client
that falls behind cannot hide it (coordinated omission); `ttft_sent_s` counts from sending. Nothing
is left out: a run has no warm-up that is not measured. Quantiles are within 0.5 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.replay.groups import Groups, judged_class
from loadtest.replay.quantiles import Quantiles, jain
from loadtest.replay.record import ERROR_KINDS, Record
from loadtest.replay.slo import BASES, Judged, Objective
from loadtest.replay.slowest import Slowest
from loadtest.replay.timeline import Point, Sample, Timeline, point

_BATCH = 1024
_EXAMPLES = 3


@dataclass(slots=True)
class _Error:
    count: int = 0
    examples: list[str] = field(default_factory=list)


def summarize(
    records: Iterable[Record],
    objective: Objective,
    *,
    dilation: float | None = None,
    is_closed: bool = False,
) -> dict[str, Any]:
    """The figures of a run, ready for JSON; None where there is nothing to measure.

    dilation: real seconds per emulated one, if the endpoint does not tell it. is_closed: whether
    sessions came when others had ended; rates are then over the whole run.
    """
    return gather(records, objective, dilation=dilation, is_closed=is_closed).to_dict()


def gather(
    records: Iterable[Record],
    objective: Objective,
    *,
    dilation: float | None = None,
    is_closed: bool = False,
) -> Summary:
    """As `summarize`, with what the pictures need besides."""
    summary = Summary(objective, is_closed)
    for batch in batches(records, _BATCH):
        summary.add(batch, objective.judge(batch, dilation))
    return summary


def batches(items: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Lists of at most `size`."""
    batch: list[Record] = []
    for item in items:
        batch.append(item)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def tpot_s(record: Record) -> float:
    """A record's own, as numbers are added up: NaN for one token or none."""
    return float("nan") if record.tpot_s is None else record.tpot_s


def was_sent(record: Record) -> bool:
    """Whether the client ever sent it: all but those whose prompt could not be made."""
    return record.error != "prompt"


class Summary:
    """The figures of a run while it is read."""

    def __init__(self, objective: Objective, is_closed: bool = False) -> None:
        self.objective, self._is_closed = objective, is_closed
        self.ttft, self.ttft_sent, self.e2e = Quantiles(), Quantiles(), Quantiles()
        self.itl, self.tpot, self.late = Quantiles(), Quantiles(), Quantiles()
        self.timeline = Timeline()
        self.points: Sample[Point] = Sample()
        self.failures: Sample[Point] = Sample(1000)
        self.slowest = Slowest()
        self._ttft_limit, self._tpot_limit = Quantiles(), Quantiles()
        self._error_share, self._bias = Quantiles(), Quantiles()
        self._router_error = Quantiles()
        self._errors: dict[str, _Error] = {}
        self._reasons: Counter[str] = Counter()
        self._basis: Counter[str] = Counter()
        self._groups = {name: Groups() for name in ("nodes", "tenants", "classes")}
        self._count: Counter[str] = Counter()
        self._first_due_s, self._last_due_s = np.inf, -np.inf
        self._first_sent_s, self._last_end_s = np.inf, -np.inf

    def add(self, batch: list[Record], judged: Judged) -> None:
        """Some requests more, with what each was allowed."""
        ttft = np.array([np.nan if r.error or r.ttft_s is None else r.ttft_s for r in batch])
        tpot = np.array([tpot_s(r) for r in batch])
        # Answered, but by what measure? What failed has missed any.
        unknown = np.array([basis == "none" for basis in judged.basis]) & ~np.isnan(ttft)
        met = judged.met(ttft, tpot) & ~unknown
        in_ttft = ~(np.isnan(ttft) | (ttft > judged.ttft_limit_s)) & ~unknown
        in_tpot = ~(np.isnan(ttft) | (tpot > judged.tpot_limit_s)) & ~unknown
        self._count["not_judged"] += int(unknown.sum())
        self._count["met"] += int(met.sum())
        self._count["ttft_met"] += int(in_ttft.sum())
        self._count["tpot_met"] += int(in_tpot.sum())
        self._ttft_limit.add_all(
            np.where(np.isinf(judged.ttft_limit_s), np.nan, judged.ttft_limit_s)
        )
        self._tpot_limit.add_all(
            np.where(np.isinf(judged.tpot_limit_s), np.nan, judged.tpot_limit_s)
        )
        self._basis.update(judged.basis)
        self.ttft.add_all(ttft)
        self.tpot.add_all(np.where(np.isnan(ttft), np.nan, tpot))
        speed = judged.idle_ttft_s / np.maximum(ttft, 1e-9)
        for i, record in enumerate(batch):
            self._one(record, None if unknown[i] else bool(met[i]), float(speed[i]))
        gaps = [gap for r in batch if not r.error for gap in r.gaps_s]
        self.itl.add_all(gaps)

    def _one(self, record: Record, met: bool | None, speed: float) -> None:
        self._count["requests"] += 1
        self._count["paced"] += record.paced
        self._count["retried"] += record.attempt > 0
        self._count["expected_cached"] += record.cached_tokens
        self._first_due_s = min(self._first_due_s, record.scheduled_s)
        self._last_due_s = max(self._last_due_s, record.scheduled_s)
        if record.reason:
            self._reasons[record.reason] += 1
        owners = {"nodes": record.node, "tenants": record.tenant, "classes": judged_class(record)}
        for name, owner in owners.items():
            self._groups[name].add(owner, record, tpot_s(record), met, speed)
        self._when(record, bool(met))
        self._tokens(record)
        self._predicted(record)
        if record.error:
            self._failed(record)
        else:
            self._completed(record)
        self.slowest.add(record)

    def _when(self, record: Record, met: bool) -> None:
        self.timeline.add("due", record.scheduled_s)
        if was_sent(record):
            self._count["sent"] += 1
            self._first_sent_s = min(self._first_sent_s, record.sent_s)
            self._last_end_s = max(self._last_end_s, record.ended_s)
            if not record.attempt:
                # Of others only the last attempt's time is known, which the endpoint put off.
                self.late.add(max(record.sent_s - record.scheduled_s, 0.0))
            self.timeline.add("sent", record.sent_s)
            self.timeline.add("ended", record.ended_s)
        else:
            # Never sent, so neither waiting nor in flight: gone when it was due.
            self.timeline.add("due", record.scheduled_s, -1.0)
        self.timeline.add("failed" if record.error else "completed", record.ended_s)
        if met:
            self.timeline.add("met", record.ended_s)

    def _tokens(self, record: Record) -> None:
        actual = record.actual or {}
        told = [actual.get(name) for name in ("device_tokens", "cached_tokens", "new_tokens")]
        if all(value is not None for value in told):
            self._count["told"] += 1
            self._count["told_expected_cached"] += record.cached_tokens
            for name, value in zip(("device", "cached", "new"), told, strict=True):
                self._count[f"{name}_tokens"] += int(value or 0)

    def _predicted(self, record: Record) -> None:
        predicted_s = record.predicted_ttft_s
        if predicted_s is None or record.error or record.first_token_s is None:
            return
        client_s = record.first_token_s - record.sent_s
        if client_s > 0:
            self._error_share.add(abs(predicted_s - client_s) / client_s)
            self._bias.add((predicted_s - client_s) / client_s)
        router_s = (record.actual or {}).get("ttft_s")
        if router_s:
            self._router_error.add(abs(predicted_s - router_s) / router_s)

    def _completed(self, record: Record) -> None:
        self._count["completed"] += 1
        self._count["prompt_tokens"] += record.prompt_tokens or record.input_tokens
        self._count["output_tokens"] += record.generated_tokens
        self.timeline.add("output_tokens", record.ended_s, record.generated_tokens)
        self.e2e.add(record.ended_s - record.scheduled_s)
        if record.ttft_s is not None and record.first_token_s is not None:
            self.ttft_sent.add(record.first_token_s - record.sent_s)
            self.points.add(point(record, record.ttft_s))

    def _failed(self, record: Record) -> None:
        kept = self._errors.setdefault(record.error, _Error())
        kept.count += 1
        is_new = record.error_detail and record.error_detail not in kept.examples
        if is_new and len(kept.examples) < _EXAMPLES:
            kept.examples.append(record.error_detail)
        self.failures.add(point(record, max(record.ended_s - record.scheduled_s, 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """The figures so far."""
        count = self._count
        window_s, duration_s = self._window_s(), self._duration_s()
        return {
            "requests": count["requests"],
            "sent": count["sent"],
            "completed": count["completed"],
            "failed": count["requests"] - count["completed"],
            "retried": count["retried"],
            "window_s": window_s,
            "duration_s": duration_s,
            "rate_rps": _per(count["requests"], window_s),
            "throughput_rps": _per(count["completed"], duration_s),
            "prompt_tokens": count["prompt_tokens"],
            "output_tokens": count["output_tokens"],
            "output_tokens_per_s": _per(count["output_tokens"], duration_s),
            "ttft_s": self.ttft.spread(),
            "ttft_sent_s": self.ttft_sent.spread(),
            "itl_s": self.itl.spread(),
            "tpot_s": self.tpot.spread(),
            "e2e_s": self.e2e.spread(),
            "late_s": self.late.spread(),
            "goodput_rps": self._goodput_rps(window_s),
            "slo": self._slo(),
            "errors": self._told_errors(),
            "cached_tokens": self._cached(),
            "prediction": self._prediction(),
            **self._fairness(),
            "reasons": dict(self._reasons.most_common()),
            "nodes": self._groups["nodes"].rows("(not told)"),
            "tenants": self._groups["tenants"].rows("(none)"),
            "classes": self._groups["classes"].rows("(not told)"),
            "slowest": self.slowest.rows(),
            "slowest_tokens": self.slowest.token_rows(),
            "paced_requests": count["paced"],
            "timeline": self.timeline.to_dict(),
        }

    def _window_s(self) -> float:
        """From the first request's due time to the last one's; the whole run if they are one, or
        if requests were due because others had ended: the last ones would be for nothing."""
        if self._is_closed:
            return self._duration_s()
        span_s = float(self._last_due_s - self._first_due_s)
        return span_s if span_s > 0 else self._duration_s()

    def _duration_s(self) -> float:
        span_s = float(self._last_end_s - self._first_sent_s)
        return span_s if span_s > 0 and np.isfinite(span_s) else 0.0

    def _judged(self) -> bool:
        """Whether there is an objective at all."""
        return sum(self._basis.values()) > self._basis["none"]

    def _goodput_rps(self, window_s: float) -> float | None:
        return _per(self._count["met"], window_s) if self._judged() else None

    def _slo(self) -> dict[str, Any]:
        total = max(self._count["requests"] - self._count["not_judged"], 1)
        objective = self.objective
        given = objective.ttft_s is not None or objective.tpot_s is not None
        bases = [name for name in BASES if self._basis[name] and name != "none"]
        basis = ", ".join(bases) or ("given" if given else "none")
        shares = {
            name: self._count[name] / total if self._judged() else None
            for name in ("met", "ttft_met", "tpot_met")
        }
        met = shares["met"]
        return {
            **shares,
            "ttft_limit_s_p50": self._ttft_limit.quantile(0.5),
            "tpot_limit_s_p50": self._tpot_limit.quantile(0.5),
            "basis": basis,
            "meaning": objective.told() if given else BASES[basis.split(", ")[0]],
            "not_judged": self._count["not_judged"],
            "asked": objective.is_asked,
            "share": objective.share,
            # What nobody asked for can be met in part, but neither passed nor missed.
            "passed": met >= objective.share if met is not None and objective.is_asked else None,
        }

    def _told_errors(self) -> dict[str, Any]:
        return {
            kind: {
                "count": error.count,
                "meaning": _meaning(kind, ERROR_KINDS),
                "examples": error.examples,
            }
            for kind, error in sorted(self._errors.items(), key=lambda pair: -pair[1].count)
        }

    def _cached(self) -> dict[str, Any]:
        """Expected with an unlimited cache, against what engines found, where they told it."""
        count = self._count
        found = count["device_tokens"] + count["cached_tokens"]
        return {
            "expected": count["expected_cached"],
            "told_requests": count["told"],
            "expected_where_told": count["told_expected_cached"],
            "actual": found if count["told"] else None,
            "device": count["device_tokens"] if count["told"] else None,
            "host": count["cached_tokens"] if count["told"] else None,
            "computed": count["new_tokens"] if count["told"] else None,
        }

    def _prediction(self) -> dict[str, Any]:
        """|predicted - actual| / actual of TTFT, the actual one as client and as router saw it."""
        return {
            "requests": self._error_share.count,
            "client_error": self._error_share.spread(),
            "client_bias_p50": self._bias.quantile(0.5),
            "router_requests": self._router_error.count,
            "router_error": self._router_error.spread(),
        }

    def _fairness(self) -> dict[str, Any]:
        """Jain's index over tenants: of how near to idle they ran, else of their token rates."""
        by_speed = jain(self._groups["tenants"].means("speed"))
        if by_speed is not None:
            return {"jain": by_speed, "jain_of": "idle TTFT over TTFT, mean by tenant"}
        by_rate = jain(self._groups["tenants"].means("tokens_per_s"))
        what = "output tokens per second of a request, mean by tenant"
        return {"jain": by_rate, "jain_of": None if by_rate is None else what}


def _meaning(kind: str, known: Mapping[str, str]) -> str:
    if kind in known:
        return known[kind]
    return known.get("http_NNN", "") if kind.startswith("http_") else ""


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
