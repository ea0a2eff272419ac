"""Adds up what an engine's processes measured, and what came to a replica and left it.

`workers.report_stream` feeds it the messages of the stats channel and takes a report now and
then. Totals only rise within one life of a replica; lists start anew with each report. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kappa.cost import StepParts
from kappa.protocol import (
    COMPUTE_STEP_TOKENS,
    Admission,
    Arrival,
    Spent,
    TenantCharge,
    WorkerReport,
)

_BANDWIDTH_WEIGHT = 0.2
_REPORT_ALL_EVERY_S = 10.0
# Sent by the replica itself; every other message is a sign of life of its engine.
_OWN_KINDS = ("arrive", "finish")

Message = Mapping[str, Any]
R = TypeVar("R", Admission, Arrival)


class ReportTotals:
    """Adds the engine processes' measurements up into `WorkerReport`s."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        # Fields of the report that are numbers, or replaced as a whole.
        self._fields: dict[str, Any] = {}
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._spent: list[Spent] = []
        self._charges: dict[str, TenantCharge] = {}
        self._charged: dict[str, TenantCharge] = {}
        self._reported_all_s = 0.0
        self._in_flight: dict[str, Arrival] = {}
        self._arrived: list[str] = []
        self._finished: list[str] = []
        self.on_prefilled: Callable[[str], None] = lambda _: None
        """Called, on the stream's thread, with the id of each request whose prompt is computed."""
        self.present: Callable[[], Mapping[str, Arrival]] | None = None
        """What is in the replica, read on the stream's thread: messages about that may be lost."""
        self.engine_messages = 0
        """How many messages came from the engine's processes."""

    @property
    def urgent(self) -> bool:
        """Whether something waits that changes a prediction now."""
        return bool(self._admitted or self._prefilled or self._arrived or self._finished)

    def report_all(self) -> None:
        """Have the next report hold all that there is, for a reader that knows nothing yet."""
        self._reported_all_s = float("-inf")

    def add(self, message: Message) -> None:
        """Add one measurement from the stats channel; an unknown kind is ignored.

        Raises:
            ValueError: a field that is not a number.
            KeyError: a field is missing.
        """
        kind = message.get("kind")
        self.engine_messages += kind not in _OWN_KINDS
        handler = getattr(self, f"_add_{kind}", None)
        if handler is not None:
            handler(message)

    def lost(self, events: int) -> None:
        """The engine's event stream had a gap."""
        self._count(event_gaps_total=events)

    def take(self, now_s: float) -> WorkerReport:
        """The report so far; its per-report lists start anew.

        Charges are those that changed; now and then all, for an ingress that missed some.
        """
        self._charged.update(self._charges)
        in_flight: tuple[Arrival, ...] | None = None
        if now_s - self._reported_all_s >= _REPORT_ALL_EVERY_S:
            self._charges, self._reported_all_s = self._charged, now_s
            self._correct_in_flight()
            in_flight = tuple(self._in_flight.values())
        report = WorkerReport(
            worker=self._worker,
            time_s=now_s,
            **self._fields,
            admitted=tuple(self._admitted),
            prefilled=tuple(self._prefilled),
            spent=tuple(self._spent),
            charges=tuple(self._charges.values()),
            arrived=tuple(self._in_flight[r] for r in self._arrived if r in self._in_flight),
            finished=tuple(self._finished),
            in_flight=in_flight,
        )
        self._arrived, self._finished = [], []
        self._admitted, self._prefilled, self._spent, self._charges = [], [], [], {}
        return report

    def _correct_in_flight(self) -> None:
        """Make up for messages that were lost, by what is in the replica now."""
        if self.present is None:
            return
        present = self.present()
        # Those that just ended: their message, if it still comes, finds them gone.
        self._finished.extend(name for name in self._in_flight if name not in present)
        self._in_flight = {n: self._in_flight.get(n, here) for n, here in present.items()}

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._fields[name] = self._fields.get(name, 0) + amount

    # -- messages, by kind --------------------------------------------------------------------

    def _add_step(self, m: Message) -> None:
        took_s, tokens = _number(m["took_s"]), int(_number(m["tokens"]))
        self._count(
            steps_total=1,
            step_seconds_total=took_s,
            step_tokens_total=tokens,
            overruns_total=int(m["overrun"]),
        )
        # What the announced step model says of the same step, if the engine has one.
        announced = m.get("announced")
        if announced and tokens >= COMPUTE_STEP_TOKENS:
            parts = StepParts(*map(_number, announced))
            computed_s = parts.computed_s(took_s)
            if computed_s:
                self._count(
                    computed_seconds_total=computed_s,
                    computed_announced_seconds_total=parts.compute_s,
                )
        for request_id in map(str, m["prefilled"]):
            self._prefilled.append(request_id)
            known = self._in_flight.get(request_id)
            if known is not None:
                self._in_flight[request_id] = replace(known, prefilled=True)
            self.on_prefilled(request_id)
        for request_id, load_s, compute_s in m.get("spent", ()):
            self._spent.append(Spent(str(request_id), _number(load_s), _number(compute_s)))

    def _add_admit(self, m: Message) -> None:
        self._admitted.append(_record(m, Admission))

    def _add_arrive(self, m: Message) -> None:
        arrival = _record(m, Arrival)
        self._in_flight[arrival.request_id] = arrival
        self._arrived.append(arrival.request_id)

    def _add_finish(self, m: Message) -> None:
        if self._in_flight.pop(str(m["request_id"]), None) is not None:
            self._finished.append(str(m["request_id"]))

    def _add_load(self, m: Message) -> None:
        took_s, moved = _number(m["took_s"]), int(_number(m["bytes"]))
        known = self._fields.get("h2d_bytes_per_s", 0.0)
        speed = moved / took_s if took_s > 0 else known
        known = known or speed
        self._fields["h2d_bytes_per_s"] = known + _BANDWIDTH_WEIGHT * (speed - known)
        self._count(
            load_tokens_total=int(_number(m["tokens"])),
            load_bytes_total=moved,
            load_seconds_total=took_s,
        )

    def _add_store(self, m: Message) -> None:
        self._count(
            store_tokens_total=int(_number(m["tokens"])),
            store_bytes_total=int(_number(m["bytes"])),
            store_seconds_total=_number(m["took_s"]),
        )

    def _add_store_dropped(self, _: Message) -> None:
        self._count(stores_dropped_total=1)

    def _add_tier_failed(self, m: Message) -> None:
        """An LMCache server did not do what it was asked for, once."""
        why = str(m["why"])
        failures = dict(self._fields.get("tier_failures_total", {}))
        self._fields["tier_failures_total"] = {**failures, why: failures.get(why, 0) + 1}
        self._count(failed_loads_total=int(why == "load"))

    def _add_faults(self, m: Message) -> None:
        """What went wrong in an engine of ours; cumulative."""
        self._fields["failed_loads_total"] = int(_number(m["failed_loads"]))
        self._fields["misused_blocks_total"] = int(_number(m["misused_blocks"]))

    def _add_iterations(self, m: Message) -> None:
        """The scheduler's own totals (`workers.iteration_log`); cumulative."""
        self._charges.update(
            {str(t): TenantCharge(str(t), *map(_number, c)) for t, c in m["charges"].items()}
        )
        self._fields["passed_total"] = {str(why): int(n) for why, n in m["passed"].items()}
        self._fields["budget_fill_sum"] = _number(m["budget_fill"])
        self._fields["vram_fill_sum"] = _number(m["vram_fill"])
        for name in ("iterations", "queued_iterations", "rule_errors", "preemptions"):
            self._fields[f"{name}_total"] = int(_number(m[name]))
        for name in ("waiting", "loading", "running"):
            self._fields[name] = int(_number(m[name]))

    def _add_wait(self, m: Message) -> None:
        """A call held the engine up for stores whose blocks it wanted back."""
        self._count(store_wait_seconds_total=_number(m["took_s"]))


def _record(m: Message, kind: type[R]) -> R:
    fields = kind.__struct_fields__
    return msgspec.convert({name: m[name] for name in fields if name in m}, kind)


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return value
    raise ValueError(f"a measurement of {value!r} is not a number")
