"""`kappa heads`: what it refuses, each with place and remedy.

What it measures is in tests/engine/sparse, a whole run in tests/workers/test_torch_engine.py.
"""

import json

import pytest
import typer
from typer.testing import CliRunner

from kappa_deploy.commands.heads import _encoder, heads
from kappa_workers.tiny_model import make_tiny_model

app = typer.Typer()
app.command()(heads)
TEXTS = [f"Line {i} of a short text about nothing in particular." for i in range(20)]


def refused(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.replace("│", " ").split())


def test_a_model_that_is_not_here_is_refused(tmp_path):
    assert "is not here: give smollm2-135m, or a folder" in refused(tmp_path / "none")


def test_an_architecture_of_no_family_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    said = refused(tmp_path, "--out", tmp_path / "heads.json")
    assert "model_type 'mamba' is not among opt, llama, qwen2, qwen3" in said


def test_a_place_where_no_file_can_be_is_refused_first(tmp_path, monkeypatch):
    # A short path: a long one is broken in two.
    monkeypatch.chdir(tmp_path)
    said = refused(".", "--out", "none/heads.json")
    assert "none is not a folder: create it, or change --out" in said
    assert ". is a folder: name a file in it by --out" in refused(".", "--out", ".")


@pytest.mark.parametrize(
    ("words", "why"), [("too short", "6 pieces of 1056 need 6336"), (None, "No such file")]
)
def test_a_text_that_does_not_do_is_refused(tmp_path, words, why):
    text, out = tmp_path / "text", tmp_path / "heads.json"
    if words is not None:
        text.write_text(words)
    model = make_tiny_model(tmp_path / "tiny", TEXTS)
    assert why in refused(model, "--text", text, "--out", out)
    assert not out.exists()


def test_no_beginning_of_a_text_stands_within_a_piece(tmp_path):
    encode = _encoder(make_tiny_model(tmp_path / "tiny", TEXTS))
    assert encode("Line 1") == encode("Line") + encode(" 1")
