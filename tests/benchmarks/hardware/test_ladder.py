"""The ladder's processes, their times, and the files that they write."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kappa_benchmarks.hardware import ladder
from kappa_benchmarks.hardware.ladder import _end, climb, run_rung, status
from kappa_benchmarks.hardware.ladder_page import CPU_LABEL
from kappa_deploy.cli import app

COPY = {"kind": "copy", "way": "to the device, pageable", "layout": "whole", "bytes": 4096,
        "bytes_per_s": 2e9, "largest": True}  # fmt: skip


# -- a rung's process -----------------------------------------------------------------------------


def writing(rows, *command):
    """A rung's process that has written rows by the time it starts."""

    def argv(_, file):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return command

    return argv


@pytest.mark.parametrize(
    ("command", "limit_s", "status", "why"),
    [
        (("sleep", "600"), 0.5, "out of time", "ended after 0 s"),
        (("sh", "-c", "echo CUDA error: no memory >&2; exit 3"), 60, "failed",
         "its process ended with 3:\nCUDA error: no memory"),
    ],
)  # fmt: skip
def test_rung_that_ends_badly_keeps_what_it_measured(tmp_path, command, limit_s, status, why):
    row = run_rung("rates", writing([COPY], *command), tmp_path, limit_s)
    assert (row["status"], row["rows"], row["why"]) == (status, [COPY], [why])


def test_a_rung_that_ends_well_tells_what_it_found(tmp_path, capfd):
    rows = [{"kind": "note", "text": "half way"}, COPY]
    row = run_rung("rates", writing(rows, "true"), tmp_path, 60)
    assert row["status"] == "ok" and row["rows"] == [COPY] and not row["why"]
    shown = capfd.readouterr().err
    assert "half way" in shown and "rates: ok after" in shown and "2 GB/s" in shown


def test_nothing_that_a_rung_started_outlives_it():
    command = ["sh", "-c", "sleep 600 & echo there; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline() == b"there\n"
    _end(process)
    # The pipe ends with the last process that holds it.
    assert process.stdout.read() == b"" and process.returncode is not None


@pytest.mark.parametrize(
    ("rows", "code", "ended", "why"),
    [
        ([{"kind": "skipped", "arm": "vllm", "why": "absent"}], 0, "skipped", "vllm: absent"),
        ([COPY, {"kind": "skipped", "arm": "vllm", "why": "absent"}], 0, "ok", "vllm: absent"),
        ([COPY, {"kind": "failed", "arm": "vllm", "why": "broken"}], 0, "failed", "vllm: broken"),
        ([{**COPY, "arm": "torch", "verdict": "different"}], 0, "failed", "torch: different"),
    ],
)
def test_how_a_rung_ended_follows_from_its_rows(rows, code, ended, why):
    assert status(rows, code, 60, "") == {"status": ended, "why": [why]}


# -- the whole ------------------------------------------------------------------------------------


def test_climb_leaves_one_labelled_json_and_page(tmp_path, monkeypatch):
    def rung(name, argv, out, bound_s):
        command = argv(name, out / "rows")
        assert command[:3] == [sys.executable, "-m", "kappa_benchmarks.hardware.ladder"]
        assert command[3:5] == [name, "cpu"]
        return {"rung": name, "what": "<copies>", "status": "ok", "seconds": 1.0, "why": [],
                "rows": [COPY]}  # fmt: skip

    monkeypatch.setattr(ladder, "run_rung", rung)
    result = climb("cpu", ["offload", "rates"], None, tmp_path)
    stored = json.loads((tmp_path / "ladder.json").read_text())
    assert stored["device"] == result["device"] == stored["facts"]["device"] == CPU_LABEL
    assert [row["rung"] for row in stored["rungs"]] == ["offload", "rates"]
    assert stored["ok"] and stored["date"] and "torch" in stored["facts"]["versions"]
    text = (tmp_path / "ladder.html").read_text()
    assert CPU_LABEL in text and "&lt;copies&gt;" in text and text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org", "")


def test_bad_input_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "run_rung", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, message in (
        ((None, [], None, tmp_path), "no GPU here"),
        (("cpu", ["rate"], None, tmp_path), "--rung: unknown 'rate': choose of rates, roundtrip"),
        (("cpu", [], tmp_path, tmp_path), "no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            climb(*arguments)


def test_the_command_climbs_and_its_status_says_how_it_went(tmp_path, monkeypatch):
    asked = []

    def climb(*given):
        asked.append(given)
        return {"ok": given[0] == "cpu", "rungs": []}

    monkeypatch.setattr(ladder, "climb", climb)
    command = ["doctor", "--gpu", "--rung", "rates", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == 0 and json.loads(done.stdout) == {"ok": True, "rungs": []}
    assert asked == [("cpu", ["rates"], None, tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 1


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert done.exit_code == 2 and "KAPPA_EXTRA=gpu ./dev setup" in " ".join(done.output.split())
    lost = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert lost.exit_code == 2 and "options of --gpu" in lost.output
