import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kappa_benchmarks.routing import grid, report
from kappa_deploy.cli import app

DIRECTORY = tempfile.TemporaryDirectory()
SETTINGS = grid.Settings(requests=60)


def tiny_trace():
    """A trace of forty requests."""
    path = Path(DIRECTORY.name) / "tiny.csv"
    rng = np.random.default_rng(0)
    lines = [
        f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,{n},{m}"
        for i, (n, m) in enumerate(rng.integers(2, 4000, (40, 2)).tolist())
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return str(path)


TRACE = tiny_trace()
CELL = grid.Cell("small", TRACE, 0.5)


def run(directory, policies, seeds=1, cells=(CELL,), settings=SETTINGS):
    progress = []
    made = grid.Grid(directory, settings, 1, lambda *at: progress.append(at))
    return made.run(cells, policies, seeds), progress


# -- the grid ---------------------------------------------------------------------------------


def test_a_grid_gives_a_row_for_every_run(tmp_path):
    rows, progress = run(tmp_path, ("ttft", "round_robin"), seeds=2)
    assert [(r["policy"], r["seed"]) for r in rows] == [
        ("ttft", 0), ("ttft", 1), ("round_robin", 0), ("round_robin", 1),
    ]  # fmt: skip
    assert all(r["requests"] == 48 and r["load"] == 0.5 and r["warm"] for r in rows)
    assert [at[:2] for at in progress] == [(1, 4), (2, 4), (3, 4), (4, 4)] and progress[-1][2] == 0


def test_a_stopped_grid_goes_on(tmp_path):
    first, _ = run(tmp_path, ("ttft",))
    again, progress = run(tmp_path, ("ttft", "round_robin"))
    assert again[0] == first[0]
    assert len(progress) == 1 and "round_robin" in progress[0][3]


def test_a_line_cut_short_is_run_again(tmp_path):
    run(tmp_path, ("ttft", "round_robin"))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    rows, progress = run(tmp_path, ("ttft", "round_robin"))
    assert len(progress) == 1 and len(rows) == 2
    assert len(path.read_text().splitlines()) == 2


def test_other_settings_are_other_runs(tmp_path):
    run(tmp_path, ("ttft",))
    _, progress = run(tmp_path, ("ttft",), settings=grid.Settings(requests=70))
    assert len(progress) == 1


def test_a_changed_trace_file_is_another_run(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one")
    run = grid.Run(grid.Cell("small", str(trace), 0.5), "ttft", 0)
    key = run.key(SETTINGS)
    trace.write_text("two")
    grid._content.cache_clear()
    assert key != run.key(SETTINGS)


def test_a_cells_name_says_what_goes_wrong_in_it():
    cell = grid.Cell("small", "azure", 0.5, warm=False)
    assert cell.name == "small_azure_0.5_cold"
    assert replace(cell, faults="failure").name == "small_azure_0.5_cold_failure"
    assert replace(cell, admission=True).name == "small_azure_0.5_cold_admission"


@pytest.mark.parametrize("faults", ["misprofile", "failure"])
def test_faulty_cells_run(tmp_path, faults):
    cell = grid.Cell("small", "azure", 0.5, True, faults)
    rows, _ = run(tmp_path, ("ttft",), cells=(CELL, cell))
    assert [row["faults"] for row in rows] == ["none", faults]
    assert rows[0]["ttft_s"] != rows[1]["ttft_s"]


# -- what it says -----------------------------------------------------------------------------


def row(policy, seed, p99, *, p50=1.0, load=0.8, goodput=5.0, faults="none", cluster="mixed"):
    return {
        "key": f"{policy}{seed}", "cluster": cluster, "trace": "t", "load": load, "warm": True,
        "faults": faults, "admission": False, "policy": policy, "seed": seed,
        "ttft_s": {"p50": p50, "p99": p99}, "slo": {"met": 0.9}, "goodput_rps": goodput,
        "rate_rps": 10 * load, "requests": 10, "rejected": 0,
    }  # fmt: skip


def cell_rows(ours, peer, **facts):
    return [row("priced", s, v, **facts) for s, v in enumerate(ours)] + [
        row("dynamo", s, v, **facts) for s, v in enumerate(peer)
    ]


@pytest.mark.parametrize(
    ("ours", "peer", "verdict"),
    [
        ([1.0, 1.1, 0.9], [2.0, 2.2, 1.8], "held"),
        ([2.0, 2.2, 1.8], [1.0, 1.1, 0.9], "lost"),
        ([1.0, 2.0, 0.5], [1.0, 1.0, 1.0], "open"),
        ([1.0], [2.0], "open"),
    ],
)
def test_a_cell_is_evaluated_by_its_whole_interval(ours, peer, verdict):
    facts = report.summary(cell_rows(ours, peer), "priced", grid.OURS)
    assert facts["counts"]["p99"] == {w: int(w == verdict) for w in ("held", "open", "lost")}


@pytest.mark.parametrize(
    "others",
    [
        [row("ttft", s, 0.1) for s in range(2)],  # a policy of ours
        [row("llm_d", 0, 0.1)],  # not of all seeds
        [row("llm_d", s, None, p50=None) for s in range(2)],  # it serves nothing
    ],
)
def test_best_peer_is_a_foreign_one_that_serves_at_all_seeds(others):
    rows = [*cell_rows([2.0, 2.0], [3.0, 3.0]), *others]
    verdicts = report.summary(rows, "priced", grid.OURS)["verdicts"]
    assert {v["peer"] for v in verdicts} == {"dynamo"}


def test_faults_are_compared_with_the_same_policy_without():
    rows = cell_rows([1.0, 2.0], [1.0, 1.0])
    rows += [row("priced", s, v, faults="misprofile") for s, v in enumerate([1.1, 2.2])]
    found = report.summary(rows, "priced", grid.OURS)["faults"]
    assert [(r["policy"], round(r["p99_ratio"], 6)) for r in found] == [("priced", 1.1)]


# -- the command ------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["bench", "routing", *map(str, words)])


def test_the_command_prints_rows_and_reports_them_later(tmp_path):
    words = (
        "--cluster", "small", "--trace", TRACE, "--load", 0.5, "--policies", "priced,round_robin",
        "--seeds", 1, "--requests", 60, "--warm", "--admission", "--misprofile", "--failures",
        "--jobs", 1, "--out", tmp_path,
    )  # fmt: skip
    done = command(*words, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [r["policy"] for r in rows] == ["priced", "round_robin"] * 4
    kinds = [(r["faults"], r["admission"]) for r in rows[::2]]
    assert kinds == [("none", False), ("misprofile", False), ("failure", False), ("none", True)]
    assert {"ttft_s", "goodput_rps", "slo", "nodes", "decision_us"} <= set(rows[0])

    later = command("--report", "--json", "--out", tmp_path)
    by_key = sorted(json.loads(later.stdout)["rows"], key=lambda r: r["key"])
    assert by_key == sorted(rows, key=lambda r: r["key"])
    shown = command("--report", "--out", tmp_path).stdout
    assert "small tiny.csv 0.5 warm: mean over seeds" in shown and "round_robin" in shown


def test_a_damaged_row_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"key": "run|a"}\nnonsense\n')
    done = command("--report", "--out", tmp_path)
    assert done.exit_code == 2 and "rows.jsonl:2" in done.output
