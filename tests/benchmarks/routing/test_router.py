"""`kappa bench router`: rows of the documented form, from a router in a busy state."""

import json

import pytest
from typer.testing import CliRunner

from kappa_benchmarks.command import app
from kappa_benchmarks.routing import router


def test_one_json_object_with_a_row_per_length_nodes_and_input(monkeypatch):
    monkeypatch.setattr(router, "NODES", (8,))
    monkeypatch.setattr(router, "LENGTHS", (512, 4096))
    monkeypatch.setattr(router, "_INDEX_BLOCKS", {8: 20_000})
    monkeypatch.setattr(router, "_PROMPTS", {512: 4, 4096: 2})
    arguments = ["router", "--json", "--no-peers", "--repeats", "20"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    kinds = [(row["tokens"], row["nodes"], row["input"]) for row in result["rows"]]
    assert kinds == [(n, 8, form) for n in (512, 4096) for form in ("array", "list")]
    for row in result["rows"]:
        assert 0 < row["hash_us"] < row["total_us"]["p50"] <= row["total_us"]["p99"]
        assert row["lookup_us"] > 0 and row["score_us"] >= 0
    assert 0 < result["index_bytes_per_block"] < 64
    assert result["peers"] == []


@pytest.mark.ray
def test_peer_rows_leave_out_a_peer_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    rows = router.peer_rows((16, 64), repeats=3)
    assert [(row["peer"], row["tokens"]) for row in rows] == [
        ("ray_prefix_tree", 16), ("ray_prefix_tree", 64), ("ray_pow_2", 16), ("ray_pow_2", 64),
    ]  # fmt: skip
    for row in rows:
        assert row["index"] == "empty" and row["workers"] == 4
        assert 0 < row["us"]["p50"] <= row["us"]["p99"]
    said = capsys.readouterr().err
    assert "ai-dynamo" in said and "PIP_INDEX_URL" in said
