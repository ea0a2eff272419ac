"""What is reserved on a worker and taken away again, by numbers worked out by hand."""

import pytest

from kappa_router import reservations
from kappa_router.decision import ESTIMATE
from tests.router.test_ttft import BUSY, WINDOW_S, WORKER, records, values, workers


def test_reservation_changes_its_own_worker_alone():
    made = workers(BUSY, BUSY)
    rows = records(
        ESTIMATE, {}, {"load_s": 0.5, "work_s": 2.0, "new_tokens": 100.0, "device_tokens": 30.0,
                       "cached_tokens": 20.0},
    )  # fmt: skip
    reservations.reserve(made, 0, rows, 1, 13.0, WINDOW_S)
    assert made[1].tobytes() == workers(BUSY)[0].tobytes()
    changed = {
        "link_reserved_s": 3.5, "link_free_s": 14.5, "gpu_reserved_s": 5.0, "in_flight": 7.0,
        "waiting": 3.0, "queued_tokens": 400.0, "resident_tokens": 1350.0,
        "used_s": 13.0,
        # Half is left of 0.4, 6 and 2; one more request, 2 s of work, by the window.
        "gpu_use": 0.2 + 2.0 / WINDOW_S, "loads_per_s": 3 + 1 / WINDOW_S,
        "prefills_per_s": 1 + 1 / WINDOW_S,
    }  # fmt: skip
    expected = {**WORKER, **BUSY, **changed}
    assert {name: made[0][name] for name in expected} == pytest.approx(expected)


def test_first_in_a_queue_starts_now_and_a_free_link_loads_now():
    made = workers({"link_free_s": 2.0})
    rows = records(ESTIMATE, {"work_s": 2.0, "load_s": 0.5})
    reservations.reserve(made, 0, rows, 0, 13.0, WINDOW_S)
    assert values(made[0], "gpu_since_s", "gpu_head_s", "link_free_s") == [13.0, 2.0, 13.5]


def test_reservation_without_a_load_counts_none():
    made = workers()
    reservations.reserve(made, 0, records(ESTIMATE, {"work_s": 2.0}), 0, 13.0, WINDOW_S)
    assert values(made[0], "loads_per_s") == [0.0]


def test_admission_is_priced_by_what_the_engine_found():
    # 100 new behind 50: pairs 100 x (50 + 50) = 10,000: 1 + 1 s; 40 in host: 0.04 s.
    made = workers(BUSY)
    found_s = reservations.correct(made, 0, (40, 100, 50, 0), (1.0, 1.5, 300), True)
    assert found_s == pytest.approx((0.04, 2.0))
    # In place of 1 s of link, 1.5 s of gpu and 300 tokens; it is the first in the queue.
    changed = "link_reserved_s", "link_free_s", "gpu_reserved_s", "queued_tokens", "gpu_head_s"
    assert values(made[0], *changed) == pytest.approx([2.04, 13.04, 3.5, 100.0, 2.0])
    reservations.correct(made, 0, (40, 100, 50, 0), (0.04, 2.0, 100), False)
    assert values(made[0], "gpu_head_s") == pytest.approx([2.0])
    # 30 of the 40 from disk, at 0.02 s each: 0.6 s more.
    made["disk_token_s"] = 0.02
    assert reservations.correct(made, 0, (40, 100, 50, 30), (0.04, 2.0, 100), False)[0] == 0.64


def test_last_prompt_that_is_done_leaves_exactly_nothing():
    made = workers({**BUSY, "waiting": 2.0})
    reservations.finish_prompt(made, 0, (1.0, 2.0, 100), 20.0)
    queue = "link_reserved_s", "gpu_reserved_s", "waiting", "queued_tokens", "link_free_s"
    assert values(made[0], *queue) == [2.0, 1.0, 1.0, 200.0, 14.0]
    reservations.finish_prompt(made, 0, (1.9, 0.9, 200), 21.0)
    assert values(made[0], *queue) == [0.0, 0.0, 0.0, 0.0, 21.0]
