"""When an engine counts as standing still."""

from kappa.protocol import WorkerReport
from router.live.stalls import StallWatch, marks


def look(watch, now_s, marks=(1.0,), busy=True, patience_s=5.0):
    return watch.still_s("w", marks, busy=busy, now_s=now_s) > patience_s


def test_work_without_progress_is_a_stall_once_patience_is_over():
    watch = StallWatch()
    assert [look(watch, t) for t in (0.0, 4.0, 5.0, 5.1)] == [False, False, False, True]


def test_progress_and_idleness_start_the_wait_anew():
    watch = StallWatch()
    look(watch, 0.0)
    assert not look(watch, 6.0, marks=(2.0,))
    assert not look(watch, 10.0, marks=(2.0,))
    assert not look(watch, 20.0, marks=(2.0,), busy=False)
    assert not look(watch, 24.0, marks=(2.0,))
    assert look(watch, 25.5, marks=(2.0,))


def test_who_has_more_to_wait_for_waits_longer():
    watch = StallWatch()
    look(watch, 0.0)
    assert not look(watch, 30.0, patience_s=40.0)
    assert look(watch, 41.0, patience_s=40.0)


def test_each_worker_is_watched_for_itself_and_forgotten_when_it_leaves():
    watch = StallWatch()
    look(watch, 0.0)
    assert watch.still_s("v", (1.0,), busy=True, now_s=6.0) == 0.0
    watch.leave("w")
    assert not look(watch, 6.0)


def test_a_step_a_load_or_an_iteration_is_progress():
    still = marks(WorkerReport("w", 1.0))
    for what in ("steps_total", "iterations_total", "load_tokens_total", "step_tokens_total"):
        assert marks(WorkerReport("w", 2.0, **{what: 1})) != still
    assert marks(WorkerReport("w", 2.0, waiting=3)) == still
