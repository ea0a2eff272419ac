"""`kappa faults` publishes its report as every bench does."""

import json

import pytest
from typer.testing import CliRunner

from kappa_benchmarks.faults import command


def row(failed):
    return {
        "fault": "worker_killed", "kept": not failed, "failed": failed, "requests": 8, "lost": 0,
        "first_answer_s": float("inf"), "recovery_s": 2.0, "start_s": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("failed", [[], ["2 reservations leaked"]])
def test_faults_publish_command_load_and_verdicts(monkeypatch, tmp_path, failed):
    def trials(runs, chosen):
        runs.report["verdicts"] = [row(failed)]
        runs.report["kept"] = not failed

    monkeypatch.setattr(command.Runs, "trials", trials)
    done = CliRunner().invoke(command.app, ["--json", "--out", str(tmp_path)])
    assert done.exit_code == bool(failed), done.output
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "faults.json").read_text())
    assert report["kept"] is (not failed) and len(report["load_average"]) == 3
    # JSON has no infinity.
    assert report["verdicts"][0]["first_answer_s"] is None
    shown = CliRunner().invoke(command.app, []).stdout
    assert "load average" in shown and ("kept" if not failed else failed[0][:8]) in shown
