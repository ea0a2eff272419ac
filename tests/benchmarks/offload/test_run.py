"""`kappa bench offload`: a small run of every kind of cell, what it refuses and leaves out."""

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from kappa.hardware import node_profile
from kappa.plans.rates import FORMAT, rates_from_law
from kappa_benchmarks.offload import rig as rigs
from kappa_benchmarks.offload.cells import SETTINGS, SMOLLM2, Group, SparseCell, model, setting
from kappa_benchmarks.offload.command import offload
from kappa_benchmarks.offload.rig import Arm, MeteredMover, Sample, alternate, leaders, ratios
from kappa_benchmarks.offload.run import Run, selected
from kappa_benchmarks.offload.sparse import sparse_rig
from kappa_engine.kv_cache import ArenaTooLarge

app = typer.Typer()
app.command()(offload)


# -- arms -----------------------------------------------------------------------------------------


def test_the_same_plan_is_run_once_and_counts_for_both():
    log = []

    def arm(name, key=None):
        return Arm(name, lambda: log.append(name) or Sample(float(len(log))), key=key)

    arms = [arm("a", (1,)), arm("b"), arm("c", (1,)), arm("d")]
    samples = alternate(arms, 5)
    # A warm-up, then five rounds, the order reversed each time.
    assert "".join(log) == "dbaabddbaabddbaabd"
    assert samples["c"] == samples["a"] and leaders(arms)["c"] == "a"
    with pytest.raises(ValueError, match="4 repeats say too little: give 5 or more"):
        alternate(arms, 4)


def test_ratios_are_of_the_same_round():
    # A machine twice as slow in every other round: the ratio does not know.
    slow = [1.0, 2.0, 1.0, 2.0, 1.0]
    samples = {"base": [Sample(3 * s) for s in slow], "new": [Sample(2 * s) for s in slow]}
    assert ratios(samples, "base", "new") == pytest.approx([1.5] * 5)


def test_a_paced_link_takes_its_time():
    target, source = torch.zeros(1000), torch.ones(1000)
    paced = MeteredMover(1e6)
    try:
        paced.h2d([(target, source)]).block()
        paced.settle()
        counters = paced.counters["h2d"]
        # At least that long, whatever the machine does meanwhile.
        assert counters.copied_bytes == 4000 and counters.busy_s >= 0.004
        before_s = paced.stalled_s
        paced.wait(paced.h2d([(target, source)]))
        assert paced.stalled_s > before_s
    finally:
        paced.stop()


# -- a run ----------------------------------------------------------------------------------------


def measured(forward, settings):
    """What a quiet machine would measure: a busy one may give no line that fits."""
    c, sizes = forward.config, [32, 64, 96, 128]
    new, context = [1, 8, 32], [0, 64]
    token_bytes = 2 * c.kv_width * 4
    return {
        "format": FORMAT, "device": "test", "model": c.shape.name, "layers": c.layers,
        "kv_bytes_per_token": c.layers * token_bytes,
        "activation_bytes_per_token": c.layers * c.hidden * 4,
        "load": {"tokens": sizes, "seconds": [n * token_bytes / 40e6 for n in sizes]},
        "project": {"tokens": sizes, "seconds": [1e-6 * n for n in sizes]},
        "attend": {"tokens": sizes, "seconds": [1e-6 * n for n in sizes],
                   "h2d_bytes_per_s": 40e6, "share_while_loading": 1.0},
        "grid": {"new_tokens": new, "context_tokens": context,
                 "seconds": [[1e-3 + 1e-4 * t + 1e-7 * t * s for s in context] for t in new]},
        "h2d_bytes_per_s": 40e6,
    }  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "deep" / "rows.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rigs, "profile", measured)
        done = Run([setting("smallest")], 5, out).run()
    assert json.loads(out.read_text())["rows"] == json.loads(json.dumps(done["rows"]))
    assert done["profiles"][0]["model"] == "opt-tiny"
    return done


def rows(result, system):
    found = {row["policy"]: row for row in result["rows"] if row["system"] == system}
    assert found
    return found


def test_every_row_has_its_spread_and_its_prediction(result):
    assert all("all" not in one["what"].split() for one in result["left_out"])
    for row in (row for row in result["rows"] if row["system"] != "sparse-answers"):
        assert row["repeats"] == 5 and row["latency_s"] > 0 and row["latency_iqr_s"] >= 0
        if row.get("predicted_s") is not None:
            expected = row["predicted_s"] / row["latency_s"] - 1
            assert row["predicted_error"] == pytest.approx(expected)
        if row["policy"] == row["baseline"]:
            assert row["speedup"] == 1.0


def test_all_policies_generate_the_baselines_tokens(result):
    exact = [row for row in result["rows"] if not row["system"].startswith("sparse")]
    for row in exact:
        assert row["tokens_equal"] == (None if row["policy"] == "link-alone" else 1.0)
        assert row["system"] == "capacity" or row["predicted_s"] > 0


def test_weights_that_cross_are_in_a_rows_bytes(result):
    found = {row["policy"]: row for row in result["rows"] if row.get("cell") == "2x25/4"}
    weights = 3 * (4 * 64 * 64 + 2 * 64 * 256) * 4
    assert found["host-weights"]["bytes_h2d"] == 3 * (2 * 24 * 3 * 2 * 64 * 4 + weights)
    assert found["host-kvpr"]["baseline"] == "host-weights"
    assert found["host-kvpr"]["tokens_equal"] == 1.0


def test_a_decoding_row_counts_the_bytes_of_its_steps(result):
    # 2 sequences of 24 tokens in blocks of 8, 3 layers of width 64 in 4 bytes, 3 steps.
    found = {row["policy"]: row for row in result["rows"] if row.get("cell") == "2x24/4"}
    assert found["host-kv"]["bytes_h2d"] == 3 * 2 * 24 * 3 * 2 * 64 * 4
    ahead = found["host-kvpr"]
    assert ahead["bytes_h2d"] < found["host-kv"]["bytes_h2d"]
    assert ahead["tokens_per_s"] == pytest.approx(2 * 3 / ahead["latency_s"])
    assert ahead["end_to_end_tokens_per_s"] < ahead["tokens_per_s"] * 4 / 3


def test_what_the_cpu_attends_to_does_not_cross_the_link(result):
    found = {row["policy"]: row for row in result["rows"] if row.get("cell") == "2x33/4"}
    assert found["cpu-50"]["bytes_h2d"] == found["host-kv"]["bytes_h2d"] / 2


def test_prefix_is_loaded_as_its_plan_says(result):
    found = rows(result, "prefix-ttft")
    whole = 64 * 3 * 2 * 64 * 4
    for policy, share in (
        ("load-sequential", 1), ("load-layers", 1), ("recompute-all", 0), ("activations", 0.5),
    ):  # fmt: skip
        assert found[policy]["bytes_h2d"] == share * whole
    assert [policy for policy, row in found.items() if row["chosen"]] == ["auto"]


def test_activations_hold_twice_the_requests_in_like_memory(result):
    # Two contexts of 33 tokens are 10 blocks of KV: three prompts of 3; and 20 of activations.
    found = rows(result, "capacity")
    assert (found["host-kv"]["held"], found["hybrid-100"]["held"]) == (3, 6)
    assert found["hybrid-100"]["batch"] == 8


def test_sparse_ways_are_measured_against_lru_of_their_share(result):
    found = rows(result, "sparse-seconds")
    assert list(found) == ["exact", "clo 1/8", "lru 1/8", "host-kv"]
    # Sixteen whole blocks of each context lie in host memory but for the latest 16 tokens.
    assert found["host-kv"]["bytes_h2d"] == 2 * 240 * 3 * 2 * 2 * 16 * 4
    assert found["host-kv"]["loading"] == 1.0 and found["clo 1/8"]["loading"] > 0
    # Two layers of three, two heads, two sequences of 256 tokens, an eighth chosen; 16 elements.
    choice = 2 * 2 * 2 * 33 * 2 * 16 * 4
    assert found["exact"]["bytes_h2d"] == 0 and found["exact"]["hits"] is None
    for name in ("clo 1/8", "lru 1/8"):
        row = found[name]
        assert 0 < row["bytes_h2d"] < choice and 0 <= row["hits"] < 1
        assert row["baseline"] == "lru 1/8" and row["speedup_low"] <= row["speedup_high"]
        assert row["tokens_per_s"] == pytest.approx(2 / row["latency_s"])
        assert not row["ranked"] or name != "lru 1/8"
    # Missing blocks cross, in whole: of 4 blocks of 8 tokens in the choice.
    blocks = 2 * 2 * 2 * 4
    assert found["lru 1/8"]["bytes_h2d"] == pytest.approx(
        (1 - found["lru 1/8"]["hits"]) * blocks * 8 * 2 * 16 * 4
    )


def test_sparse_answers_stand_beside_exact_attention(result):
    found = rows(result, "sparse-answers")
    assert found["exact"]["perplexity_loss"] == 0.0 and found["exact"]["tokens_scored"] == 2 * 5
    # All tokens chosen: nothing is lost. Half of them: something is, either way.
    assert found["clo 1"]["perplexity_loss"] == pytest.approx(0.0, abs=1e-5)
    assert found["clo-tgp 1"]["perplexity_loss"] == pytest.approx(0.0, abs=1e-5)
    assert found["exact"]["persistent"] == 1.0
    assert found["clo 1/2"]["persistent"] == found["clo-fixed 1/2"]["persistent"] == 1 / 3
    assert found["clo-tgp 1/2"]["persistent"] > 1 / 3
    # The least cosine of a group hits no more often than their mean.
    assert found["clo-fixed 1/2"]["hits"] <= found["clo 1/2"]["hits"]
    half = found["clo 1/2"]
    assert abs(half["perplexity_loss"]) > 1e-4
    assert half["perplexity_loss_low"] < half["perplexity_loss"] < half["perplexity_loss_high"]
    # Random tokens hide no numbers.
    assert half["found"] is None


def test_lru_choice_is_the_best_blocks_by_means_in_place():
    cell = SparseCell(1, 64, 5, (0.5,))
    with (
        sparse_rig(setting("smallest"), Group("llama-tiny", (cell,)), cell) as made,
        made.opened("lru", 0.5, range(1)) as sparse,
    ):
        made.read(sparse, made.following[:, :3])
        slots, layer, start = sparse.slots, 1, sparse.slots.layout.choice_start
        table = slots.states[0].blocks
        for head, blocks in enumerate(sparse.cache._held[layer].tolist()):
            assert len(set(blocks)) == 4 and 0 not in blocks
            for place, block in enumerate(blocks):
                want = slots.arena.kv_host[layer, table[block], :, :, head]
                at = start + 8 * place
                assert torch.equal(slots.store[layer][0, :, head, at : at + 8], want)


def test_trained_model_not_fetched_leaves_its_cells_out(monkeypatch, tmp_path):
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path))
    done = Run([setting("clo-cpu")], 5).run()
    assert "smollm2-135m is not here" in done["left_out"][0]["why"] and not done["rows"]


# -- refused or left out --------------------------------------------------------------------------


def test_the_command_prints_a_table_and_json_alone():
    arguments = ["--setting", "smallest", "--only", "sparse"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    assert "clo 1/8" in done.stdout and "perplexity" in done.stdout
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {row["system"] for row in facts["rows"]} == {
        "sparse-seconds",
        "sparse-answers",
    } and facts["machine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "none"], "no setting named 'none'"),
        (["--repeats", "4"], "--repeats"),
        (["--setting", "smallest", "--only", "nothing"], "no cell has any of nothing"),
    ],
)
def test_offload_refuses_what_it_cannot_measure(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr and done.stdout == ""


def test_a_link_is_as_fast_as_a_mixture_needs(monkeypatch):
    one = replace(setting("smallest"), link_bytes_per_s=0.0, psi_over_mu=0.5)
    rates = rates_from_law(model("opt-tiny").shape, node_profile("h100-pcie5"))
    monkeypatch.setattr(rigs, "_rates", lambda forward, settings: (rates, {}))
    with rigs.rig(one, one.groups[0]) as made:
        mu_s = rates.kv_bytes / made.mover.pace_bytes_per_s
        assert rates.project_token_s / mu_s == pytest.approx(0.5)


def test_an_unsteady_machine_leaves_the_group_out_by_name(monkeypatch):
    def poor(measured):
        raise ValueError("the load fit has R² 0.4")

    monkeypatch.setattr(rigs, "rates_from_measured", poor)
    monkeypatch.setattr(rigs, "profile", lambda forward, settings: {})
    done = CliRunner().invoke(app, ["--setting", "smallest", "--only", "capacity", "--json"])
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert "R² 0.4" in facts["left_out"][0]["why"] and not facts["rows"]


def test_machine_without_an_attention_line_leaves_its_ways_out(monkeypatch):
    def without(forward, settings):
        return {**measured(forward, settings), "attend": None}

    monkeypatch.setattr(rigs, "profile", without)
    done = Run(selected([setting("smallest")], ["2x33/4"]), 5).run()
    assert {row["policy"] for row in done["rows"]} == {"host-kv", "link-alone"}
    assert [one["what"] for one in done["left_out"]] == ["smallest opt-tiny 2x33/4: cpu-50"]


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    def refused(*_, **__):
        raise ArenaTooLarge("0.2 GiB of host memory, 0.0 GiB are free")

    monkeypatch.setattr(rigs, "Arena", refused)
    done = Run(selected([setting("smallest")], ["ttft"]), 5).run()
    assert "are free" in done["left_out"][0]["why"]


def test_every_setting_names_models_and_cells_that_are_there():
    for one in SETTINGS.values():
        for group in one.groups:
            assert group.cells and (group.model == SMOLLM2 or model(group.model).layers >= 3)
