"""`kappa serve --dry-run`: what vLLM, Ray and the machine would be asked for, and the faults."""

import json
import re
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner

from kappa.settings.cluster import load_settings
from kappa_deploy.app.dry_run import dry_run
from kappa_deploy.app.machine import described
from kappa_deploy.cli import app

ROOT = Path(__file__).parents[2]
H100 = "gpu=1xH100-80GB,memory=512GB,shm=256GB,driver=580.95.05"
FOUR = H100.replace("1x", "4x")
LLAMA = {"id": "llama", "source": "/models/llama-3.1-8b-instruct"}
LLAMA_70B = {"id": "llama", "source": "meta-llama/Llama-3.1-70B-Instruct"}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
]


def tried(settings, *machines):
    found = dry_run(settings, [described(text) for text in machines])
    assert not ray.is_initialized()
    return json.loads(json.dumps(found, allow_nan=False))


def cluster(gpus=1, model=LLAMA, **more):
    pool = {"name": "a", "profile": "h100-pcie5", "placement": {"gpus": gpus}}
    return load_settings(None, model=model, pools=[pool], **more)


def command(*options):
    return CliRunner().invoke(app, ["serve", "--dry-run", *options])


def readme_files():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if "pools:" in block]


# -- files as people write them


def test_the_readmes_file_for_a_gpu_machine_would_start_there(tmp_path):
    alone, _ = readme_files()
    file = tmp_path / "gpu.yaml"
    file.write_text(alone)
    done = command("--config", str(file), "--machine", H100, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    (pool,) = found["pools"]
    assert (pool["device"], pool["problems"], found["problems"]) == ("cuda", [], [])
    assert pool["ray"]["bundles"] == [{"CPU": 1, "GPU": 1}]
    assert pool["engine_args"]["worker_cls"].endswith(".MeteredGPUWorker")
    assert pool["engine_args"]["distributed_executor_backend"] == "ray"
    assert not any(name.startswith("VLLM_CPU") for name in pool["environment"])
    # On a machine without one the same file is refused.
    done = command("--config", str(file), "--machine", "gpu=0,memory=512GB", "--json")
    assert done.exit_code == 1
    (fault,) = json.loads(done.stdout)["pools"][0]["problems"]
    assert "has GPU 0 of 1" in fault


def test_readmes_file_for_unlike_machines_starts_on_them(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"sha256:{64 * 'a'}: research\n")
    _, unlike = readme_files()
    data = yaml.safe_load(unlike.replace("/etc/kappa/keys.yaml", str(keys)))
    settings = load_settings(None, **data)
    gh200, a100 = (f"gpu=1x{of},memory=480GB,shm=300GB" for of in ("GH200-96GB", "A100-80GB"))
    found = tried(settings, gh200, gh200, a100, a100)
    assert [(pool["name"], pool["problems"]) for pool in found["pools"]] == [
        ("gh200", []), ("a100", []),
    ]  # fmt: skip
    # Each goes to its own kind of machine.
    less = tried(settings, gh200, a100, a100)
    assert "room for 1 of 2 workers" in less["pools"][0]["problems"][0]
    assert less["pools"][1]["problems"] == []


def test_a_model_on_four_gpus_is_one_worker_with_four_bundles():
    settings = cluster(4, LLAMA_70B)
    (pool,) = tried(settings, FOUR)["pools"]
    assert pool["problems"] == [] and pool["engine_args"]["tensor_parallel_size"] == 4
    assert pool["ray"]["bundles"] == [{"CPU": 1, "GPU": 1}] * 4
    assert pool["ray"]["worker"] == {"CPU": 5.0, "GPU": 4.0}
    (pool,) = tried(settings, H100.replace("1x", "2x"))["pools"]
    assert "has GPU 2 of 4" in pool["problems"][0]


@pytest.mark.parametrize(
    ("gpus", "engine", "spec", "host_bytes"),
    [
        # 40 % of 512 GB, divided among the four workers that four GPUs are enough for, or two.
        (1, {}, "NativeTierSpec", 51_200_000_000),
        (2, {}, "NativeTierSpec", 102_400_000_000),
        (1, {"host_bytes": 1 << 30}, "NativeTierSpec", 1 << 30),
        (0, {}, "HostTierSpec", 64 << 20),
    ],
)
def test_dry_run_sizes_the_host_tier_by_device_and_machine(gpus, engine, spec, host_bytes):
    (pool,) = tried(cluster(gpus, LLAMA_70B, engine=engine), FOUR)["pools"]
    extra = pool["engine_args"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == (spec, host_bytes)
    assert pool["host_tier"] == ("native" if gpus else "own")


@pytest.mark.parametrize("load", ["ahead", "layers"])
def test_how_prefixes_are_loaded_reaches_the_host_tier(load):
    (pool,) = tried(cluster(0, LLAMA_70B, engine={"load": load}), FOUR)["pools"]
    extra = pool["engine_args"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["kappa_link"]["by_layer"] == (load == "layers")


def test_weights_in_host_memory_reach_vllm_and_are_priced():
    engine = {"weights": {"place": "host", "share": 0.5}}
    (pool,) = tried(cluster(2, LLAMA_70B, engine=engine), FOUR)["pools"]
    half = pool["host_weights"]["bytes"]
    assert half == pytest.approx(69.5e9, rel=0.001) and pool["problems"] == []
    # Of each GPU, in GiB.
    assert pool["engine_args"]["cpu_offload_gb"] == pytest.approx(half / 2 / 2**30)
    assert pool["host_weights"]["least_step_s"] >= half / (2 * 54e9)
    given = {"extra": {"cpu_offload_gb": 10}}
    (pool,) = tried(cluster(2, LLAMA_70B, engine=given), FOUR)["pools"]
    assert pool["host_weights"]["bytes"] == 20 * 2**30
    assert pool["engine_args"]["cpu_offload_gb"] == 10
    (pool,) = tried(cluster(2, LLAMA_70B), FOUR)["pools"]
    assert pool["host_weights"] == {} and "cpu_offload_gb" not in pool["engine_args"]


def test_weights_beyond_host_memory_are_refused_with_both_sizes():
    engine = {"weights": {"place": "host", "share": 0.9}, "host_bytes": 1 << 30}
    small = "gpu=2xH100-80GB,memory=64GB,shm=32GB,driver=580.95.05"
    (pool,) = tried(cluster(2, LLAMA_70B, engine=engine), small)["pools"]
    (why,) = pool["problems"]
    assert "59.6 GiB left, of which the engine itself needs 117 GiB" in why


def test_weights_in_host_memory_of_vllm_on_a_cpu_are_refused():
    (pool,) = tried(cluster(0, LLAMA_70B, engine={"weights": {"place": "host"}}), FOUR)["pools"]
    (why,) = pool["problems"]
    assert "GB of weights in host memory" in why and "need placement.gpus, or paced" in why


def test_paced_pair_says_how_long_a_step_lasts_at_least(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("engine: {weights: {place: host}}")
    done = command("--config", str(file))
    assert done.exit_code == 0, done.stderr
    assert "weights lie in host memory and cross at every step" in " ".join(done.stdout.split())


def test_fp8_reaches_vllm_as_it_is_given():
    extra = {"quantization": "fp8", "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.9}
    (pool,) = tried(cluster(engine={"extra": extra}), H100)["pools"]
    assert pool["problems"] == [] and extra.items() <= pool["engine_args"].items()


def test_the_paced_pair_would_start_here():
    done = command("--json", "--paced")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [pool["name"] for pool in found["pools"]] == ["pcie", "c2c"]
    assert {pool["device"] for pool in found["pools"]} == {"cpu"} and found["notes"] == []
    assert found["machines"][0]["engine_build"] == "cpu"


def test_dry_run_shows_the_table_that_a_pool_lasts_by(tmp_path):
    file, table = tmp_path / "c.yaml", "h100_sxm/llama-3.1-8b/tp1"
    file.write_text(f"nodes: [{{name: a, profile: h100-pcie5, silicon: {table}}}]")
    done = command("--config", str(file))
    assert done.exit_code == 0 and f"cpu, by {table}" in done.stdout
    found = json.loads(command("--config", str(file), "--json").stdout)
    (pool,) = found["pools"]
    assert pool["silicon"] == table
    assert pool["engine_args"]["additional_config"]["kappa_pace"]["node"]["silicon"] == table


# -- faults, and facts that are not known


def test_dry_run_sizes_the_host_tier_if_the_memory_is_given():
    (pool,) = tried(cluster(), H100)["pools"]
    sized = pool["engine_args"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert pool["host_tier"] == "native" and 0 < sized["cpu_bytes_to_use"] < 512 * 10**9
    found = tried(cluster(), "gpu=1xH100-80GB")
    assert found["pools"][0]["host_tier"] == "native" and found["pools"][0]["problems"] == []
    assert any("memory of gpu=1xH100-80GB is not given" in note for note in found["notes"])


def test_a_token_of_the_hub_is_not_shown():
    (pool,) = tried(cluster(engine={"extra": {"hf_token": "hf_abc"}}), H100)["pools"]
    assert pool["engine_args"]["hf_token"] == "(hidden)"


def test_a_model_of_the_hub_that_is_not_on_disk_is_not_fetched():
    found = tried(cluster(model=LLAMA_70B), H100)
    assert "is not on disk: a start fetches it" in found["notes"][0]
    assert "built-in shape llama-3.1-70b" in found["notes"][1]
    assert "placement.gpus 4" in found["pools"][0]["problems"][0]
    unknown = tried(cluster(model={"id": "m", "source": "nobody/nothing"}), H100)
    assert "nothing that depends on the model's shape is checked" in unknown["notes"]
    assert unknown["pools"][0]["engine_args"] == {} and unknown["pools"][0]["problems"] == []


def test_a_folder_that_is_not_here_is_a_problem_here_alone(tmp_path):
    settings = cluster(model={"id": "m", "source": str(tmp_path / "none")})
    fault, *_ = dry_run(settings)["problems"]
    assert "none' is not there: give the model's folder on this machine" in fault
    assert tried(settings, H100)["problems"] == []


def test_people_get_a_table_the_arguments_and_what_is_wrong(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(cluster(2).model_dump(mode="json", exclude_defaults=True)))
    done = command("--config", str(file), "--machine", H100)
    assert done.exit_code == 1
    assert "3 CPU, 2 GPU" in done.stdout and "  tensor_parallel_size: 2" in done.stdout
    assert "1 fault(s)" in done.stdout and "has GPU 1 of 2" in done.stderr


# -- machines


def test_a_machine_described_is_the_same_as_its_facts_in_a_file(tmp_path):
    (facts,) = tried(cluster(), FOUR)["machines"]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(facts))
    assert described(str(file)) == described(FOUR)
    assert (facts["memory_bytes"], facts["gpus"][3]["memory_bytes"]) == (512 * 10**9, 80 * 10**9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "gpu=4x"], "write gpu=4xH100-80GB"),
        (["--machine", "gpus=4"], "'gpus=4' is no fact of a machine"),
        (["--machine", "memory=512"], "'512' is no size"),
        (["--machine", "none.json"], "cannot read the machine"),
        (["--address", "auto"], "needs no --address"),
    ],
)
def test_what_describes_no_machine_ends_the_command(options, message):
    done = command(*options)
    assert done.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", done.stderr)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"name": "m", "offers": {}, "memory": 1}, r"unknown keys \['memory'\]"),
        ({"name": "m", "offers": {}, "memory_bytes": "1"}, "Expected `int | null`, got `str`"),
        ({"name": "m"}, "missing required field `offers`"),
    ],
)
def test_a_file_of_facts_with_a_fault_names_it(tmp_path, facts, message):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=message):
        described(str(file))
