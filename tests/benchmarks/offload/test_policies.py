"""What the bench's policies store, load and are predicted to take; and the baseline's model."""

import pytest

from kappa.cost import StepModel
from kappa.plans.decoding import activation_share
from kappa.plans.rates import LineFit, PlanRates
from kappa_benchmarks.offload.cells import DecodeCell, Group, PrefixCell, arena_size, setting
from kappa_benchmarks.offload.policies import Fixed, Policies, Way

CELL = DecodeCell(4, 256, 17, ("host-kv", "host-kvpr"))
SHORT = DecodeCell(12, 256, 17, ("host-kv", "hybrid-75"), held=4)


def rates(load=1e-6, project=2e-6, fixed_s=1e-4, ratio=0.5):
    return PlanRates(
        "test", layers=8, kv_bytes=1000.0, activation_bytes=1000.0 * ratio,
        load=LineFit("load", load), project=LineFit("KV projection", project),
        step=StepModel(token_s=1e-7, pair_s=0.0, weights_s=0.0, context_token_s=0.0,
                       fixed_s=fixed_s),
    )  # fmt: skip


def policies(cell=CELL, **of):
    return Policies(cell, rates(**of), 16)


def test_loading_kv_takes_every_full_block_at_every_step():
    found = policies()
    full = [length // 16 * 16 for length in range(256, 272)]
    gpu_s = 1e-4 + 4e-7
    expected = sum(4e-6 * tokens + gpu_s / 8 for tokens in full)
    assert found.predicted_s(found.way("host-kv")) == pytest.approx(expected)


def test_kvpr_split_is_its_share_of_full_blocks_as_the_engines():
    found = policies()
    way, share = found.way("kvpr-paper"), activation_share(found.rates)
    assert abs(found.activations(way, 263) - 256 * share) <= 16
    assert found.activations(found.way("share-25"), 263) == 64
    assert Fixed(way, found.rates, 16).split_share(4, 256) == share
    assert Fixed(found.way("share-25"), found.rates, 16).split_share(4, 256) == 0.25


def test_the_choice_is_the_baseline_where_projecting_cannot_pay():
    assert policies(project=1e-3).choice() == "host-kv"
    assert policies(ratio=2.0).choice() == "host-kv"
    assert policies(project=1e-8).choice() == "host-kvpr"


def test_every_way_has_the_same_bytes_where_memory_is_short():
    found = policies(SHORT)
    kv = found.size(found.way("host-kv"), 0.5)
    for name in ("hybrid-25", "hybrid-50", "hybrid-75", "hybrid-100"):
        size = found.size(found.way(name), 0.5)
        assert size.kv_host + 0.5 * size.act_host == pytest.approx(kv.kv_host, abs=1)
        assert size.kv_device == kv.kv_device
    assert kv.kv_host == 4 * 18 and found.size(found.way("hybrid-100"), 0.5).act_host == 8 * 18


def test_a_cell_may_have_as_many_requests_as_memory_holds():
    found = policies(DecodeCell(0, 256, 17, ("host-kv", "hybrid-75"), held=4))
    batch = {}
    for name in ("host-kv", "hybrid-50", "hybrid-100"):
        way = found.way(name)
        size, batch[name] = found.size(way, 0.5), found.batch(way)
        assert size.kv_host + size.act_host == batch[name] * 18
        assert size.kv_host + 0.5 * size.act_host <= 4 * 18
        assert found.options(way).max_running == batch[name]
    assert batch == {"host-kv": 4, "hybrid-50": 5, "hybrid-100": 8}


def test_activations_on_the_device_take_no_host_memory():
    found = policies(DecodeCell(0, 256, 17, ("host-kv", "hybrid-device"), held=4))
    way, plain = found.way("hybrid-device"), found.way("host-hybrid")
    size = found.size(way, 0.5)
    # A quarter of 4 contexts of 18 blocks, in blocks of half the size.
    assert way.act_device_blocks == found.options(way).act_device_blocks == 36
    assert size.act_device == found.options(way).capture_blocks(16) + 36
    assert size.kv_host + size.act_host + 36 == found.batch(way) * 18
    assert size.kv_host + 0.5 * size.act_host <= 4 * 18
    assert found.key(way) != found.key(plain)
    # Four requests project longer than they load: of what does not cross, a layer's load shows.
    four = policies()
    steps = [four.step_s(Way("host-hybrid", 0.5, False, stay), 256) for stay in (0, 24)]
    assert steps[0] - steps[1] == pytest.approx(24 * 16 * 0.5e-6 / 8)


def test_equal_ways_have_equal_keys_and_others_do_not():
    found = policies()
    key = {name: found.key(found.way(name)) for name in (
        "host-kv", "hybrid-0", "share-0", "device", "hybrid-50", "share-50",
    )}  # fmt: skip
    # Another stores both, though it loads no activations.
    assert len(set(key.values())) == 6 - (key["host-kv"] == key["share-0"])
    assert found.key(found.way("share-100")) != found.key(found.way("hybrid-100"))


@pytest.mark.parametrize("name", ["kvpr-best", "hybrid-best", "all"])
def test_a_policy_that_is_not_there(name):
    with pytest.raises(ValueError, match=f"no policy named '{name}'"):
        policies().way(name)


def test_activations_no_smaller_than_kv_are_not_kept():
    size = arena_size(setting("cpu-small"), Group("llama-small", (PrefixCell(1024, 32),)))
    assert size.act_host == 0 and size.kv_host >= 66
