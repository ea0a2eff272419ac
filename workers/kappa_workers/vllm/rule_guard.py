"""Guards an engine from the errors of its scheduling rule. An error is counted, reported once per
kind, and the rule is not asked again in that iteration: the engine runs in its own order. Before
the next iteration a new rule is made and given all requests that wait; it learns nothing of those
admitted before. After three errors without a working plan in between the engine keeps its own order
until it is restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kappa.protocol import Charge
from kappa_scheduler.work import Plan, Room, Rule, Work

_MOST_IN_A_ROW = 3
# A rule that admits nothing for so long, with all blocks free, has failed.
_STALL_S = 2.0


class GuardedRule:
    """Keeps a rule, the requests that wait and run as the rule knows them, and counts its errors.
    make: makes a new rule; None: the engine keeps its own order. report: called with (event, error)
    of the first error of each kind."""

    def __init__(
        self, make: Callable[[], Rule | None], report: Callable[[str, Exception], None]
    ) -> None:
        self.errors_total, self._in_a_row = 0, 0
        self.given_up = False
        self._make, self._report = make, report
        self._reported: set[tuple[str, type]] = set()
        self._rule: Rule | None = None
        self._idle_since_s: float | None = None
        self._charged: dict[str, Charge] = {}
        self._charged_before: dict[str, Charge] = {}
        self._waiting: dict[Work, None] = {}
        self._admitted: set[Work] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def works(self) -> bool:
        """Whether there is a rule that has not failed."""
        return self._rule is not None

    def restart(self, waiting: Iterable[Work], now_s: float) -> bool:
        """Make a new rule and add all that wait, in order; returns whether that worked."""
        self._forget()
        if self.given_up:
            return False
        try:
            self._rule = self._make()
        except Exception as error:
            self.failed("make", error)
            return False
        self.given_up = self._rule is None
        for work in waiting:
            self.add(work, now_s)
        return self.works

    def failed(self, event: str, error: Exception) -> None:
        """Count an error of the rule, or one that it caused."""
        self.errors_total += 1
        self._in_a_row += 1
        self.given_up = self._in_a_row >= _MOST_IN_A_ROW
        self._forget()
        kind = (event, type(error))
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(event, error)

    def agrees(self, waiting: int) -> bool:
        """Whether the rule knows of as many that wait; anything else is an error."""
        known = len(self._waiting)
        if known != waiting:
            self.failed("agrees", RuntimeError(f"{waiting} wait, and the rule knows of {known}"))
        return self.works

    # -- what the rule learns and answers -----------------------------------------------------

    def add(self, work: Work, now_s: float) -> None:
        if work not in self._waiting:
            self._waiting[work] = None
            self._call("add", work, now_s)

    def plan(self, room: Room, now_s: float) -> Plan | None:
        """The plan for the coming iteration; None if the rule failed."""
        memory = room.memory
        idle = not room.running and memory.available() >= memory.capacity_blocks
        plan: Plan | None = self._call("plan", room, now_s)
        if plan is None:
            return None
        admitted = [work for work, _ in plan.admitted]
        strangers = [work for work in admitted if work not in self._waiting]
        if strangers or len(set(admitted)) < len(admitted):
            self.failed("plan", ValueError(f"{len(strangers)} admitted that do not wait, or twice"))
            return None
        if admitted or not idle:
            self._idle_since_s, self._in_a_row = None, 0
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > _STALL_S:
            stalled = RuntimeError(f"admitted nothing to an idle engine for {_STALL_S} s")
            self.failed("plan", stalled)
            return None
        for work in admitted:
            del self._waiting[work]
        self._admitted.update(admitted)
        return plan

    def returned(self, work: Work, now_s: float, event: str = "returned") -> None:
        if work not in self._admitted:
            return self.add(work, now_s)
        self._admitted.discard(work)
        self._waiting[work] = None
        self._call(event, work, now_s)

    def preempted(self, work: Work, now_s: float) -> None:
        self.returned(work, now_s, "preempted")

    def landed(self, work: Work, now_s: float) -> None:
        """Its load is there, or there was nothing to load."""
        if work in self._admitted:
            self._call("landed", work, now_s)

    def ended(self, work: Work, output_tokens: int, now_s: float) -> None:
        if work in self._waiting:
            del self._waiting[work]
            self._call("aborted", work, now_s)
        elif work in self._admitted:
            self._admitted.discard(work)
            self._call("finished", work, output_tokens, now_s)

    def ran(self, seconds: float, tokens: Mapping[str, int], now_s: float) -> None:
        self._call("ran", seconds, tokens, now_s)

    def charged_elsewhere(
        self, charges: Mapping[str, Charge], weights: Mapping[str, float], now_s: float
    ) -> None:
        """Tell the rule the charges of other workers, if it counts them."""
        if hasattr(self._rule, "charged_elsewhere"):
            self._call("charged_elsewhere", charges, weights, now_s)

    def charges(self) -> Mapping[str, Charge]:
        """The charges of this engine by tenant, of all its rules; empty if they do not count."""
        charges = self._call("charges") if hasattr(self._rule, "charges") else None
        for tenant, charge in (charges or {}).items():
            before = self._charged_before.get(tenant, Charge())
            self._charged[tenant] = Charge(*map(sum, zip(charge, before, strict=True)))
        return self._charged

    def victim(self, running: Sequence[Work]) -> Work | None:
        """The request that gives up its blocks; None leaves it to the engine."""
        known = [work for work in running if work in self._admitted]
        return self._call("victim", known) if known else None

    def _call(self, event: str, *arguments: Any) -> Any:
        if self._rule is None:
            return None
        try:
            return getattr(self._rule, event)(*arguments)
        except Exception as error:
            self.failed(event, error)
            return None

    def _forget(self) -> None:
        self._rule = None
        self._charged_before = dict(self._charged)
        self._waiting.clear()
        self._admitted.clear()
