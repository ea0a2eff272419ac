"""Totals, messages and lines of an engine's iterations."""

import json

import pytest

from kappa.protocol import Charge
from kappa_workers import iteration_log
from kappa_workers.iteration_log import Iteration, IterationLog


def play(log, *iterations, end_s=1.0):
    for iteration in iterations:
        log.scheduled(iteration)
    return [log.ended(end_s) for _ in iterations]


def sent():
    messages = []
    return messages, messages.append


def test_fills_are_summed_over_iterations_with_a_queue():
    messages, send = sent()
    log = IterationLog(send)
    busy = {"tokens": 50, "budget_tokens": 100, "blocks": 30, "capacity_blocks": 40}
    play(
        log,
        Iteration(0.0, queued=True, passed={"vram": 2, "link": 1}, **busy),
        Iteration(0.0, queued=True, passed={"vram": 1}, preempted=2, **busy),
        Iteration(0.0, **busy),
    )
    log.publish(1.0, (3, 2, 1), 4, {})
    (message,) = messages
    assert message == {
        "kind": "iterations", "iterations": 3, "queued_iterations": 2, "budget_fill": 1.0,
        "vram_fill": 1.5, "passed": {"vram": 3, "link": 1}, "preemptions": 2, "rule_errors": 4,
        "charges": {}, "waiting": 3, "loading": 2, "running": 1,
    }  # fmt: skip


def test_overlapping_iterations_share_the_time():
    log = IterationLog(lambda _: None)
    log.scheduled(Iteration(1.0))
    log.scheduled(Iteration(1.5))
    assert log.ended(3.0).step_s == 2.0
    assert log.ended(4.0).step_s == 1.0
    assert log.ended(5.0) is None


def test_only_charges_that_changed_are_sent_again():
    messages, send = sent()
    log = IterationLog(send)
    log.publish(0.0, (0, 0, 0), 0, {"a": Charge(1.0, 0.0, 0.0), "b": Charge(2.0, 0.0, 0.0)})
    log.publish(0.0, (0, 0, 0), 0, {"a": Charge(1.0, 0.0, 0.0), "b": Charge(2.0, 1.0, 0.0)})
    assert [message["charges"] for message in messages] == [
        {"a": [1.0, 0.0, 0.0], "b": [2.0, 0.0, 0.0]}, {"b": [2.0, 1.0, 0.0]},
    ]  # fmt: skip


def test_totals_are_due_ten_times_a_second_and_when_idle():
    log = IterationLog(lambda _: None)
    log.publish(10.0, (0, 0, 0), 0, {})
    assert not log.due(10.05, idle=False)
    assert log.due(10.05, idle=True)
    assert log.due(10.2, idle=False)


def test_lines_are_json_one_per_iteration(tmp_path):
    path = tmp_path / "logs" / "iterations.jsonl"
    log = IterationLog(lambda _: None, str(path))
    play(log, Iteration(0.0, tokens=5, passed={"vram": 1}), Iteration(0.5, tokens=6))
    log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tokens"], row["passed"], row["step_s"]) for row in rows] == [
        (5, {"vram": 1}, 1.0), (6, {}, 0.0),
    ]  # fmt: skip


def test_log_warns_once_when_the_disk_takes_no_lines(monkeypatch):
    said = []
    monkeypatch.setattr(
        iteration_log.log, "warning", lambda event, reason: said.append((event, reason))
    )
    log = IterationLog(lambda _: None, "/dev/full")
    play(log, *(Iteration(float(i)) for i in range(3)))
    log.close()
    assert said == [("iteration_log_has_gaps", "[Errno 28] No space left on device")]


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"scheduler's log .*cannot be written.*another path"):
        IterationLog(lambda _: None, str(tmp_path))
