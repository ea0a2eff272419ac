"""Adds up the measurements of an engine's processes, and the requests that came to a replica and
left it. Totals only rise within one life of a replica; each report has lists of its own. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from kappa.cost import StepWork
from kappa.protocol import Admission, Samples, Spent, TenantCharge, WorkerReport
from kappa_workers.in_flight import InFlight

_BANDWIDTH_WEIGHT = 0.2
_REPORT_ALL_EVERY_S = 10.0
# Of an `iterations` message: taken over as they are.
_SCHEDULER_COUNTS = ("iterations", "queued_iterations", "rule_errors", "preemptions")
_SCHEDULER_STATES = ("waiting", "loading", "running")

Message = Mapping[str, Any]


class ReportTotals:
    """Adds the engine processes' measurements up into `WorkerReport`s; `engine_messages`: how many
    messages came from them."""

    def __init__(self, worker: str, in_flight: InFlight) -> None:
        self.engine_messages = 0
        self._worker, self._in_flight = worker, in_flight
        self._totals: dict[str, Any] = defaultdict(int)
        # Fields of the report that are replaced as a whole.
        self._latest: dict[str, Any] = {}
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._spent: list[Spent] = []
        self._samples = Samples()
        self._tier_failures: Counter[str] = Counter()
        self._charges: dict[str, TenantCharge] = {}
        self._charged: dict[str, TenantCharge] = {}
        self._reported_all_s = 0.0

    @property
    def first_tokens(self) -> bool:
        """Whether first tokens wait to be told."""
        return bool(self._prefilled)

    @property
    def urgent(self) -> bool:
        """Whether something waits that changes a prediction now."""
        return bool(self._admitted or self._prefilled or self._in_flight.urgent)

    def report_all(self) -> None:
        """Have the next report hold all that there is, for a reader that knows nothing yet."""
        self._reported_all_s = float("-inf")

    def lost(self, events: int) -> None:
        """The engine's event stream had a gap."""
        self._totals["event_gaps_total"] += events

    def take(self, now_s: float) -> WorkerReport:
        """The report since the last one. It has the charges that changed; every ten seconds all of
        them, for a decider that missed some."""
        self._charged.update(self._charges)
        everything = now_s - self._reported_all_s >= _REPORT_ALL_EVERY_S
        if everything:
            self._charges, self._reported_all_s = self._charged, now_s
        steps, loads = self._samples.take()
        report = WorkerReport(
            worker=self._worker,
            time_s=now_s,
            **self._totals,
            **self._latest,
            tier_failures_total=dict(self._tier_failures),
            admitted=tuple(self._admitted),
            prefilled=tuple(self._prefilled),
            spent=tuple(self._spent),
            steps=steps,
            loads=loads,
            charges=tuple(self._charges.values()),
            **self._in_flight.news(everything=everything)._asdict(),
        )
        self._admitted, self._prefilled, self._spent, self._charges = [], [], [], {}
        return report

    def add(self, m: Message) -> None:
        """Add one measurement from the stats channel; an unknown kind is ignored.

        Raises:
            ValueError, KeyError: a field is not a number, or is missing.
        """
        self.engine_messages += 1
        match m.get("kind"):
            case "step":
                self._add_step(m)
            case "iterations":
                self._add_iterations(m)
            case "admit":
                found = {"disk_tokens": 0, **m}
                names = ("device", "host", "new", "disk")
                counts = (int(_number(found[f"{name}_tokens"])) for name in names)
                self._admitted.append(Admission(str(m["request_id"]), *counts))
            case "load" | "store" as kind:
                took_s, moved = self._count(m, kind)
                disk_tokens = _number(m.get("disk_tokens", 0))
                if kind == "load":
                    self._samples.add_load(_number(m["tokens"]), took_s, disk_tokens)
                # A load that came from disk in part says little of the link.
                if kind == "load" and not disk_tokens:
                    self._average("h2d_bytes_per_s", moved, took_s)
            case "fetch":
                took_s, _ = self._count(m, "fetch")
                self._average("net_tokens_per_s", _number(m["tokens"]), took_s)
            case "room":
                self._latest["host_spare_blocks"] = int(_number(m["blocks"]))
            case "wait":  # A call held the engine up until stores gave back their blocks.
                self._totals["store_wait_seconds_total"] += _number(m["took_s"])
            case "store_dropped":
                self._totals["stores_dropped_total"] += 1
            case "tier_failed":  # A server or a peer did not do something, once.
                self._tier_failures[str(m["why"])] += 1
                self._totals["failed_loads_total"] += m["why"] == "load"
            case "faults":  # What went wrong in an engine of ours; cumulative.
                for name in ("failed_loads", "misused_blocks"):
                    self._totals[f"{name}_total"] = int(_number(m[name]))

    def _count(self, m: Message, kind: str) -> tuple[float, int]:
        took_s, moved, tokens = map(_number, (m["took_s"], m["bytes"], m["tokens"]))
        self._totals[f"{kind}_tokens_total"] += int(tokens)
        self._totals[f"{kind}_bytes_total"] += int(moved)
        self._totals[f"{kind}_seconds_total"] += took_s
        return took_s, int(moved)

    def _average(self, name: str, moved: float, took_s: float) -> None:
        known = self._latest.get(name, 0.0)
        speed = moved / took_s if took_s > 0 else known
        known = known or speed
        self._latest[name] = known + _BANDWIDTH_WEIGHT * (speed - known)

    def _add_step(self, m: Message) -> None:
        took_s, tokens, totals = _number(m["took_s"]), int(_number(m["tokens"])), self._totals
        totals["steps_total"] += 1
        totals["step_seconds_total"] += took_s
        totals["step_tokens_total"] += tokens
        totals["overruns_total"] += int(m["overrun"])
        if "work" in m:
            self._samples.add_step(StepWork(*map(_number, m["work"][:3])), took_s)
        for request_id in map(str, m["prefilled"]):
            self._prefilled.append(request_id)
            self._in_flight.prefilled(request_id)
        for request_id, load_s, compute_s in m.get("spent", ()):
            self._spent.append(Spent(str(request_id), _number(load_s), _number(compute_s)))

    def _add_iterations(self, m: Message) -> None:
        """The scheduler's own totals (`kappa_workers.iteration_log`); cumulative."""
        for tenant, charge in m["charges"].items():
            self._charges[str(tenant)] = TenantCharge(str(tenant), *map(_number, charge))
        self._latest["passed_total"] = {str(why): int(n) for why, n in m["passed"].items()}
        for name in ("budget_fill", "vram_fill"):
            self._latest[f"{name}_sum"] = _number(m[name])
        for name in _SCHEDULER_COUNTS:
            self._latest[f"{name}_total"] = int(_number(m[name]))
        for name in _SCHEDULER_STATES:
            self._latest[name] = int(_number(m[name]))


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return value
    raise ValueError(f"a measurement of {value!r} is not a number")
