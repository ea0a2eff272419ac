"""The names of vLLM that our plug-ins use exist in the installed version, and in the newest one."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from kappa_workers.vllm.versions.installed import installed_version, series
from tests.workers.vllm.vllm_names import ALSO, class_names, index, our_files, our_imports, parsed

pytestmark = pytest.mark.vllm

NEWEST = "0.33.0"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_OFFLOADING, _EVENTS = (m for m in ALSO if "offloading" in m)
_MANAGER = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"

# Attributes and methods of vLLM's classes that the module of a version names.
PRIVATE = {
    "v0_29": {
        _SCHEDULER: "waiting skipped_waiting max_num_running_reqs grammar_compile_error_reqs "
        "_is_blocked_waiting_status _try_promote_blocked_waiting_request",
        _MANAGER: "_policy _num_blocks _num_allocated_blocks _free_list "
        "_num_evictable_cache_blocks",
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec": "num_blocks",
        f"{_OFFLOADING}:OffloadingConnectorScheduler": "_touch",
    },
    "v0_31": {
        _SCHEDULER: "waiting kv_holding_waiting deferred_waiting max_num_active_reqs "
        "grammar_compile_error_reqs _is_blocked_waiting_status _handle_blocked_waiting_request "
        "_enqueue_waiting_request",
        _MANAGER: "_policy _num_chunks _num_allocated_chunks _free_list "
        "_num_evictable_cache_chunks touch",
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec": "num_chunks",
        f"{_OFFLOADING}:RequestOffloadState": "group_states req_context",
    },
}
# The same of all versions.
SHARED = {
    _SCHEDULER: "running requests block_size connector kv_cache_manager schedule "
    "max_num_scheduled_tokens num_waiting_for_streaming_input _inflight_prefills _free_request "
    "_preempt_request _request_remaining_blocks _inflight_prefill_reserved_blocks shutdown "
    "update_from_output add_request pause_state _handle_invalid_blocks",
    f"{_OFFLOADING}:OffloadingConnectorScheduler": "manager _req_status _jobs "
    "_events_tracker _current_batch_load_jobs",
    f"{_OFFLOADING}:RequestOffloadState": (
        "partial_tail_boundary update_num_hit_chunks update_offload_keys group_states req "
        "max_offload_tokens num_locally_computed_tokens"
    ),
    f"{_EVENTS}:OffloadingEventsTracker": "_pending_event_metadata record_store",
    _MANAGER: "prepare_store complete_store reset_cache _get_load_store_spec touch",
    "vllm.v1.kv_offload.cpu.policies.base:CachePolicy": "get insert mark_evictable",
    "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec": "kv_bytes_per_chunk",
}


@pytest.fixture(scope="module", params=["installed", NEWEST])
def version(request):
    """(a version, what its sources name)."""
    if request.param == NEWEST:
        path = Path(__file__).with_name(f"vllm-{NEWEST}.json")
        return NEWEST, json.loads(path.read_text(encoding="utf-8"))
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    return installed_version(), index(Path(found.origin).parents[1], installed_version())


def members(names, cls):
    """Attributes and methods of a class and of those that it inherits from, as far as indexed."""
    found = set()
    for module in names.values():
        if cls in module["classes"]:
            entry = module["classes"][cls]
            found |= {*entry["attributes"], *entry["methods"]}
            found = found.union(*(members(names, base) for base in entry["bases"]))
    return found


def test_every_import_names_what_the_module_has(version):
    number, names = version
    missing = [
        f"{path}: {module} has no {name}"
        for path, module, name in our_imports(number)
        if names.get(module) is None or name not in names[module]["names"]
    ]
    assert not missing, "new imports? write the names of the newest release again: vllm_names.py"


@pytest.mark.parametrize("which", ["shared", "of the version"])
def test_private_names_exist_in_the_classes_that_have_them(version, which):
    number, names = version
    table = SHARED if which == "shared" else PRIVATE[series(number)]
    for path, wanted in table.items():
        module, cls = path.split(":")
        assert cls in names[module]["classes"], path
        assert set(wanted.split()) - members(names, cls) == set(), path


def test_methods_that_we_override_take_what_vllm_passes(version):
    number, names = version
    theirs = {}
    for module in names.values():
        for cls, entry in module["classes"].items():
            theirs.setdefault(cls, {}).update(entry["methods"])
    ours = {
        cls.name: class_names(cls)
        for path in our_files(number)
        for cls in parsed(path).body
        if cls.__class__.__name__ == "ClassDef"
    }

    def bases_of(name):
        for base in ours[name]["bases"] if name in ours else ():
            yield base
            yield from bases_of(base)

    # What we take as *args and **options is not listed among parameters.
    free = {"__init__", "_preempt_request", "generate"}
    checked = 0
    for name, entry in ours.items():
        for base in [base for base in bases_of(name) if base in theirs]:
            for method in (entry["methods"].keys() & theirs[base].keys()) - free:
                passed, taken = theirs[base][method], entry["methods"][method]
                assert taken[: len(passed)] == passed, f"{name}.{method} overrides {base}'s"
                checked += 1
    assert checked >= 20


@pytest.mark.parametrize(
    ("number", "module"),
    [("0.29.0", "v0_29"), ("0.31.1", "v0_31"), ("0.32.0+cpu", "v0_31"), ("0.33.0", "v0_31")],
)
def test_each_known_version_has_its_module(number, module):
    assert series(number) == module


@pytest.mark.parametrize("number", ["0.28.1", "0.30.0", "0.34.0", "1.0", ""])
def test_series_refuses_an_unknown_vllm_version_with_the_remedy(number):
    with pytest.raises(ImportError, match=r"know 0\.29, 0\.31.*scheduler\.name: stock"):
        series(number)
