"""An engine on a CPU: one process, and nothing compiled while somebody waits."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from kappa.settings.cluster import load_settings
from kappa_deploy.app.plan import pool_config
from kappa_workers.paced import one_process
from kappa_workers.paced.one_process import OneProcessEngine
from kappa_workers.vllm.arguments import CPU_ENV

_SAMPLERS = """
import torch
from torch._dynamo.utils import counters
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample
assert int(compiled_random_sample(torch.tensor([[0.0, 1e9]]))) == 1
assert batched_count_greater_than(torch.ones(2, 9), torch.zeros(2, 1)).tolist() == [9, 9]
print(dict(counters))
"""


@pytest.mark.parametrize(("ranks", "backend"), [(1, "uni"), (2, "mp")])
def test_engine_of_one_rank_runs_in_the_process_that_schedules(monkeypatch, ranks, backend):
    started = []
    monkeypatch.setattr(
        VLLMEngine, "_start_async_llm_engine", lambda _, *given: started.append(given) or "client"
    )
    monkeypatch.setattr(one_process.utils, "get_mp_context", before := object())
    parallel = SimpleNamespace(world_size=ranks, distributed_executor_backend="mp")
    config = SimpleNamespace(parallel_config=parallel)
    engine = OneProcessEngine.__new__(OneProcessEngine)
    assert engine._start_async_llm_engine("args", config, "group") == "client"
    assert started == [("args", config, "group")]
    assert parallel.distributed_executor_backend == backend
    is_forked = one_process.utils.get_mp_context is not before
    assert is_forked is (ranks == 1)


_FORK = """
import gc, os, socket, stat, sys, time
from vllm.v1.engine.core import EngineCoreProc
from kappa_workers.paced import one_process
from kappa_workers.reaper import own_engines
from kappa_workers.paced.one_process import _Forking
one_process._LOADED_WITHIN_S = 6.0
here, there = socket.socketpair()
own_engines()
one_process.setproctitle("ray::replica")

def engine(loads):
    assert "vllm" in sys.modules, "not forked"
    assert gc.get_freeze_count() > 10_000, "the collector would mark shared pages"
    try:
        is_open = stat.S_ISSOCK(os.fstat(here.fileno()).st_mode)  # its number may be taken again
    except OSError:
        is_open = False
    print("open" if is_open else "closed", flush=True)
    if "VLLM::engine" in open("/proc/self/cmdline").read():
        print("named", flush=True)
    if loads:
        EngineCoreProc.run_busy_loop(None)
    time.sleep(8 if loads else 600)
    print("lasted", flush=True)

EngineCoreProc.run_busy_loop = lambda core: print("serves", flush=True)
fork = _Forking().Process
print(flush=True)  # what stands in the buffer would stand in front of the children's words, too
children = [fork(target=engine, name="engine", args=(loads,)) for loads in (True, False)]
for child in children:
    child.start()
for child in children:
    child.join()
here.send(b"x")
assert there.recv(1) == b"x", "the parent's own are open"
print([child.exitcode for child in children])
"""


def test_fork_closes_its_sockets_and_ends_when_loading_is_slow():
    done = subprocess.run(
        [sys.executable, "-c", _FORK], env={**os.environ, **CPU_ENV}, check=True,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    *words, codes = done.stdout.splitlines()
    assert sorted(w for w in words if w in ("closed", "open", "serves", "lasted", "named")) == [
        "closed", "closed", "lasted", "named", "named", "serves",
    ], done.stdout  # fmt: skip
    assert codes == "[0, 1]" and "Timeout" in done.stderr


def test_vllm_samples_on_a_cpu_without_compiling():
    done = subprocess.run(
        [sys.executable, "-c", _SAMPLERS], env={**os.environ, **CPU_ENV}, check=True,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "{}"


@pytest.mark.parametrize(("extra", "is_off"), [({}, True), ({"enforce_eager": False}, False)])
def test_compiling_is_off_unless_the_settings_ask_for_it(extra, is_off):
    settings = load_settings(engine={"extra": extra})
    config = pool_config(settings, settings.all_pools[0], None)
    assert ("TORCH_COMPILE_DISABLE" in config["runtime_env"]["env_vars"]) is is_off
