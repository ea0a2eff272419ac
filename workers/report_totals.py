"""Adds up what an engine's processes measured, and what came to a replica and left it.

`workers.report_stream` feeds it the messages of the stats channel and takes a report now and
then. Totals only rise within one life of a replica; lists start anew with each report. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
_TELL_ALL_EVERY_S = 10.0
# Sent by the replica itself; every other message is a sign of life of its engine.
_OWN_KINDS = ("arrive", "finish")


class ReportTotals:
    """Adds the engine processes' measurements up into `WorkerReport`s."""

    def __init__(self, worker: str) -> None:
        self._report = WorkerReport(worker=worker, time_s=0.0)
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._spent: list[Spent] = []
        self._charges: dict[str, TenantCharge] = {}
        self._charged: dict[str, TenantCharge] = {}
        self._told_all_s = 0.0
        self._in_flight: dict[str, Arrival] = {}
        self._arrived: list[str] = []
        self._finished: list[str] = []
        self.on_prefilled: Callable[[str], None] = lambda _: None
        """Called, on the stream's thread, with the id of each request whose prompt is computed."""
        self.present: Callable[[], Mapping[str, Arrival]] | None = None
        """Says, on the stream's thread, what is in the replica: messages about that may be lost."""
        self.engine_messages = 0
        """How many messages came from the engine's processes."""

    @property
    def urgent(self) -> bool:
        """Whether something waits that changes a prediction now."""
        return bool(self._admitted or self._prefilled or self._arrived or self._finished)

    def tell_all(self) -> None:
        """Have the next report say all that can be said, for a reader that knows nothing yet."""
        self._told_all_s = float("-inf")

    def add(self, message: dict[str, object]) -> None:
        """Add one measurement from the stats channel; an unknown kind is ignored."""
        kind = message.get("kind")
        self.engine_messages += kind not in _OWN_KINDS
        handler = getattr(self, f"_add_{kind}", None)
        if handler is not None:
            handler(message)

    def lost(self, events: int) -> None:
        """Note that the engine's event stream had a gap."""
        self._report = replace(
            self._report, event_gaps_total=self._report.event_gaps_total + events
        )

    def take(self, now_s: float) -> WorkerReport:
        """The report so far; its per-report lists start anew.

        Charges are those that changed; now and then all, for an ingress that missed some.
        """
        self._charged.update(self._charges)
        in_flight: tuple[Arrival, ...] | None = None
        if now_s - self._told_all_s >= _TELL_ALL_EVERY_S:
            self._charges, self._told_all_s = self._charged, now_s
            self._correct_in_flight()
            in_flight = tuple(self._in_flight.values())
        report = replace(
            self._report,
            time_s=now_s,
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

    def _add_step(self, m: dict[str, object]) -> None:
        r = self._report
        self._report = replace(
            r,
            steps_total=r.steps_total + 1,
            step_seconds_total=r.step_seconds_total + _number(m["took_s"]),
            step_tokens_total=r.step_tokens_total + int(_number(m["tokens"])),
            overruns_total=r.overruns_total + bool(m["overrun"]),
        )
        self._add_computing(m)
        prefilled = m["prefilled"]
        assert isinstance(prefilled, list)
        self._prefilled.extend(str(request_id) for request_id in prefilled)
        for request_id in prefilled:
            known = self._in_flight.get(str(request_id))
            if known is not None:
                self._in_flight[known.request_id] = replace(known, prefilled=True)
            self.on_prefilled(str(request_id))
        spent = m.get("spent", [])
        assert isinstance(spent, list)
        self._spent.extend(
            Spent(str(request_id), _number(load_s), _number(compute_s))
            for request_id, load_s, compute_s in spent
        )

    def _add_computing(self, m: dict[str, object]) -> None:
        """A step's length beside what the announced model says of it, if the engine tells that."""
        announced = m.get("announced")
        if not announced or _number(m["tokens"]) < COMPUTE_STEP_TOKENS:
            return
        assert isinstance(announced, list | tuple)
        parts = StepParts(*map(_number, announced))
        computed_s = parts.computed_s(_number(m["took_s"]))
        if computed_s:
            r = self._report
            self._report = replace(
                r,
                computed_seconds_total=r.computed_seconds_total + computed_s,
                computed_announced_seconds_total=(
                    r.computed_announced_seconds_total + parts.compute_s
                ),
            )

    def _add_admit(self, m: dict[str, object]) -> None:
        self._admitted.append(
            Admission(
                request_id=str(m["request_id"]),
                device_tokens=int(_number(m["device_tokens"])),
                host_tokens=int(_number(m["host_tokens"])),
                new_tokens=int(_number(m["new_tokens"])),
            )
        )

    def _add_arrive(self, m: dict[str, object]) -> None:
        """A request came to the replica, with what its ingress expects of it."""
        arrival = Arrival(
            request_id=str(m["request_id"]),
            device_tokens=int(_number(m["device_tokens"])),
            host_tokens=int(_number(m["host_tokens"])),
            new_tokens=int(_number(m["new_tokens"])),
            max_tokens=int(_number(m["max_tokens"])),
        )
        self._in_flight[arrival.request_id] = arrival
        self._arrived.append(arrival.request_id)

    def _add_finish(self, m: dict[str, object]) -> None:
        """A request left the replica, however it ended."""
        if self._in_flight.pop(str(m["request_id"]), None) is not None:
            self._finished.append(str(m["request_id"]))

    def _add_load(self, m: dict[str, object]) -> None:
        r, took_s, moved = self._report, _number(m["took_s"]), int(_number(m["bytes"]))
        speed = moved / took_s if took_s > 0 else r.h2d_bytes_per_s
        old = r.h2d_bytes_per_s or speed
        self._report = replace(
            r,
            load_tokens_total=r.load_tokens_total + int(_number(m["tokens"])),
            load_bytes_total=r.load_bytes_total + moved,
            load_seconds_total=r.load_seconds_total + took_s,
            h2d_bytes_per_s=old + _BANDWIDTH_WEIGHT * (speed - old),
        )

    def _add_store(self, m: dict[str, object]) -> None:
        r = self._report
        self._report = replace(
            r,
            store_tokens_total=r.store_tokens_total + int(_number(m["tokens"])),
            store_bytes_total=r.store_bytes_total + int(_number(m["bytes"])),
            store_seconds_total=r.store_seconds_total + _number(m["took_s"]),
        )

    def _add_store_dropped(self, m: dict[str, object]) -> None:
        r = self._report
        self._report = replace(r, stores_dropped_total=r.stores_dropped_total + 1)

    def _add_tier_failed(self, m: dict[str, object]) -> None:
        """An LMCache server did not do what it was asked for, once."""
        failures = dict(self._report.tier_failures_total)
        why = str(m["why"])
        failures[why] = failures.get(why, 0) + 1
        lost = self._report.failed_loads_total + (why == "load")
        self._report = replace(self._report, tier_failures_total=failures, failed_loads_total=lost)

    def _add_faults(self, m: dict[str, object]) -> None:
        """What went wrong in an engine of ours; its messages are cumulative."""
        self._report = replace(
            self._report,
            failed_loads_total=int(_number(m["failed_loads"])),
            misused_blocks_total=int(_number(m["misused_blocks"])),
        )

    def _add_iterations(self, m: dict[str, object]) -> None:
        """The scheduler's own totals; its messages are cumulative."""
        passed, charges = m["passed"], m["charges"]
        assert isinstance(passed, dict) and isinstance(charges, dict)
        self._charges.update(
            {str(t): TenantCharge(str(t), *map(_number, c)) for t, c in charges.items()}
        )
        self._report = replace(
            self._report,
            iterations_total=int(_number(m["iterations"])),
            queued_iterations_total=int(_number(m["queued_iterations"])),
            budget_fill_sum=_number(m["budget_fill"]),
            vram_fill_sum=_number(m["vram_fill"]),
            passed_total={str(why): int(count) for why, count in passed.items()},
            rule_errors_total=int(_number(m["rule_errors"])),
            preemptions_total=int(_number(m["preemptions"])),
            waiting=int(_number(m["waiting"])),
            loading=int(_number(m["loading"])),
            running=int(_number(m["running"])),
        )

    def _add_wait(self, m: dict[str, object]) -> None:
        r = self._report
        waited_s = r.store_wait_seconds_total + _number(m["took_s"])
        self._report = replace(r, store_wait_seconds_total=waited_s)


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return value
    raise ValueError(f"a measurement of {value!r} is not a number")
