"""`kappa replay` against a real cluster: what was decided reaches the report."""

import json
import subprocess
import sys

import pytest

from kappa_loadtest.run_folder import read_records

pytestmark = pytest.mark.live

_RUN = "import typer; from kappa_deploy.commands.replay import replay; typer.run(replay)"
_RUN_S = 240.0


def test_replay_records_what_was_predicted_and_what_happened(idle, tmp_path):
    out = tmp_path / "run"
    words = ["sharegpt", "--url", idle.url, "--closed", "4", "--requests", "24"]
    words += ["--max-turns", "3", "--max-context", "1500", "--max-output", "4"]
    words += ["--pause-factor", "0", "--out", out, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, words)],
        capture_output=True, text=True, timeout=_RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = list(read_records(out))
    assert [record.error for record in records] == [""] * 24
    names = {node["node"] for node in idle.nodes()}
    for record in records:
        assert record.node in names
        assert record.paced
        assert record.reason
        assert record.generated_tokens == record.output_tokens  # ignore_eos was found out
        assert record.prompt_tokens == record.input_tokens  # token ids are sent as they are
        assert {"queue_s", "load_s", "compute_s"} <= set(record.predicted)
        assert record.actual["ttft_s"] > 0
        told = [record.actual[f"{name}_tokens"] for name in ("device", "cached", "new")]
        assert sum(told) == record.input_tokens
    figures = json.loads(done.stdout)
    assert figures["slo"]["basis"] == "idle"  # from the cluster's own node profiles
    assert {row["name"] for row in figures["nodes"]} <= names
