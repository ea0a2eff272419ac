"""The measurement of the load-test client, small: the stub answers, and all is accounted for."""

import asyncio
import os
from pathlib import Path

import typer
from typer.testing import CliRunner

from benchmarks.serving.arrival_error import main, measure, report, single_requests, stub
from loadtest.feeder import bounded


def test_a_small_measurement_adds_up(tmp_path: Path) -> None:
    with stub(tokens=3, ttft_s=0.001, gap_s=0.001, cores=os.sched_getaffinity(0)) as url:
        sessions = single_requests("sharegpt", rate=500.0, seconds=10.0, seed=1)
        run = asyncio.run(measure(url, bounded(sessions, None, 100), tmp_path / "run"))
    assert (run["requests"], run["errors"], run["held_back"]) == (100, {}, 0)
    error, received = run["arrival_error_s"], run["received_after_due_s"]
    assert 0 <= error["p50"] <= error["p99"] <= error["max"]
    # The stub's own clock: a request cannot be there before its bytes went out.
    assert received["p50"] >= error["p50"]
    assert run["ttft_s"]["p50"] >= 0.001
    told = report([run, run], {"rate": 500.0})
    assert told["median"]["arrival_error_s"]["p99"] == error["p99"]
    assert told["goal"]["met_by"] in (0, 2)


def test_single_requests_end_and_are_one_turn_each() -> None:
    sessions = list(single_requests("sharegpt", rate=50.0, seconds=2.0, seed=1))
    assert 60 < len(sessions) < 140
    assert {len(session.requests) for session in sessions} == {1}
    assert max(session.arrival_s for session in sessions) < 2.0


def test_a_measurement_of_nothing_is_refused() -> None:
    app = typer.Typer()
    app.command()(main)
    cores = os.sched_getaffinity(0)
    try:
        done = CliRunner().invoke(app, ["--rate", "1", "--seconds", "1e-9", "--repeats", "1"])
    finally:
        os.sched_setaffinity(0, cores)
    assert done.exit_code == 2
    assert "nothing came" in done.stderr
