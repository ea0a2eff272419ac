"""A rule that fails: the engine goes on, nothing is lost, everything is counted."""

from types import SimpleNamespace

from kappa_scheduler.work import Plan, Quote, Room, Work
from kappa_workers.vllm.rule_guard import GuardedRule

QUOTE = Quote(1, 0, 0)


class Rule:
    """First come, first served, one at a time; notes its calls, and raises where it should."""

    def __init__(self, failing):
        self.failing, self.waiting, self.events = failing, [], []

    def _note(self, event, work=None):
        if event in self.failing:
            raise RuntimeError(event)
        self.events.append((event, work))

    def add(self, work, now_s):
        self._note("add", work)
        self.waiting.append(work)

    def plan(self, room, now_s):
        self._note("plan")
        return Plan(admitted=[(self.waiting.pop(0), QUOTE)] if self.waiting else [])

    def returned(self, work, now_s):
        self._note("returned", work)
        self.waiting.insert(0, work)

    def preempted(self, work, now_s):
        self._note("preempted", work)
        self.waiting.insert(0, work)

    def landed(self, work, now_s):
        self._note("landed", work)

    def finished(self, work, output_tokens, now_s):
        self._note(f"finished with {output_tokens}", work)

    def aborted(self, work, now_s):
        self._note("aborted", work)
        self.waiting.remove(work)

    def ran(self, seconds, tokens, now_s, iterations=1):
        self._note("ran")

    def victim(self, running):
        return running[-1]


def guarded(*failing, works=0):
    """A guard with waiting requests, those, the rules it made, what it reported."""
    made, reports = [], []

    def make():
        made.append(Rule(failing))
        return made[-1]

    guard = GuardedRule(make, lambda event, error: reports.append((event, type(error))))
    guard.restart((), 0.0)
    waiting = [Work(1, 0.0) for _ in range(works)]
    for work in waiting:
        guard.add(work, 0.0)
    return guard, waiting, made, reports


def room(running=1, free=10):
    return Room(SimpleNamespace(capacity_blocks=10, available=lambda: free), 100, 4, running)


def test_guard_tells_a_sound_rule_each_event_once():
    guard, (a, b, c), (rule,), reports = guarded(works=3)
    guard.add(a, 0.0)  # a second time is none
    assert guard.agrees(3)
    assert guard.plan(room(), 0.0).admitted == [(a, QUOTE)]
    guard.landed(a, 1.0)
    guard.preempted(a, 2.0)
    guard.ended(b, 0, 3.0)
    assert guard.plan(room(), 4.0).admitted == [(a, QUOTE)]
    guard.returned(a, 4.0)
    assert guard.plan(room(), 4.0).admitted == [(a, QUOTE)]
    guard.ran(0.5, {"": 3}, 4.0)
    assert guard.victim([a]) is a
    guard.ended(a, 7, 5.0)
    assert rule.events == [
        ("add", a), ("add", b), ("add", c), ("plan", None), ("landed", a), ("preempted", a),
        ("aborted", b), ("plan", None), ("returned", a), ("plan", None), ("ran", None),
        ("finished with 7", a),
    ]  # fmt: skip
    assert (guard.errors_total, reports, len(guard)) == (0, [], 1)


def test_guard_gives_a_new_rule_only_what_waits_after_an_error():
    guard, (a, b), made, reports = guarded("landed", works=2)
    guard.plan(room(), 0.0)
    guard.landed(a, 1.0)
    assert not guard.works
    assert guard.plan(room(), 1.0) is None
    assert guard.restart([b], 1.0)
    guard.ended(a, 3, 2.0)
    guard.landed(a, 2.0)
    assert made[1].events == [("add", b)]
    assert (guard.errors_total, reports) == (1, [("landed", RuntimeError)])


def test_guard_readds_a_preempted_request_from_before_the_error():
    guard, (a,), made, _ = guarded("landed", works=1)
    guard.plan(room(), 0.0)
    guard.landed(a, 1.0)
    guard.restart([], 1.0)
    assert guard.victim([a]) is None
    guard.preempted(a, 2.0)
    assert guard.plan(room(), 2.0).admitted == [(a, QUOTE)]
    assert made[1].events == [("add", a), ("plan", None)]


def test_guard_gives_the_rule_up_after_three_errors_in_a_row():
    guard, (work,), made, reports = guarded("plan", works=1)
    for _ in range(5):
        assert guard.plan(room(), 0.0) is None
        guard.restart([work], 0.0)
    assert guard.given_up
    assert (len(made), guard.errors_total, reports) == (3, 3, [("plan", RuntimeError)])


def test_a_rule_that_fails_now_and_then_is_kept():
    guard, _, made, _ = guarded("finished with 1")
    for _ in range(10):
        work = Work(1, 0.0)
        guard.add(work, 0.0)
        guard.plan(room(), 0.0)
        guard.ended(work, 1, 0.0)
        guard.restart([], 0.0)
    assert (guard.given_up, guard.errors_total, len(made)) == (False, 10, 11)


def test_guard_rejects_plans_that_admit_strangers_or_one_twice():
    guard, _, (rule,), reports = guarded()
    rule.waiting.append(Work(1, 0.0))  # it was never given that
    assert guard.plan(room(), 0.0) is None
    guard, (work,), (rule,), again = guarded(works=1)
    rule.plan = lambda room, now_s: Plan(admitted=[(work, QUOTE), (work, QUOTE)])
    assert guard.plan(room(), 0.0) is None
    assert reports == again == [("plan", ValueError)]


def test_a_rule_that_lost_count_is_an_error():
    guard, _, _, reports = guarded(works=1)
    assert not guard.agrees(2)
    assert reports == [("agrees", RuntimeError)]


def test_guard_fails_a_rule_that_leaves_an_idle_engine_unfed():
    guard, _, (rule,), reports = guarded(works=1)
    rule.plan = lambda room, now_s: Plan()
    assert guard.plan(room(running=0), 0.0) is not None
    assert guard.plan(room(running=1), 50.0) is not None  # it was busy
    assert guard.plan(room(running=0, free=9), 100.0) is not None  # something holds a block
    assert guard.plan(room(running=0), 101.0) is not None
    assert guard.plan(room(running=0), 103.0) is not None  # two seconds are not long
    assert guard.plan(room(running=0), 103.1) is None
    assert reports == [("plan", RuntimeError)]


def test_no_rule_is_no_error():
    guard = GuardedRule(lambda: None, lambda *_: None)
    assert not guard.restart((), 0.0)
    assert (guard.given_up, guard.errors_total, guard.charges()) == (True, 0, {})
