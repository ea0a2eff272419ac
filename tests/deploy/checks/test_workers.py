"""Faults found before a start: one sentence each, with the figures and the remedy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings
from kappa.settings.engine import DtypeName
from kappa.shapes import model_shape
from kappa_deploy.app.machine import THIS, GpuFacts, Machine, read_machine, settings_without_file
from kappa_deploy.app.model import Model, _no_weights
from kappa_deploy.checks.facts import Facts, Worker
from kappa_deploy.checks.machine import CUDA
from kappa_deploy.checks.table import findings
from kappa_deploy.checks.workers import GPU_SHARE, problems
from tests.workers.fake_nvml import FakeNvml

ROOT = Path(__file__).parents[3]
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 80_000_000_000, "580.95.05")
LLAMA_8B = Model("nowhere", model_shape("llama-3.1-8b"), "")
LLAMA_70B = Model("nowhere", model_shape("llama-3.1-70b"), "")


def machine(gpus=1, gpu=H100, **facts):
    offers = {"CPU": 64.0, "GPU": float(gpus)}
    return Machine("m", offers, memory_bytes=10**12, gpus=(gpu,) * gpus, **facts)


def cluster(gpus=1, **engine):
    pool = {"name": "a", "profile": "h100-pcie5", "placement": {"gpus": gpus}}
    return load_settings(None, pools=[pool], engine=engine)


def found(settings, model=None, where=None):
    return problems(Worker(settings, settings.all_pools[0], where or machine(), model))


def all_problems(settings, models, machines):
    """The faults of a start by pool, under "" those between settings."""
    faults = {}
    for one in findings("start", Facts(settings, models, machines=machines)):
        faults.setdefault(one.where, []).append(one.what)
    return faults


def test_a_pool_that_suits_its_machine_has_no_problem():
    assert all_problems(cluster(), [LLAMA_8B], [machine(engine_build="cuda")]) == {}
    assert all_problems(load_settings(), [LLAMA_8B], [machine(gpus=0, engine_build="cpu")]) == {}


def test_check_fits_weights_and_one_sequence_in_the_gpus_share():
    # 70.6e9 parameters of 2 bytes; 80 layers x 8 heads x 128 x 2 x 2 bytes = 327,680 a token.
    (fault,) = found(cluster(max_context_tokens=8192), LLAMA_70B)
    assert "weights of 141.1 GB and KV of one sequence of 8192 tokens, 2.684 GB" in fault
    assert "do not fit NVIDIA H100 80GB HBM3, of whose 80 GB vLLM takes 0.92" in fault
    assert fault.endswith("give placement.gpus 2")
    # On two GPUs each holds half: 71.9 GB of the 73.6.
    assert found(cluster(2, max_context_tokens=8192), LLAMA_70B) == []
    # 0.8 of 80 GB leaves nothing for KV there.
    shared = cluster(2, max_context_tokens=8192, extra={"gpu_memory_utilization": 0.8})
    (fault,) = found(shared, LLAMA_70B)
    assert "vLLM takes 0.8: give placement.gpus 4" in fault


def test_a_context_that_does_not_fit_names_the_longest_that_does():
    # 16.06 GB of weights leave 57.54 of 73.6 GB; a token is 131,072 bytes.
    settings = cluster(max_context_tokens=1_000_000, device_blocks=40_000)
    (fault,) = found(settings, LLAMA_8B)
    tokens = int(fault.rsplit(" ", 1)[1])
    assert tokens == pytest.approx((73.6e9 - LLAMA_8B.shape.params_total * 2) / 131072, abs=1)
    fitting = cluster(max_context_tokens=tokens, device_blocks=40_000)
    assert found(fitting, LLAMA_8B) == []


def test_a_model_in_fp8_takes_half_of_what_bfloat16_takes():
    # 70.6 GB of weights and 1.342 GB of KV are below 73.6.
    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    assert found(cluster(max_context_tokens=8192, extra=fp8), LLAMA_70B) == []
    weights = {"quantization": "fp8"}
    (fault,) = found(cluster(max_context_tokens=16384, extra=weights), LLAMA_70B)
    assert "weights of 70.55 GB and KV of one sequence of 16384 tokens, 5.369 GB" in fault
    # Some of the weights may stay in host memory.
    offloaded = {**weights, "cpu_offload_gb": 4}
    assert found(cluster(max_context_tokens=16384, extra=offloaded), LLAMA_70B) == []


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "fp64"), ("kv_cache_dtype", "int3"), ("quantization", "zip")]
)
def test_a_dtype_that_vllm_does_not_know_is_refused(name, value):
    (fault,) = found(cluster(extra={name: value}), LLAMA_8B)
    assert fault.startswith(f"pool a: engine.extra.{name} is {value!r}, which vLLM does not know")


def test_engine_dtype_is_refused_with_those_that_vllm_knows():
    from vllm.config.model import ModelDType

    assert get_args(DtypeName) == get_args(ModelDType)
    with pytest.raises(SettingsError, match=r"engine\.dtype: Input should be 'auto', 'half'"):
        cluster(dtype="float8")


def test_gpu_of_unknown_memory_is_taken_as_in_the_profile():
    unknown = machine(gpu=GpuFacts("H100"))
    (fault,) = found(cluster(max_context_tokens=8192), LLAMA_70B, unknown)
    assert "a GPU as in profile h100-pcie5, of whose 80 GB" in fault


@pytest.mark.parametrize(
    ("driver", "is_old"),
    [("570.86.10", True), ("580.65.05", True), ("580.65.06", False), ("590.1", False), ("", False)],
)
def test_a_driver_older_than_the_locks_cuda_is_refused(driver, is_old):
    faults = found(cluster(), LLAMA_8B, machine(gpu=replace(H100, driver=driver)))
    assert faults == (
        [
            f"pool a: the driver of m is {driver}, and CUDA 13, which the GPU lock brings, needs "
            "580.65.06 or newer: update NVIDIA's driver"
        ]
        if is_old
        else []
    )


def test_locks_have_the_cuda_that_drivers_are_checked_against():
    locks = [ROOT / f"requirements-gpu{of}.lock" for of in ("", "-aarch64")]
    assert all(f"\ncuda-toolkit=={CUDA}." in lock.read_text() for lock in locks)


def test_vllm_takes_the_share_of_a_gpu_that_we_count_with():
    from vllm.config.cache import CacheConfig

    assert CacheConfig().gpu_memory_utilization == GPU_SHARE


def test_a_tier_larger_than_memory_is_refused_with_both_figures():
    (fault,) = found(cluster(host_bytes=2 * 10**12), LLAMA_8B)
    assert "pool a on m: engine.host_bytes is 1.86e+03 GiB, and the machine has 931 GiB" in fault


def test_a_tier_that_vllm_maps_must_fit_dev_shm():
    settings = cluster(host_bytes=96 << 30)
    assert found(settings, LLAMA_8B, replace(machine(), shm_bytes=96 << 30)) == []
    (fault,) = found(settings, LLAMA_8B, replace(machine(), shm_bytes=16 << 30))
    assert "pool a on m: engine.host_bytes is 96 GiB, and /dev/shm has 16 GiB left" in fault
    on_a_cpu = cluster(gpus=0, host_bytes=96 << 30)
    assert found(on_a_cpu, LLAMA_8B, replace(machine(0), shm_bytes=0)) == []


def test_check_adds_up_host_tiers_when_there_is_one_machine():
    """Each of two fits, both do not: 1,000 GB of memory and 200 GiB of shared memory."""
    pools = [
        {"name": name, "profile": "h100-pcie5", "placement": {"gpus": 1}, "replicas": 2}
        for name in "ab"
    ]
    settings = load_settings(None, pools=pools, engine={"host_bytes": 60 << 30})
    here = replace(machine(4), shm_bytes=200 << 30)
    assert all_problems(settings, [LLAMA_8B], [replace(here, shm_bytes=240 << 30)]) == {}
    (fault,) = all_problems(settings, [LLAMA_8B], [here])[""]
    assert "of 4 workers on a machine are 240 GiB together, and /dev/shm has 200 GiB" in fault
    assert "" not in all_problems(settings, [LLAMA_8B], [here, here]), "Ray may part them"
    tight = replace(here, memory_bytes=200 << 30, shm_bytes=None)
    (fault,) = all_problems(settings, [LLAMA_8B], [tight])[""]
    assert "together, and the machine has 200 GiB left" in fault


def test_check_counts_a_cpu_engines_weights_and_cache_as_memory():
    pools = [{"name": "a", "profile": "pcie"}]
    settings = load_settings(None, pools=pools, engine={"host_bytes": 1 << 30})
    # 16.06 GB of weights, 264 blocks of 32 tokens of 131,072 bytes: 1.107 GB.
    tight = replace(machine(0), memory_bytes=18 * 10**9)
    (fault,) = found(settings, LLAMA_8B, tight)
    assert "engine.host_bytes is 1 GiB, and the machine has 16.8 GiB left, of which the" in fault
    assert "engine itself needs 16 GiB" in fault
    assert found(settings, LLAMA_8B, replace(tight, memory_bytes=19 * 10**9)) == []


@pytest.mark.parametrize(
    ("gpus", "build", "remedy"),
    [(1, "cpu", "KAPPA_EXTRA=gpu ./dev setup"), (0, "cuda", "KAPPA_EXTRA=cpu ./dev setup")],
)
def test_a_vllm_built_for_other_devices_is_refused(gpus, build, remedy):
    settings = cluster(gpus)
    (fault,) = found(settings, LLAMA_8B, machine(engine_build=build))
    assert remedy in fault
    assert found(settings, LLAMA_8B, machine(engine_build="cuda" if gpus else "cpu")) == []


def folder(path, *names, index=None):
    """A model's folder, read as one of Llama's architecture would be."""
    for name in names:
        (path / name).write_text("")
    if index is not None:
        text = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(index)}})
        (path / "model.safetensors.index.json").write_text(text)
    return replace(LLAMA_8B, source=str(path), no_weights=_no_weights(path))


@pytest.mark.parametrize(
    ("names", "index", "lacking"),
    [
        (["config.json"], None, "any file of weights (.bin, .gguf, .pt, .pth, .safetensors)"),
        (
            ["a.safetensors", "b.safetensors"],
            ["a.safetensors", "b.safetensors", "c.safetensors"],
            "1 of the 3 files that model.safetensors.index.json names: c.safetensors",
        ),
    ],
)
def test_a_model_folder_without_its_weights_is_refused(tmp_path, names, index, lacking):
    model = folder(tmp_path, *names, index=index)
    (fault,) = found(cluster(), model)
    assert fault.endswith(f"{tmp_path} lacks {lacking}; copy the model there whole")
    # A loader that makes weights up, or reads others' formats, is left alone.
    assert found(cluster(extra={"load_format": "dummy"}), model) == []


def test_a_model_folder_with_its_weights_is_served(tmp_path):
    assert found(cluster(), folder(tmp_path, "a.safetensors", index=["a.safetensors"])) == []


def test_a_gpu_that_is_not_there_is_refused_with_why():
    none = replace(machine(0), no_gpus="NVML: Driver Not Loaded; is NVIDIA's driver installed?")
    (fault,) = all_problems(cluster(), [LLAMA_8B], [none])["a"]
    assert "m has GPU 0 of 1 (NVML: Driver Not Loaded" in fault


def test_of_several_machines_one_that_suits_is_enough():
    old = machine(gpu=replace(H100, driver="535.1.1"))
    assert list(all_problems(cluster(), [LLAMA_8B], [old, old])) == ["a"]
    assert all_problems(cluster(), [LLAMA_8B], [old, machine()]) == {}
    assert all_problems(cluster(), [LLAMA_8B], []) == {}, "not known yet"


def h100s(count, fault=""):
    """NVML's module on a machine with `count` H100s."""
    nvml = FakeNvml([700.0] * count, [[100.0]] * count, fault)
    nvml.nvmlDeviceGetName = lambda _: "NVIDIA H100 80GB HBM3"
    return nvml


@pytest.mark.parametrize(
    ("visible", "count", "why"),
    [
        (None, 4, ""),
        ("0,3", 2, ""),
        ("GPU-2abcd", 1, ""),
        ("", 0, "CUDA_VISIBLE_DEVICES= hides all 4"),
        ("7", 0, "CUDA_VISIBLE_DEVICES=7 hides all 4"),
    ],
)
def test_this_machine_is_read_by_nvml_and_by_what_is_visible(monkeypatch, visible, count, why):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = h100s(4)
    here = read_machine(cpus=6, nvml=nvml)
    assert here.gpus == (H100,) * count and here.no_gpus == why and not nvml.open
    # As Ray finds them where it starts, its label and resource of the kind included.
    kind = {"accelerator_type:H100": 1.0} if count else {}
    assert here.offers == {"CPU": 6.0, "GPU": float(count), **kind}
    assert here.labels == ({"ray.io/accelerator-type": "H100"} if count else {})
    assert here.engine_build == "cpu" and here.memory_bytes > 0 and here.shm_bytes > 0


def test_a_gpu_without_memory_of_its_own_is_listed():
    nvml = h100s(1)

    def unsupported(_):
        raise nvml.NVMLError("not supported")

    nvml.nvmlDeviceGetMemoryInfo = unsupported
    assert read_machine(nvml=nvml).gpus == (replace(H100, memory_bytes=None),)


def test_a_machine_without_a_driver_has_no_gpu_and_says_why():
    here = read_machine(nvml=h100s(1, fault="Driver Not Loaded"))
    assert here.gpus == () and "no NVML on this machine (Driver Not Loaded)" in here.no_gpus
    assert "NVML knows no GPU" in read_machine(nvml=h100s(0)).no_gpus


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-pcie5"),
        ("NVIDIA A100-SXM4-80GB", "a100-pcie4"),
        ("NVIDIA GH200 480GB", "gh200-c2c"),
        ("NVIDIA H200", "h200-pcie5"),
        ("NVIDIA H100 PCIe", "h100-pcie5"),
        ("NVIDIA GB300", "gb300-c2c"),
        ("NVIDIA L40S", "l40s-pcie4"),
        ("NVIDIA L4", "l4-pcie4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-pcie5"),
        ("NVIDIA A30 PCIe", "h100-pcie5"),
        ("Something New", "h100-pcie5"),
    ],
)
def test_without_a_file_the_cuda_build_serves_one_worker_a_gpu(name, profile):
    where = machine(gpus=3, gpu=GpuFacts(name), engine_build="cuda")
    (pool,) = load_settings(**settings_without_file(where)).all_pools
    assert (pool.least, pool.placement.gpus, pool.paced, pool.profile) == (3, 1, False, profile)
    assert all_problems(load_settings(**settings_without_file(where)), [None], [where]) == {}


def test_default_settings_refuse_the_cuda_build_without_a_gpu():
    bare = replace(machine(gpus=0, engine_build="cuda"), no_gpus="NVML: no driver")
    with pytest.raises(ValueError, match=r"has no GPU \(NVML: no driver\).*KAPPA_EXTRA=cpu"):
        settings_without_file(bare)


def test_default_settings_of_the_cpu_build_serve_a_real_model(tmp_path):
    bare = machine(gpus=0, engine_build="cpu")
    settings = load_settings(**settings_without_file(bare, tmp_path))
    assert settings.model.source == settings.model.id == "smollm2-135m"
    memory, disk = settings.all_pools
    assert (memory.name, disk.name) == ("memory", "disk") and not (memory.paced or disk.paced)
    fast, slow = (pool.engine_settings(settings.engine) for pool in (memory, disk))
    # What one worker has in memory the other has on disk, but for a prompt or two.
    assert fast.disk_bytes == 0 < slow.host_bytes < fast.host_bytes < slow.disk_bytes
    assert slow.disk_dir == str(tmp_path)
    assert (
        fast.model_copy(
            update={name: getattr(slow, name) for name in ("host_bytes", "disk_bytes", "disk_dir")}
        )
        == slow
    )
    assert all_problems(settings, [None], [bare]) == {}


def test_without_room_on_disk_both_host_tiers_are_in_memory():
    settings = load_settings(**settings_without_file(machine(engine_build="cpu")))
    assert [pool.name for pool in settings.all_pools] == ["memory", "memory-2"]
    one, other = (pool.engine_settings(settings.engine) for pool in settings.all_pools)
    assert one == other and not one.disk_bytes


@pytest.mark.ray
def test_check_names_an_unknown_vllm_argument_with_the_nearest():
    (fault,) = found(cluster(extra={"max_num_seq": 8, "gpu_memory_utilization": 0.9}), LLAMA_8B)
    assert "engine.extra.max_num_seq is no argument" in fault
    assert fault.endswith("did you mean max_num_seqs?")


def test_a_disk_tier_needs_a_folder_with_room(monkeypatch):
    settings = cluster(0, disk_dir="/data", disk_bytes=100 * 10**9)

    def faults(free, name=THIS):
        monkeypatch.setattr("kappa_deploy.app.machine._folder_bytes", {"/data": free}.get)
        return found(settings, None, replace(machine(0), name=name))

    assert faults(100 * 10**9) == faults(0, "elsewhere") == []
    (fault,) = faults(60 * 10**9)
    assert "engine.disk_bytes of 100 GB, and engine.disk_dir /data of this machine has 60" in fault
    (fault,) = faults(0)
    assert "has 0 GB that this user may write: lower it, or name another folder" in fault


def test_folder_bytes_are_zero_when_the_folder_is_not_writable(tmp_path):
    folder_bytes = read_machine(nvml=h100s(0)).folder_bytes
    assert folder_bytes(str(tmp_path)) > 0
    assert folder_bytes(str(tmp_path / "nowhere")) == folder_bytes("/proc/self/stat") == 0


def test_models_that_fit_a_machine_one_by_one_are_added_up():
    # 8.03e9 parameters of 2 bytes are 16.06 GB each; the tier is 1 GB, a device cache 8.6 MB.
    other = {"id": "other", "source": "/models/other"}
    pools = [
        {"name": name, "profile": "pcie", "model": model}
        for name, model in (("a", None), ("b", other))
    ]
    engine = {"host_bytes": 10**9, "dtype": "bfloat16"}
    settings = load_settings(None, pools=pools, engine=engine)
    here = Machine("m", {"CPU": 8.0}, memory_bytes=40 * 10**9, shm_bytes=None)
    assert all_problems(settings, [LLAMA_8B, LLAMA_8B], [here]) == {}
    tight = replace(here, memory_bytes=30 * 10**9)
    assert not any(found(part, LLAMA_8B, tight) for part in settings.by_model()), "each has room"
    (fault,) = all_problems(settings, [LLAMA_8B, LLAMA_8B], [tight])[""]
    assert "engine.host_bytes of 2 workers on a machine are 1.86 GiB together, and the" in fault
    assert "27.9 GiB left, of which the engines themselves need 32 GiB" in fault
    assert "serve fewer workers" in fault
    # Of a model that is not on disk nothing is known.
    assert all_problems(settings, [LLAMA_8B, None], [tight]) == {}
