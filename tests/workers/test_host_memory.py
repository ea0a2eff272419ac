"""Host memory before an engine's start: the room left, and refusals in time."""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest

from kappa.host import memory_bytes
from kappa.settings.engine import EngineSettings
from kappa_workers import host_memory
from kappa_workers.host_memory import HostBudget, HostBudgetError, check_host_memory, host_budget
from kappa_workers.vllm.arguments import BY_SHARE, EngineLimits
from tests.workers.plans import EMULATED, worker_plan

pytestmark = pytest.mark.vllm

GIB = 1 << 30
NATIVE, OWN, LMCACHE = (EngineSettings(host_tier=name) for name in ("native", "own", "lmcache"))
SHARED = EngineSettings(host_tier="lmcache", lmcache={"server": "tcp://elsewhere:5555"})


def files(root, **contents):
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


@pytest.fixture
def machine(tmp_path):
    """(cgroups, proc) of a pod with 8 GiB, 2 of them in use, on a machine with 64 left."""
    cgroups, proc = tmp_path / "cgroup", tmp_path / "proc"
    files(proc, meminfo=f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    files(proc, self__cgroup="0::/pod/container\n")
    pod = cgroups / "pod"
    files(pod, **{"memory.max": 8 * GIB, "memory.current": 2 * GIB})
    files(pod / "container", **{"memory.max": "max", "memory.current": GIB})
    return cgroups, proc


def test_the_tightest_cgroup_on_the_way_up_counts(machine):
    budget = host_budget(*machine)
    assert budget.cgroup_bytes == 6 * GIB
    assert budget.machine_bytes == 64 * GIB


def test_a_machine_has_no_more_memory_than_its_cgroups_allow(machine, tmp_path):
    cgroups, proc = machine
    files(proc, meminfo=f"MemTotal: {64 * GIB // 1024} kB\n")
    assert memory_bytes(cgroups, proc) == 8 * GIB
    assert memory_bytes(tmp_path / "none", proc) == 64 * GIB
    assert memory_bytes() > 0, "this machine can be read"


def test_page_cache_that_can_be_dropped_is_free(machine):
    cgroups, proc = machine
    files(cgroups / "pod", **{"memory.stat": f"anon 5\ninactive_file {GIB}\n"})
    assert host_budget(cgroups, proc).cgroup_bytes == 7 * GIB


def test_version_1_of_cgroups_is_read_too(tmp_path):
    cgroups, proc = tmp_path / "cgroup", tmp_path / "proc"
    files(proc, self__cgroup="5:cpu:/x\n4:memory:/docker/abc\n")
    pod = cgroups / "memory" / "docker" / "abc"
    files(pod, **{"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB})
    files(cgroups / "memory", **{"memory.limit_in_bytes": 9223372036854771712})
    assert host_budget(cgroups, proc).cgroup_bytes == 3 * GIB


def test_where_nothing_can_be_read_nothing_is_refused(tmp_path):
    budget = host_budget(tmp_path / "no", tmp_path / "such")
    assert (budget.cgroup_bytes, budget.machine_bytes) == (None, None)
    budget.check(1 << 50)
    assert host_budget().machine_bytes > 0, "this machine can be read"


HEADROOM = 256 << 20


def test_budget_leaves_the_engine_its_headroom_to_the_byte():
    budget = HostBudget(cgroup_bytes=2 * GIB, machine_bytes=4 * GIB)
    budget.check(2 * GIB - HEADROOM)
    with pytest.raises(HostBudgetError, match=r"is 1.75 GiB, and the cgroup .* has 2 GiB left"):
        budget.check(2 * GIB - HEADROOM + 1)
    with pytest.raises(HostBudgetError, match="the machine has 1 GiB left"):
        HostBudget(machine_bytes=GIB).check(GIB)
    HostBudget(cgroup_bytes=0).check(0)


def test_a_tier_that_vllm_maps_is_held_against_dev_shm():
    """Of 16 GiB there, as Docker and Kubernetes leave far less than memory: 96 do not fit."""
    budget = HostBudget(machine_bytes=400 * GIB, shm_bytes=16 * GIB)
    budget.check(16 * GIB, mapped=True)
    budget.check(96 * GIB)
    with pytest.raises(
        HostBudgetError, match=r"96 GiB, and /dev/shm has 16 GiB left: mount.*emptyDir of"
    ):
        budget.check(96 * GIB, mapped=True)


def test_workers_of_one_machine_are_added_up():
    budget = HostBudget(machine_bytes=256 * GIB, shm_bytes=128 * GIB)
    assert budget.faults([60 * GIB, 60 * GIB], 120 * GIB) == []
    assert budget.faults([100 * GIB, 100 * GIB, 0], 100 * GIB) == []
    (memory, shm) = budget.faults([100 * GIB] * 3, 300 * GIB)
    assert "of 3 workers on a machine are 300 GiB together, and the machine has 256 GiB" in memory
    assert "the engines themselves need 0.75 GiB" in memory
    assert "are 300 GiB together, and /dev/shm has 128 GiB left" in shm


def test_what_is_free_in_dev_shm_is_read():
    stats = os.statvfs("/dev/shm")
    assert 0 < host_budget().shm_bytes <= stats.f_blocks * stats.f_frsize


@pytest.mark.parametrize(
    ("left", "changes", "fault"),
    [
        ({"shm_bytes": 1000}, {"gpus": 1, "engine": NATIVE}, "/dev/shm has"),
        ({"shm_bytes": 1000}, {"gpus": 1, "engine": OWN}, ""),
        ({"cgroup_bytes": 100 << 20}, {}, "pod's memory limit"),
        ({"cgroup_bytes": 100 << 20}, {"engine": EMULATED}, ""),  # it keeps nothing
        ({"machine_bytes": 0}, {"engine": LMCACHE}, "the machine has"),
        ({"machine_bytes": 0}, {"engine": SHARED}, ""),
    ],
)
def test_check_refuses_a_tier_that_does_not_fit(plan, monkeypatch, left, changes, fault):
    monkeypatch.setattr(host_memory, "host_budget", lambda: HostBudget(**left))
    refused = pytest.raises(HostBudgetError, match=fault) if fault else nullcontext()
    with refused:
        check_host_memory(replace(plan, **changes))


def test_what_engines_take_besides_counts_where_it_is_known():
    budget = HostBudget(machine_bytes=10 * GIB)
    assert budget.faults([2 * GIB], engines_bytes=8 * GIB) == []
    (fault,) = budget.faults([2 * GIB], engines_bytes=8 * GIB + 1)
    assert "the engine itself needs 8 GiB" in fault
    (fault,) = budget.faults([0], engines_bytes=11 * GIB)
    assert "is 0 GiB, and the machine has 10 GiB left" in fault


def test_a_cgroup_that_uses_more_than_its_limit_has_nothing_left(machine):
    cgroups, proc = machine
    files(cgroups / "pod", **{"memory.current": 9 * GIB})
    assert host_budget(cgroups, proc).cgroup_bytes == 0
    # A limit of a number that means none.
    files(cgroups / "pod", **{"memory.max": 1 << 60})
    assert host_budget(cgroups, proc).cgroup_bytes is None


# -- of a worker ---------------------------------------------------------------------------------


@pytest.fixture
def plan():
    return worker_plan(limits=EngineLimits(2048, 32, 100, 1 << 20, 512, 16, "float32"))


def test_a_worker_without_a_size_takes_its_share_of_the_machine(plan):
    """40 % of 100 GiB on a machine of four GPUs: workers of two GPUs have half each."""
    open_ = replace(plan, gpus=2, limits=replace(plan.limits, host_bytes=BY_SHARE))
    assert open_.sized(100 * GIB, 4.0).limits.host_bytes == 20 * GIB
    assert plan.sized(100 * GIB, 4.0) is plan
