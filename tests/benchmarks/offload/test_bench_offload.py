"""`kappa bench offload`: what it refuses, and what it prints, writes and draws."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.offload.bench_offload import draw, offload

app = typer.Typer()
app.command()(offload)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "none"], "no setting named 'none'"),
        (["--setting", "cpu-small", "--setting", "ttft"], "do not go together"),
        (["--repeats", "4"], "--repeats"),
        (["--setting", "cpu-smallest", "--only", "nothing"], "no cell has any of nothing"),
        (["--setting", "kvpr-13b"], "GiB of host memory, of which 0.0 GiB and"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_a_run_prints_a_table_writes_its_rows_and_draws_them(tmp_path):
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    done = CliRunner().invoke(
        app,
        ["--setting", "cpu-smallest", "--only", "row", "--out", str(out), "--plot", str(plot)],
    )
    assert done.exit_code == 0, done.stderr
    assert "decode-row 2x24/4" in done.stdout and "kvpr-ahead" in done.stdout
    written = json.loads(out.read_text())
    assert {row["system"] for row in written["rows"]} == {"decode-row"}
    assert written["machine"] and plot.read_bytes().startswith(b"\x89PNG")


def test_json_goes_to_standard_output_alone():
    done = CliRunner().invoke(
        app, ["--setting", "cpu-smallest", "--only", "64+8", "--limit-s", "0.000001", "--json"]
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == []
    assert "left of the limit" in done.stderr


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no rows to draw"):
        draw({"rows": []}, tmp_path / "empty.png")
