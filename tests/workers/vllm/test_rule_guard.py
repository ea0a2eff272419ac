"""A rule that fails: the engine goes on, nothing is lost, everything is counted."""

from scheduler.work import Plan, Quote, Room, Work
from workers.vllm.rule_guard import GuardedRule

QUOTE = Quote(1, 0, 0)


class Rule:
    """First come, first served, one at a time; raises where it is told to."""

    name, max_skips, max_wait_s = "one", 0, 0.0

    def __init__(self, failing=()):
        self.failing = failing
        self.waiting = []
        self.events = []

    def __len__(self):
        return len(self.waiting)

    def _do(self, event, work=None):
        if event in self.failing:
            raise RuntimeError(event)
        self.events.append((event, work))

    def add(self, work, now_s):
        self._do("add", work)
        self.waiting.append(work)
        return True

    def plan(self, room, now_s):
        self._do("plan")
        return Plan(admitted=[(self.waiting.pop(0), QUOTE)] if self.waiting else [])

    def returned(self, work, now_s):
        self._do("returned", work)
        self.waiting.insert(0, work)

    preempted = returned

    def landed(self, work, now_s):
        self._do("landed", work)

    def finished(self, work, output_tokens, now_s):
        self._do("finished", work)

    def aborted(self, work, now_s):
        self._do("aborted", work)
        self.waiting.remove(work)

    def ran(self, seconds, tokens, now_s, iterations=1):
        self._do("ran")

    def victim(self, running):
        self._do("victim")
        return running[-1]


def guarded(*failing):
    """A guard, the rules it made, what it reported."""
    made, reports = [], []

    def make():
        made.append(Rule(failing))
        return made[-1]

    guard = GuardedRule(make, lambda event, error: reports.append((event, type(error))))
    guard.restart((), 0.0)
    return guard, made, reports


class Memory:
    """Ten blocks."""

    capacity_blocks = 10

    def __init__(self, free):
        self.free = free

    def available(self):
        return self.free


def room(running=1, free=10):
    return Room(Memory(free), 100, 4, running)


def test_a_sound_rule_hears_everything_once_and_in_its_own_words():
    guard, (rule,), reports = guarded()
    a, b, c = Work(1, 0.0), Work(1, 0.0), Work(1, 0.0)
    for work in (a, b, c):
        guard.add(work, 0.0)
    assert guard.agrees(3)
    assert guard.plan(room(), 0.0).admitted == [(a, QUOTE)]
    guard.landed(a, 1.0)
    guard.preempted(a, 2.0)
    guard.ended(b, 0, 3.0)
    assert guard.plan(room(), 4.0).admitted == [(a, QUOTE)]
    guard.ran(0.5, {"": 3}, 4.0)
    assert guard.victim([a]) is a
    guard.ended(a, 7, 5.0)
    assert [event for event, _ in rule.events] == [
        "add", "add", "add", "plan", "landed", "returned", "aborted", "plan", "ran", "victim",
        "finished",
    ]  # fmt: skip
    assert (guard.errors_total, reports, len(guard)) == (0, [], 1)


def test_after_an_error_a_new_rule_is_told_of_all_that_waits_and_nothing_else():
    guard, made, reports = guarded("landed")
    a, b = Work(1, 0.0), Work(1, 0.0)
    guard.add(a, 0.0)
    guard.add(b, 0.0)
    guard.plan(room(), 0.0)
    guard.landed(a, 1.0)
    assert not guard.works
    assert guard.plan(room(), 1.0) is None
    assert guard.restart([b], 1.0)
    guard.ended(a, 3, 2.0)
    guard.landed(a, 2.0)
    assert made[1].events == [("add", b)]
    assert (guard.errors_total, reports) == (1, [("landed", RuntimeError)])


def test_what_was_admitted_before_the_error_waits_like_new_when_it_is_preempted():
    guard, made, _ = guarded("landed")
    a = Work(1, 0.0)
    guard.add(a, 0.0)
    guard.plan(room(), 0.0)
    guard.landed(a, 1.0)
    guard.restart([], 1.0)
    assert guard.victim([a]) is None
    guard.preempted(a, 2.0)
    assert guard.plan(room(), 2.0).admitted == [(a, QUOTE)]
    assert made[1].events == [("add", a), ("plan", None)]


def test_three_errors_without_a_plan_between_them_and_the_rule_is_given_up():
    guard, made, reports = guarded("plan")
    work = Work(1, 0.0)
    guard.add(work, 0.0)
    for _ in range(5):
        assert guard.plan(room(), 0.0) is None
        guard.restart([work], 0.0)
    assert guard.given_up
    assert (len(made), guard.errors_total, reports) == (3, 3, [("plan", RuntimeError)])


def test_a_rule_that_fails_now_and_then_is_kept():
    guard, made, _ = guarded("finished")
    for _ in range(10):
        work = Work(1, 0.0)
        guard.add(work, 0.0)
        guard.plan(room(), 0.0)
        guard.ended(work, 1, 0.0)
        guard.restart([], 0.0)
    assert not guard.given_up
    assert (guard.errors_total, len(made)) == (10, 11)


def test_a_plan_that_admits_what_does_not_wait_is_an_error():
    guard, (rule,), reports = guarded()
    rule.waiting.append(Work(1, 0.0))  # nobody told it so
    assert guard.plan(room(), 0.0) is None
    assert reports == [("plan", ValueError)]


def test_a_rule_that_lost_count_is_an_error():
    guard, _, reports = guarded()
    guard.add(Work(1, 0.0), 0.0)
    assert not guard.agrees(2)
    assert reports == [("agrees", RuntimeError)]


def test_an_idle_engine_that_is_given_nothing_for_long_is_an_error():
    guard, (rule,), reports = guarded()
    rule.plan = lambda room, now_s: Plan()
    guard.add(Work(1, 0.0), 0.0)
    assert guard.plan(room(running=0), 0.0) is not None
    assert guard.plan(room(running=1), 50.0) is not None  # it was busy
    assert guard.plan(room(running=0, free=9), 100.0) is not None  # something holds a block
    assert guard.plan(room(running=0), 101.0) is not None
    assert guard.plan(room(running=0), 110.0) is None
    assert reports == [("plan", RuntimeError)]


def test_no_rule_is_no_error():
    guard = GuardedRule(lambda: None, lambda *_: None)
    assert not guard.restart((), 0.0)
    assert (guard.given_up, guard.errors_total, guard.charges()) == (True, 0, {})
