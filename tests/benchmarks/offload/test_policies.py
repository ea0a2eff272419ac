"""What the bench's policies store, load and are predicted to take; and the baseline's model."""

import pytest

from benchmarks.offload.cells import DecodeCell, Group, PrefixCell, arena_size, setting
from benchmarks.offload.decoder import ACT_HOST, KV_HOST
from benchmarks.offload.policies import Policies
from kappa.cost import StepModel
from kappa.plans.decoding import activation_share
from kappa.plans.rates import LineFit, PlanRates

ROW = DecodeCell(4, 256, 17, ("kv-only", "kvpr-ahead"))
COLUMN = DecodeCell(4, 256, 17, ("kv-only", "hybrid-planned"), batches=3, order="column")


def rates(load=1e-6, project=2e-6, fixed_s=1e-4, weights_load_s=0.0, ratio=0.5):
    return PlanRates(
        "test", layers=8, kv_bytes=1000.0, activation_bytes=1000.0 * ratio,
        load=LineFit("load", load), project=LineFit("KV projection", project),
        step=StepModel(token_s=1e-7, pair_s=0.0, weights_s=0.0, context_token_s=0.0,
                       fixed_s=fixed_s),
        weights_load_s=weights_load_s,
    )  # fmt: skip


def policies(cell=ROW, weight_bytes=0.0, **of):
    return Policies(cell, rates(**of), 16, weight_bytes)


def test_loading_kv_takes_every_full_block_at_every_step():
    found = policies()
    full = [length // 16 * 16 for length in range(256, 272)]
    gpu_s = 1e-4 + 4e-7
    expected = sum(4e-6 * tokens + gpu_s / 8 for tokens in full)
    assert found.predicted_s(found.way("kv-only")) == pytest.approx(expected)


def test_kvprs_split_is_its_share_of_the_full_blocks():
    found = policies()
    way = found.way("kvpr-paper")
    share = activation_share(found.rates)
    assert abs(way.activations(256) - 256 * share) <= 16 and way.activations(256) % 16 == 0
    assert way.split and found.full(263) == 256
    assert found.way("share-25").activations(256) == 64


@pytest.mark.parametrize("cell", [ROW, COLUMN])
def test_the_choice_is_the_baseline_where_projecting_cannot_pay(cell):
    weights = {"weight_bytes": 1e6, "weights_load_s": 1e-4} if cell is COLUMN else {}
    assert policies(cell, project=1e-3, **weights).choice() == "kv-only"
    assert policies(cell, ratio=2.0, **weights).choice() == "kv-only"
    assert policies(cell, project=1e-8, **weights).choice() == cell.policies[1]


def test_what_is_planned_is_no_worse_than_any_share():
    found = policies(COLUMN, weight_bytes=1e6, weights_load_s=1e-4)
    planned = found.predicted_s(found.way("hybrid-planned"))
    for name in ("kv-only", "activations", "hybrid-25", "hybrid-50", "hybrid-75"):
        assert planned <= found.predicted_s(found.way(name)) * 1.01


def test_streamed_weights_are_shared_by_the_batches_of_a_column():
    one = policies(COLUMN, weight_bytes=1e6, weights_load_s=0.03)
    none = policies(COLUMN, weight_bytes=0.0, weights_load_s=0.03)
    difference = one.step_s(256, 0) - none.step_s(256, 0)
    assert difference == pytest.approx(0.03)


def test_hybrid_blocks_keep_the_ratio_in_what_is_stored_and_in_what_is_predicted():
    way = policies(COLUMN).way("hybrid-25")
    kept = []
    for _ in range(16):
        act = sum(one is ACT_HOST for one in kept)
        kept.append(way.placement(len(kept) - act, act))
    assert set(kept) == {ACT_HOST, KV_HOST}
    assert 16 * sum(one is ACT_HOST for one in kept) == way.activations(256) == 64


def test_equal_ways_have_equal_keys_and_others_do_not():
    found = policies(COLUMN)
    key = {name: found.key(found.way(name)) for name in (
        "kv-only", "hybrid-0", "activations", "hybrid-100", "share-0", "device", "hybrid-50",
    )}  # fmt: skip
    assert key["kv-only"] == key["hybrid-0"] and key["activations"] == key["hybrid-100"]
    # It stores both, though it loads no activations.
    assert len(set(key.values())) == 5


@pytest.mark.parametrize("name", ["kvpr-best", "hybrid-best", "all"])
def test_a_policy_that_is_not_there(name):
    with pytest.raises(ValueError, match=f"no policy named '{name}'"):
        policies().way(name)


def test_no_activations_are_kept_where_they_are_no_smaller_than_kv():
    size = arena_size(setting("cpu-small"), Group("llama-small", (PrefixCell(1024, 32),)))
    assert size.act_host == 0 and size.kv_host >= 66
