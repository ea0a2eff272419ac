"""What goes together: settings with one another, pools with machines; faults say what to change."""

from pathlib import Path

import pytest
import ray
from structlog.testing import capture_logs

from kappa.settings.cluster import load_settings
from kappa.settings.pools import PoolSettings
from kappa.shapes import model_shape
from kappa_deploy.app.build import build_app
from kappa_deploy.app.cluster import Cluster
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.front_door import front_door_spec
from kappa_deploy.app.machine import GpuFacts, Machine
from kappa_deploy.app.model import Model
from kappa_deploy.app.plan import worker_demand, worker_plan
from kappa_deploy.checks.places import misfits
from kappa_deploy.checks.settings import contradictions

MODEL = Model("nowhere", model_shape("llama-3.1-8b"), "")
GPU = {"gpus": 1, "resources": {"pool-gh200": 1}}
FETCHING = {"router": {"policy": "priced_fetch"}}
STOCK = {"host_tier": "stock"}
STOCK_CLUSTER = {"engine": STOCK, "scheduler": {"name": "stock"}}
DISK = {"disk_dir": "/data", "disk_bytes": 1 << 30}
A_POOL = [{"name": "a"}]
A_GPU_POOL = [{"name": "a", "placement": {"gpus": 1}}]
PACED = [{"name": "a", "paced": True}]
PREFILL = [{"name": "a", "role": "prefill"}, {"name": "b"}]
LMCACHE = {"host_tier": "lmcache"}
LAYERS = {"load": "layers"}
FIFO = {"scheduler": {"link_order": "fifo"}}

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_ray_starts")]


def cluster(*pools, **more):
    return load_settings(None, pools=[{"profile": "gh200-c2c", **pool} for pool in pools], **more)


def test_every_contradiction_is_reported_at_once():
    settings = cluster(
        {"name": "a", "paced": True, "role": "prefill"}, {"name": "b"},
        engine="torch", scheduler={"name": "stock"},
    )  # fmt: skip
    found = contradictions(settings)
    assert len(found) == 3
    with pytest.raises(StartError) as caught:
        build_app(settings, [MODEL], front_door_spec(settings, Path("nowhere")))
    assert str(caught.value).splitlines() == found


def test_keys_in_the_clear_are_warned_of_by_number_not_by_name():
    keys = {"sk-bob-cannot-be-guessed": "bob", f"sha256:{64 * 'a'}": "carol"}
    with capture_logs() as logged:
        settings = cluster({"name": "a"}, tenants={"by_key": keys})
        build_app(settings, [MODEL], front_door_spec(settings, Path("nowhere")))
    (warning,) = [line for line in logged if line["event"] == "keys_in_clear"]
    assert warning["keys"] == 1 and "kappa keys hash" in warning["remedy"]
    assert "bob" not in str(warning)


@pytest.mark.parametrize(
    ("pools", "more", "message"),
    [
        (PACED, {"engine": "torch"}, "cannot be paced, but nodes a are"),
        (A_POOL, {"engine": "emulated"}, "no speed but its pace, and nodes a are"),
        (A_POOL, {"engine": "torch", "scheduler": {"name": "stock"}}, "scheduler.name is stock"),
        ([{**PACED[0], "placement": {"gpus": 1}}], {}, "has its own speed"),
        ([*A_GPU_POOL, {"name": "b"}], {"engine": {"dtype": "bfloat16"}},
         "none could use another's blocks: give engine.block_tokens"),
        (A_GPU_POOL, {"engine": LMCACHE}, "lmcache must know the size of blocks"),
        ([{"name": "a", "placement": {"gpus": 2}}], {"engine": "torch"},
         "engine.kind torch runs on one GPU, and placement.gpus is 2"),
        ([{"name": "a", "placement": {"gpus": 4}}],
         {"engine": {"extra": {"tensor_parallel_size": 2}}},
         "among 2 ranks (tensor_parallel_size 2, pipeline_parallel_size 1)"),
        ([{**PREFILL[0], "engine": {"host_bytes": 0}}, {"name": "b"}], {},
         "pool a's engine.host_bytes is 0: make every pool's role both, or change the pool"),
        (PREFILL, {"transfer": {"connector": "nixl"}}, "pool a has no GPU"),
        (PREFILL, {"engine": LMCACHE},
         "transfer.connector peers has workers read each other's host tiers, which host_tier "
         "auto can, and pool a's host tier is lmcache"),
        (A_GPU_POOL, {"engine": {"host_tier": "own"}}, "own copies between tensors of a CPU"),
        (A_POOL, {"engine": {"host_tier": "native"}}, "native needs a GPU, and placement"),
        (A_GPU_POOL, {"engine": LAYERS}, "placement.gpus is 1, scheduler.name fair"),
        (A_POOL, {"engine": LAYERS, "scheduler": {"name": "stock"}},
         "placement.gpus is 0, scheduler.name stock: say ahead"),
        (A_GPU_POOL, {"scheduler": {"duplex": "half"}}, "scheduler.duplex is half: say full"),
        (A_GPU_POOL, {"engine": STOCK}, "scheduler.name is fair: say stock, too"),
        (PACED, STOCK_CLUSTER, "cannot be paced: say 'paced: false'"),
        (A_POOL, STOCK_CLUSTER, "copies need a GPU, and placement.gpus is 0"),
        ([*A_GPU_POOL, {**A_GPU_POOL[0], "name": "b", "role": "decode"}], STOCK_CLUSTER,
         "hands nothing over, and the pool's role is decode"),
        (PREFILL, {"engine": DISK},
         "read host memory alone, and pool a has engine.disk_bytes: leave it out, or make"),
        (A_GPU_POOL, {"engine": DISK}, "leave disk_bytes and disk_dir out for pools with GPUs"),
        (A_POOL, {"engine": DISK, **FIFO}, "disk_bytes needs scheduler.link_order loads_first"),
        (PACED, {"engine": DISK}, "disk_bytes is a real disk, and the pool is paced"),
        (A_POOL, {**FETCHING, "engine": LMCACHE}, "host tier is lmcache: name policy priced"),
        (PACED, {**FETCHING, "engine": "emulated"}, "engine.kind is em"),
        (A_POOL, {**FETCHING, "engine": {"host_bytes": 0}}, "engine.host_bytes is 0"),
        (A_POOL, {**FETCHING, "engine": DISK}, "pool a has engine.disk_bytes: leave it"),
        (A_POOL, {**FETCHING, **FIFO}, "own manager of host"),
    ],
)  # fmt: skip
def test_contradictions_say_what_to_change(pools, more, message):
    assert any(message in fault for fault in contradictions(cluster(*pools, **more)))


@pytest.mark.parametrize(
    ("pools", "more"),
    [
        (None, {}),
        (A_GPU_POOL, {}),
        (A_GPU_POOL, FETCHING),
        (A_GPU_POOL, FIFO),
        (A_GPU_POOL, {"engine": {"host_tier": "own", "host_bytes": 0}}),
        ([*A_GPU_POOL, {"name": "b"}], {"engine": {"block_tokens": 32, "dtype": "bfloat16"}}),
        (A_POOL, {"scheduler": {"duplex": "half"}}),
        ([{"name": "a", "engine": DISK}, {"name": "b"}], {}),
        ([{**A_GPU_POOL[0], "role": "prefill"}, {**A_GPU_POOL[0], "name": "b"}], {}),
        ([{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode"}], {}),
        ([*A_GPU_POOL, {"name": "b", "model": {"id": "n"}}], {}),
    ],
)  # fmt: skip
def test_a_sound_cluster_has_no_contradiction(pools, more):
    assert contradictions(cluster(*pools, **more) if pools else load_settings()) == []


def test_a_plan_names_the_host_tier_that_a_pools_workers_run():
    settings = cluster(*A_GPU_POOL, {"name": "b"})
    plans = [worker_plan(settings, pool, MODEL, "") for pool in settings.all_pools]
    assert [plan.tier for plan in plans] == ["native", "own"]


def test_cluster_reports_every_known_fault_before_ray_starts():
    settings = cluster(
        {"name": "a", "placement": {"resources": {"pool-a": 1}}},
        {"name": "b", "placement": {"labels": {"zone": "x"}}},
        {"name": "c", "paced": True, "placement": {"gpus": 1}},
    )
    with pytest.raises(StartError) as caught, Cluster(settings):
        pass
    message = str(caught.value)
    assert "pools.0.placement: pool a fits none of 1 machine(s): this machine has pool-a" in message
    assert "pools.1.placement" in message and "label zone=(none), not x" in message
    assert "pools c have GPUs and are paced" in message
    assert not ray.is_initialized()


# -- machines


def pool(name="a", **changes):
    return PoolSettings(name=name, profile="pcie", **changes)


def machine(name="m", labels=None, **offers):
    return Machine(name, offers, labels or {})


LABEL = {"ray.io/node-group": "gh200"}
LABELLED = pool(placement={"labels": LABEL})
TWO = pool(replicas=2)
SMALL, ON_GPU = pool(), pool("b", placement={"gpus": 1})
LARGE, BOUND = pool(placement={"cpus": 6}), pool("b", placement={"gpus": 1, "cpus": 2})
MIXED = [machine("gpu", CPU=2, GPU=1), machine("cpu", CPU=2)]
ROOMY = [machine("gpu", CPU=8, GPU=1), machine("cpu", CPU=8)]


def test_misfits_refuse_a_worker_spread_over_machines_with_why():
    pair = [machine("one", CPU=8, GPU=2), machine("two", CPU=8, GPU=2)]
    fault = misfits([pool(placement={"gpus": 4})], pair)["a"]
    assert "one has GPU 2 of 4" in fault
    assert "All 4 GPUs of a worker are of one machine" in fault
    for wanted in (3, 5):
        told = misfits([pool(placement={"gpus": wanted})], pair)["a"]
        assert ("All" in told) == (wanted == 3), "where they have not enough together, that is all"
    assert misfits([pool(placement={"gpus": 2})], pair) == {}


@pytest.mark.parametrize(
    ("changes", "demand"),
    [
        ({}, {"CPU": 2.0}),
        ({"gpus": 2, "cpus": 3}, {"CPU": 5.0, "GPU": 2.0}),
        (GPU, {"CPU": 2.0, "GPU": 1.0, "pool-gh200": 1.0}),
    ],
)
def test_a_worker_demands_its_replica_and_its_engines(changes, demand):
    assert worker_demand(pool(placement=changes)) == demand


def test_a_machine_is_read_from_what_ray_reports():
    node = {
        "NodeManagerHostname": "h", "Resources": {"CPU": 4.0, "GPU": 1.0}, "Labels": LABEL,
        "Alive": True,
    }  # fmt: skip
    assert Machine.of_ray(node) == Machine("h", node["Resources"], LABEL, gpus=(GpuFacts("GPU"),))


@pytest.mark.parametrize(
    ("pools", "machines"),
    [
        ([TWO], [machine(CPU=4)]),
        ([TWO], [machine("a", CPU=2), machine("b", CPU=3)]),
        ([LABELLED], [machine(labels=LABEL, CPU=8)]),
        # The most demanding pool is placed first, and before it one that few machines suit.
        ([SMALL, ON_GPU], MIXED),
        ([ON_GPU, SMALL], MIXED),
        ([LARGE, BOUND], ROOMY),
        ([BOUND, LARGE], ROOMY),
        # Fractions of a CPU add up as Ray counts them.
        ([pool(replicas=5, placement={"cpus": 0.2})], [machine(CPU=6)]),
        # The demo on the cluster that is started for it.
        (load_settings().all_pools, [machine(CPU=2 * len(load_settings().all_pools) + 2)]),
    ],
)
def test_what_fits_is_not_mentioned(pools, machines):
    assert misfits(pools, machines) == {}


@pytest.mark.parametrize(
    ("pools", "machines", "fault"),
    [
        # With its place in the settings, and the nearest machines first.
        ([pool(), pool("b", placement=GPU)], [machine("cpu", CPU=8), machine("gpu", CPU=8, GPU=1)],
         "pools.1.placement: pool b fits none of 2 machine(s): gpu has pool-gh200 0 of 1; "
         "cpu has GPU 0 of 1, pool-gh200 0 of 1"),
        ([LABELLED], [machine(labels={"ray.io/node-group": "h100"}, CPU=8)],
         "label ray.io/node-group=h100, not gh200"),
        ([pool()], [], "fits none of 0 machine(s): there is none"),
        ([pool(replicas=3)], [machine(CPU=4)], "pool a: room for 2 of 3 workers"),
        ([pool(replicas=6, placement={"cpus": 0.2})], [machine(CPU=6)], "room for 5 of 6"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reported_with_what_is_missing(pools, machines, fault):
    (found,) = misfits(pools, machines).values()
    assert fault in found


def test_every_pool_at_fault_is_reported_at_once():
    pools = [pool(placement={"cpus": 64}), pool("b", placement=GPU), pool("c", replicas=9)]
    assert len(misfits(pools, [machine(CPU=4)])) == 3


def test_adapters_need_an_engine_and_a_tier_that_keep_them_apart():
    model = {"id": "m", "adapters": {"f": "/a"}}
    (found,) = contradictions(cluster(*A_GPU_POOL, model=model, engine="torch"))
    assert "model m has adapters, which engine.kind torch does not serve: say vllm" in found
    (found,) = contradictions(cluster({"name": "a", "engine": LMCACHE}, model=model))
    assert "LMCache's keys do not know" in found and "pool a" in found
    other = {"name": "b", "model": {"id": "n"}, "engine": LMCACHE}
    assert contradictions(cluster({"name": "a"}, other, model=model)) == []
