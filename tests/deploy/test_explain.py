"""The law's commands: JSON with exactly the promised keys, tables for people, errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kappa.cost import TokenCounts
from kappa.hardware import CATALOGUE, node_profile
from kappa.plans.measured import as_measured
from kappa.plans.rates import rates_from_law
from kappa.shapes import model_shape
from kappa_deploy.commands import explain, roofline

EXPLAIN_KEYS = {
    "kappa", "kappa_crit", "kappa_eff", "bound", "ttft_s", "load_s", "compute_s", "plan",
}  # fmt: skip
REQUEST = ["explain", "--model", "llama-3.1-8b", "--cached", "60000", "--new", "50"]

app = typer.Typer()
app.command()(explain.tables)
app.command()(explain.explain)
app.command()(roofline.roofline)


def _run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def _json(*args: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_run(*args, "--json"))
    return data


def test_tables_json_contract() -> None:
    data = _json("tables")
    assert set(data) == {
        "table2", "table3", "table5", "cases", "law", "slips", "nodes", "models",
    }  # fmt: skip
    assert all(set(row) == {"gpu", "pcie", "paper", "ours"} for row in data["table2"])
    keys = {"model", "gpu", "paper", "paper_formula", "corrected", "dense_decimal"}
    assert all(set(row) == keys for row in data["table3"])
    keys = {"name", "paper", "recomputed", "one_way", "kind"}
    assert all(set(row) == keys for row in data["cases"])
    assert all(set(row) == {"name", "paper", "equation", "law"} for row in data["law"])
    assert (len(data["table2"]), len(data["table3"])) == (6, 15)


TABLE = "h100_sxm/llama-3.1-8b/tp1"


def test_a_table_of_a_real_gpu_stands_beside_the_law() -> None:
    request = ("explain", "--model", "llama-3.1-8b", "--cached", "16384", "--new", "512")
    output = _run(*request, "--silicon", TABLE)
    # The table has 18.04 ms of 512 tokens behind 16,384; one token behind 16,896, 7.07.
    assert f"{TABLE}: 18.04 ms of computing by its table" in output
    found = _json(*request, "--silicon", TABLE)["silicon"]
    assert found["compute_s"] == pytest.approx(18.04e-3, abs=1e-5)
    assert found["decode_s"] == pytest.approx(7.07e-3, abs=2e-5)
    assert found["law_s"] == pytest.approx((1 + found["error"]) * found["compute_s"])
    assert found["beyond"] == []
    assert "silicon" not in _json(*request)


def test_what_a_table_does_not_reach_is_said() -> None:
    request = ("explain", "--model", "llama-3.1-8b", "--cached", "200000", "--new", "512")
    found = _json(*request, "--silicon", TABLE)["silicon"]
    assert "attention of prompts" in found["beyond"]


@pytest.mark.parametrize(("table", "why"), [
    ("h100_sxm/qwen3-32b/tp2", "is a table of another model than llama-3.1-8b"),
    ("h100/llama-3.1-8b/tp1", "no table of silicon named"),
])  # fmt: skip
def test_a_table_that_does_not_fit_the_model_is_refused(table: str, why: str) -> None:
    result = CliRunner().invoke(app, [*REQUEST, "--silicon", table])
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())


def test_tables_for_people_name_the_slips() -> None:
    output = _run("tables")
    for text in ("Table 2", "Table 3", "DeepSeek-V3", "1.42", "(lost)"):
        assert text in output


def test_tables_are_whole_at_80_columns() -> None:
    result = CliRunner().invoke(app, ["tables"], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    for word in ("qwen3-235b-a22b", "modelled_w", "h100-pcie5_16", "unified-hbm", "quotient"):
        assert any(word in line for line in lines)


def test_models_stand_side_by_side_with_kv_of_16_bits_and_of_8() -> None:
    rows = {row["model"]: row for row in _json("tables", "--node", "pcie")["models"]}
    for name, attention, layers, experts, kv_kb in (
        ("opt-13b", "mha", "40 of 40", "dense", 819.2),
        ("llama-3.1-8b", "gqa", "32 of 32", "dense", 131.072),
        ("gemma-3-27b", "gqa", "10 of 62", "dense", 81.92),
        ("qwen3-235b-a22b", "gqa", "94 of 94", "8 of 128", 192.512),
        ("deepseek-v3", "mla", "61 of 61", "8 of 256", 70.272),
    ):
        row = rows[name]
        assert (row["attention"], row["layers"], row["experts"]) == (attention, layers, experts)
        assert (row["kv_kb_16"], row["kv_kb_8"]) == (kv_kb, kv_kb / 2)
        assert row["pcie_8"] == 2 * row["pcie_16"]
    # 2 * 8.0303e9 / 131,072 * 55e9 / 400e12.
    assert rows["llama-3.1-8b"]["pcie_16"] == pytest.approx(16.848, abs=0.001)
    assert [row["model"] for row in _json("tables", "--model", "opt-6.7b")["models"]] == [
        "opt-6.7b"
    ]
    assert "Did you mean" in CliRunner().invoke(app, ["tables", "--node", "pci"]).output


def test_explain_halves_load_s_and_doubles_kappa_crit_for_fp8() -> None:
    wide, narrow = (
        _json(*REQUEST, "--node", "pcie", *more) for more in ((), ("--kv-dtype", "fp8"))
    )
    assert narrow["kappa_crit"] == pytest.approx(2 * wide["kappa_crit"])
    assert narrow["load_s"] == wide["load_s"] / 2


def test_a_kv_dtype_that_cannot_be_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*REQUEST, "--kv-dtype", "fp3"])
    assert (result.exit_code, "unknown dtype 'fp3'" in result.output) == (2, True)
    rates = tmp_path / "rates.json"
    rates.write_text("{}")
    result = CliRunner().invoke(app, [*REQUEST, "--kv-dtype", "fp8", "--rates", str(rates)])
    assert (result.exit_code, "drop --kv-dtype" in result.output.replace("\n", " ")) == (2, True)
    result = CliRunner().invoke(app, [*REQUEST, "--tp", "2", "--rates", str(rates)])
    assert (result.exit_code, "and --tp" in result.output.replace("\n", " ")) == (2, True)


def test_explain_one_node_json() -> None:
    data = _json(*REQUEST, "--node", "pcie")
    assert set(data) == EXPLAIN_KEYS | {"plans", "decoding"}
    assert data["kappa"] == 1200
    assert data["bound"] == "memory"
    assert data["plan"] == "load"
    assert data["ttft_s"] == pytest.approx(data["load_s"] + data["compute_s"])


def test_explain_tells_every_plan_and_marks_the_chosen_one() -> None:
    data = _json(*REQUEST, "--node", "pcie", "--cpu-gbps", "60")
    plans = {row["plan"]: row for row in data["plans"]}
    assert [row["plan"] for row in data["plans"] if row["chosen"]] == ["auto"]
    priced = [row for row in data["plans"] if "ttft_s" in row]
    assert plans["auto"]["ttft_s"] == min(row["ttft_s"] for row in priced)
    assert "ρ = 2" in plans["activations + load"]["refused"]
    assert plans["cpu (stays in host memory)"]["step_s"] > 0
    step = data["decoding"]
    assert 0 < step["cpu_share"] < 1
    assert step["split_s"] <= min(step["load_all_s"], step["cpu_all_s"])
    # A request that may not take the whole prefix leaves the rest in host memory.
    kept = _json(*REQUEST, "--node", "pcie", "--cpu-gbps", "60", "--room", "20050")
    auto = next(row for row in kept["plans"] if row["chosen"])
    assert auto["segments"] == [["C", 0, 40_000], ["K", 40_000, 60_000]]
    assert "not measured here" in _run(*REQUEST, "--node", "pcie")
    assert "* chosen: " in _run(*REQUEST, "--node", "pcie")


def test_explain_plans_with_what_an_engine_measured(tmp_path: Path) -> None:
    rates = rates_from_law(model_shape("opt-6.7b"), node_profile("pcie"))
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(as_measured(rates, "m", "d")))
    args = ("explain", "--model", "opt-6.7b", "--cached", "4096", "--new", "64", "--node", "pcie")
    data = _json(*args, "--rates", str(path))
    plans = {row["plan"]: row for row in data["plans"]}
    assert plans["activations + load"]["ttft_s"] < plans["load"]["ttft_s"]
    assert "rates.json" in _run(*args, "--rates", str(path)).replace("\n", "")
    none = _json(*args, "--rates", str(path), "--no-activations")["plans"]
    assert any("none are stored" in row["refused"] for row in none)
    path.write_text("{}")
    result = CliRunner().invoke(app, [*args, "--rates", str(path)])
    assert result.exit_code == 2 and "format is None" in result.output


@pytest.mark.parametrize("tp", ["1", "8"])
@pytest.mark.parametrize("node", sorted(CATALOGUE))
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_explain_labels_agree_with_the_seconds(model: str, node: str, tp: str) -> None:
    for cached, new in (("0", "1"), ("600", "1"), ("30000", "100"), ("65536", "512")):
        request = ("--cached", cached, "--new", new, "--node", node, "--tp", tp)
        found = _json("explain", "--model", model, *request)
        memory_bound = found["load_s"] >= found["compute_s"]
        assert found["bound"] == ("memory" if memory_bound else "compute")
        assert (found["kappa"] >= found["kappa_crit"]) is memory_bound
        loads = next(row for row in found["plans"] if row["plan"] == "load")
        assert loads["load_s"] == pytest.approx(found["load_s"])
        assert loads["compute_s"] == pytest.approx(found["compute_s"])


def test_explain_prices_gpus_that_work_as_one() -> None:
    request = ("--model", "llama-3.1-70b", "--cached", "30000", "--new", "512")
    one, four = (_json("explain", *request, "--node", "h100-pcie5", "--tp", n) for n in "14")
    # A quarter of the bytes cross each link in copies of a quarter, 28.0 GB/s for 49.9; and 13 ms.
    assert four["load_s"] - 0.013 == pytest.approx(
        (one["load_s"] - 0.013) / 4 * 49.93 / 28.01, 1e-3
    )
    # 80 layers' two sums of 512 tokens cost more than nothing.
    assert one["compute_s"] / 4 < four["compute_s"] < one["compute_s"] / 2
    assert "h100-pcie5 tp4" in _run("explain", *request, "--node", "h100-pcie5", "--tp", "4")


def test_explain_says_which_model_does_not_fit_a_node() -> None:
    args = ["explain", "--model", "deepseek-v3", "--cached", "10", "--new", "1", "--json"]
    result = CliRunner().invoke(app, [*args, "--node", "h100-pcie5", "--tp", "8"])
    assert "deepseek-v3 does not fit h100-pcie5 with --tp 8: its weights take" in result.stderr
    assert "it takes 9 such GPUs" in result.stderr
    assert json.loads(result.stdout)["load_s"] > 0
    fits = CliRunner().invoke(app, [*args, "--node", "h100-pcie5", "--tp", "16"])
    assert "does not fit" not in fits.stderr


def test_explain_several_nodes_json() -> None:
    data = _json(*REQUEST, "--node", "pcie", "--node", "c2c")
    assert [row["node"] for row in data["nodes"]] == ["pcie", "c2c"]
    assert all(set(row) == EXPLAIN_KEYS | {"plans", "decoding", "node"} for row in data["nodes"])
    assert data["nodes"][1]["ttft_s"] < data["nodes"][0]["ttft_s"]


def test_explain_defaults_to_the_demo_pair_and_names_the_quicker() -> None:
    output = _run(*REQUEST)
    assert "Least idle TTFT: c2c" in output


def test_explain_prints_null_where_no_ratio_is_memory_bound() -> None:
    counts = TokenCounts(device_tokens=0, cached_tokens=10, new_tokens=8000)
    answer = explain.request_cost(counts, model_shape("llama-3.1-8b"), node_profile("c2c"))
    assert answer["kappa_eff"] is None
    args = ("explain", "--model", "llama-3.1-8b", "--node", "c2c", "--cached", "10")
    assert "never" in _run(*args, "--new", "8000")
    assert _json(*args, "--new", "8000")["kappa_eff"] is None


@pytest.mark.parametrize(
    ("flag", "value", "hint"),
    [("--model", "llama-3.1-8c", "llama-3.1-8b"), ("--node", "pci", "pcie")],
)
def test_a_wrong_name_is_a_usage_error_with_a_hint(flag: str, value: str, hint: str) -> None:
    result = CliRunner().invoke(app, [*REQUEST, flag, value])
    assert result.exit_code == 2
    assert "Did you mean" in result.output
    assert hint in result.output


def test_roofline_writes_a_png(tmp_path: Path) -> None:
    out = tmp_path / "roofline.png"
    assert _json("roofline", "--out", str(out)) == {
        "out": str(out),
        "models": ["qwen3-235b-a22b", "deepseek-v3"],
    }
    assert out.read_bytes().startswith(b"\x89PNG")


def test_roofline_refuses_a_missing_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["roofline", "--out", str(tmp_path / "no" / "x.png")])
    assert result.exit_code == 2


def test_explain_notes_a_model_family_that_is_not_listed(tmp_path: Path) -> None:
    config = {
        "model_type": "nobodys", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["explain", "--model", str(tmp_path), "--cached", "100", "--new", "1", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert "'nobodys' is not listed" in result.stderr
    assert json.loads(result.stdout)["nodes"]
