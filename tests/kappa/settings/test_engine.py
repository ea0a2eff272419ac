"""The engine section: host tiers, CPU attention, sparse decoding."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings
from kappa.settings.engine import share_bytes


def engine(**section):
    return load_settings(engine=section).engine


def test_host_planners_take_contexts_beyond_the_device():
    given = {"kind": "torch", "device_blocks": 64, "block_tokens": 32, "host_bytes": 1 << 30}
    for planner in ("host-kv", "host-kvpr", "host-hybrid"):
        made = engine(planner=planner, max_context_tokens=8192, dtype="float32", **given)
        assert made.max_context_tokens == 8192
    beyond = "holds 2016 tokens, less than max_context_tokens = 8192"
    with pytest.raises(SettingsError, match=beyond):
        engine(planner="kv", max_context_tokens=8192, dtype="float32", **given)


def test_a_shared_lmcache_server_with_its_bounds():
    lmcache = {"server": "tcp://cache.example:5555", "timeout_s": 0.2, "retry_s": 1}
    found = engine(host_tier="lmcache", planner="tail", lmcache=lmcache).lmcache
    assert (found.server, found.timeout_s, found.retry_s) == ("tcp://cache.example:5555", 0.2, 1.0)


@pytest.mark.parametrize(
    ("section", "on_a_cpu", "on_a_gpu"),
    [
        ({}, "own", "native"),
        ({"host_tier": "own"}, "own", "own"),
        ({"host_tier": "native"}, "native", "native"),
        ({"host_tier": "lmcache"}, "lmcache", "lmcache"),
        ({"kind": "torch"}, "own", "own"),
        ({"kind": "emulated"}, "own", "own"),
    ],
)
def test_which_host_tier_a_worker_has(section, on_a_cpu, on_a_gpu):
    found = engine(**section)
    assert (found.tier_on(0), found.tier_on(1), found.tier_on(4)) == (on_a_cpu, on_a_gpu, on_a_gpu)


def test_host_tier_defaults_to_64_mib_on_cpus_a_share_on_gpus():
    found = engine()
    assert (found.on(0).host_bytes, found.on(1).host_bytes) == (64 << 20, None)
    assert engine(kind="torch").on(1).host_bytes == 64 << 20
    assert engine(host_bytes=0).on(1).host_bytes == engine(host_bytes=0).on(0).host_bytes == 0
    # 40 % of 1,000 GB: for four workers of a GPU, two of two, one where there is none to share.
    assert [share_bytes(1e12, 4, each) for each in (1, 2, 4, 8)] == [
        10**11,
        2 * 10**11,
        *[4 * 10**11] * 2,
    ]


@pytest.mark.parametrize(
    ("word", "meaning"), [(True, "ask"), (False, "never"), ("ask", "ask"), ("always", "always")]
)
def test_who_may_get_approximate_answers(word, meaning):
    assert engine(kind="torch", approx=word).approx == meaning


TORCH = {"kind": "torch"}
DISK = {"disk_dir": "/data", "disk_bytes": 1 << 30}


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"host_tier": "disk"}, "engine.host_tier"),
        ({"host_tier": "lmcache", **TORCH}, "host_tier lmcache needs kind vllm, and this is torch"),
        ({"host_tier": "lmcache", "host_bytes": 0}, "lmcache needs host_bytes above zero"),
        ({"host_tier": "native", "host_bytes": 0}, "native needs host_bytes above zero"),
        ({"host_tier": "native", **TORCH}, "host_tier native needs kind vllm, and this is torch"),
        ({"lmcache": {"server": "cache:5555"}}, "engine.lmcache.server"),
        ({"lmcache": {"timeout_s": float("inf")}}, "engine.lmcache.timeout_s"),
        ({"lmcache": {"port": 5555}}, "engine.lmcache.port"),
        ({"planner": "kvpr"}, "not one of kind vllm: choose auto, kv, tail"),
        ({"planner": "tail", **TORCH}, "not one of kind torch"),
        ({"planner": "cpu"}, "planner cpu is not one of kind vllm"),
        ({"planner": "cpu", **TORCH}, "planner cpu needs cpu_threads"),
        ({"planner": "host-kv"}, "planner host-kv is not one of kind vllm"),
        ({"planner": "host-auto", "host_bytes": 0, **TORCH}, "host-auto needs host_bytes above"),
        ({"planner": "host-kv", "act_share": 0.5, **TORCH}, "act_share is 0.5 with planner host"),
        ({"planner": "host-kvpr", "act_share": 0.5, **TORCH}, "host-kvpr those of every block"),
        ({"act_device_blocks": 4}, "act_device_blocks needs planner host-hybrid, and this is auto"),
        ({"weights": {"share": 1.2}}, "engine.weights.share"),
        ({"weights": {"share": -0.1}}, "engine.weights.share"),
        ({"weights": {"part": "norms"}}, "'layers', 'attention' or 'mlp'"),
        ({"weights": {"place": "host"}, "kind": "emulated"}, "needs kind torch or vllm"),
        ({"weights": {"place": "host", "part": "mlp"}}, "kind vllm moves whole layers"),
        ({"weights": {"place": "host"}, "extra": {"cpu_offload_gb": 1}}, "the same: drop one"),
        ({"extra": {"cpu_offload_gb": "much"}}, "cpu_offload_gb is 'much': give a number of GiB"),
        ({"weights": {"place": "host"}, "approx": "ask", **TORCH}, "give approx never"),
        ({"planner": "host-weights", **TORCH}, "host-weights needs weights.place host"),
        ({"planner": "host-cpu", **TORCH}, "host-cpu needs weights.place host"),
        ({"planner": "host-cpu", "weights": {"place": "host"}, **TORCH}, "cpu_threads above zero"),
        ({"cpu_threads": 1}, "cpu_threads needs kind torch"),
        ({"cpu_threads": 1, "host_bytes": 0, **TORCH}, "host_bytes above zero"),
        ({"cpu_threads": -1, **TORCH}, "engine.cpu_threads"),
        ({"approx": "ask"}, "approx ask needs kind torch, and this is vllm"),
        ({"approx": "ask", "host_bytes": 0, **TORCH}, "approx ask needs host_bytes above zero"),
        ({"approx": "maybe", **TORCH}, "'never', 'ask' or 'always'"),
        ({"sparse": {"code_bits": 100}}, "give a multiple of 64"),
        ({"sparse": {"retriever": "guess"}}, "engine.sparse.retriever"),
        ({"sparse": {"speed": 1}}, "engine.sparse.speed"),
        ({"disk_bytes": 1 << 30}, "disk_bytes is 1,073,741,824 and disk_dir none: give both"),
        ({"disk_dir": "/data"}, "disk_bytes is 0 and disk_dir /data: give both"),
        ({**DISK, "disk_dir": "data"}, "disk_dir data: give both, the folder as a whole path"),
        ({**DISK, "host_tier": "lmcache", "host_bytes": 1 << 26}, "host_tier auto or own"),
        ({**DISK, "host_tier": "native"}, "host_tier auto or own"),
        ({**DISK, **TORCH}, "disk_bytes needs kind vllm"),
        ({**DISK, "host_bytes": 0}, "and host_bytes 0: the disk holds what host memory holds"),
        (
            {**DISK, "host_bytes": 1 << 30},
            "disk_bytes is 1,073,741,824 and host_bytes 1,073,741,824: the disk holds",
        ),
        ({"load": "layers", "host_tier": "native"}, "load layers needs kind vllm, host_tier auto"),
        ({"load": "layers", "host_bytes": 0}, "host_tier auto or own, and host_bytes"),
        ({"load": "layers", **TORCH}, "load layers needs kind vllm"),
        ({"load": "layers", **DISK}, "disk_bytes 0: a row on disk holds all layers"),
        ({"dtype": "fp8"}, "engine.dtype"),
        ({"dtype": "auto", **TORCH}, "kind torch wants it by its whole name"),
        ({"extra": {"tensor_parallel_size": "two"}}, "tensor_parallel_size is 'two': give a whole"),
        ({"extra": {"pipeline_parallel_size": 0}}, "pipeline_parallel_size is 0: give a whole"),
        ({"extra": {"worker_cls": "mine.Worker"}}, "worker_cls cannot be given: a class of ours"),
        ({"extra": {"kv_transfer_config": {}}}, "kv_transfer_config cannot be given: give engine"),
        ({"extra": {"scheduler_cls": "a", "model": "b"}}, "scheduler.name.*model cannot be given"),
        ({"extra": {"block_size": 16}, "block_tokens": 32}, "block_tokens and extra.block_size"),
        ({"max_context_tokens": 9000}, "holds 8416 tokens, less than max_context_tokens = 9000"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place_and_reason(section, reason):
    with pytest.raises(SettingsError, match=reason) as caught:
        load_settings(engine=section)
    assert "  engine" in str(caught.value)


def test_limits_are_left_to_vllm_on_gpus_and_figures_elsewhere():
    given = engine(max_sequences=8)
    on_gpu, on_cpu = given.on(gpus=2), given.on(gpus=0)
    assert (on_gpu.max_sequences, on_cpu.max_sequences) == (8, 8)
    assert on_gpu.max_context_tokens is on_gpu.dtype is on_gpu.device_blocks is None
    assert (on_cpu.max_context_tokens, on_cpu.device_blocks, on_cpu.dtype) == (8192, 264, "float32")
    assert engine(**TORCH).on(gpus=1).device_blocks == 264, "engines of ours choose nothing"


def test_what_extra_gives_is_given_by_nobody_else():
    on_cpu = engine(extra={"max_model_len": 100_000, "dtype": "bfloat16"}).on(gpus=0)
    assert on_cpu.max_context_tokens is on_cpu.dtype is None
    assert on_cpu.device_blocks == 264


def test_context_bound_applies_only_to_pools_without_gpus():
    pool = {"name": "a", "profile": "pcie"}
    section = {"max_context_tokens": 100_000}
    on_gpu = {**pool, "placement": {"gpus": 1}}
    (one,) = load_settings(engine=section, pools=[on_gpu]).all_pools
    assert one.placement.gpus == 1
    with pytest.raises(SettingsError, match=r"  engine: .*device_blocks \* block_tokens holds"):
        load_settings(engine=section, pools=[on_gpu, {**pool, "name": "b"}])
    with pytest.raises(SettingsError, match=r"  pools.1.engine: .*device_blocks"):
        load_settings(pools=[on_gpu, {**pool, "name": "b", "engine": section}])
