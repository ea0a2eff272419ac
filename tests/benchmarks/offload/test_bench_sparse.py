"""`kappa bench offload --setting clo-…`: a table with the injected rates, JSON, and refusals."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.offload.bench_offload import offload

app = typer.Typer()
app.command()(offload)


def test_a_run_prints_every_policy_and_says_that_hits_are_injected(tmp_path):
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["--setting", "clo-cpu-smallest", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    assert "hit rates injected" in done.stdout
    written = json.loads(out.read_text())
    for row in written["rows"]:
        assert row["policy"] in done.stdout
    assert written["machine"] and written["goals"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "clo-none"], "no setting named 'clo-none'"),
        (["--setting", "clo-cpu", "--setting", "cpu-small"], "run apart"),
        (["--setting", "clo-cpu", "--limit-s", "5"], "run apart"),
        (["--setting", "clo-cpu", "--only", "99x"], "no cell has any of 99x"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""
