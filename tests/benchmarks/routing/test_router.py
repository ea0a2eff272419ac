"""`kappa bench router`: rows of the documented form, from a router in a busy state."""

import json

from typer.testing import CliRunner

from kappa_benchmarks.command import app
from kappa_benchmarks.routing import router


def test_one_json_object_with_a_row_per_length_nodes_and_input(monkeypatch):
    monkeypatch.setattr(router, "NODES", (8,))
    monkeypatch.setattr(router, "LENGTHS", (512, 4096))
    monkeypatch.setattr(router, "_INDEX_BLOCKS", {8: 20_000})
    monkeypatch.setattr(router, "_PROMPTS", {512: 4, 4096: 2})
    arguments = ["router", "--json", "--repeats", "20"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    kinds = [(row["tokens"], row["nodes"], row["input"]) for row in result["rows"]]
    assert kinds == [(n, 8, form) for n in (512, 4096) for form in ("array", "list")]
    for row in result["rows"]:
        assert 0 < row["hash_us"] < row["total_us"]["p50"] <= row["total_us"]["p99"]
        assert row["lookup_us"] > 0 and row["score_us"] >= 0
    assert 0 < result["index_bytes_per_block"] < 64
