"""An engine on a CPU: one process, and nothing compiled while somebody waits."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from deploy.app.plan import pool_config
from kappa.settings.cluster import load_settings
from workers.replica import OneProcessEngine
from workers.vllm.arguments import CPU_ENV

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
def test_an_engine_of_one_rank_runs_in_the_process_that_schedules(monkeypatch, ranks, backend):
    started = []
    monkeypatch.setattr(
        VLLMEngine, "_start_async_llm_engine", lambda _, *given: started.append(given) or "client"
    )
    parallel = SimpleNamespace(world_size=ranks, distributed_executor_backend="mp")
    config = SimpleNamespace(parallel_config=parallel)
    engine = OneProcessEngine.__new__(OneProcessEngine)
    assert engine._start_async_llm_engine("args", config, "group") == "client"
    assert started == [("args", config, "group")]
    assert parallel.distributed_executor_backend == backend


def test_vllm_samples_on_a_cpu_without_compiling():
    done = subprocess.run(
        [sys.executable, "-c", _SAMPLERS], env={**os.environ, **CPU_ENV}, check=True,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "{}"


@pytest.mark.parametrize(("extra", "is_off"), [({}, True), ({"enforce_eager": False}, False)])
def test_compiling_is_off_unless_the_settings_ask_for_it(extra, is_off):
    settings = load_settings(engine={"extra": extra})
    config = pool_config(settings, settings.all_pools[0], "/model")
    assert ("TORCH_COMPILE_DISABLE" in config.runtime_env["env_vars"]) is is_off
