"""What a replica of a plain Ray Serve LLM app tells of itself, and that it serves whatever fails.

The replica is real but for Ray and its engine, which says and measures what a test has it say.
"""

import math
from types import SimpleNamespace

import pytest
import structlog.testing

from kappa.hardware import node_profile
from kappa.protocol import Announcement
from kappa_router.standalone import StandaloneRouter
from kappa_workers import announcing
from kappa_workers.announcing import Announcing

pytestmark = pytest.mark.vllm

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
EXTENSION = "kappa_workers.vllm.measured_worker.MeasuredWorker"
FACTS = {
    "max_context_tokens": 4096, "block_tokens": 16, "device_blocks": 1000, "dtype": "float32",
    "max_batch_tokens": 2048, "max_sequences": 8, "kv_dtype": "", "kv_token_bytes": 1024.0,
    "weight_bytes": 0, "graphs": "NONE",
}  # fmt: skip
RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "hbm_bytes_per_s", "flops_per_s")


class Config:
    """As much of an `LLMConfig` as is read."""

    model_id = "plain"

    def __init__(self, **engine_kwargs):
        self.engine_kwargs = engine_kwargs

    def update_engine_kwargs(self, **more):
        self.engine_kwargs.update(more)


class Server:
    """What stands in for Ray's `LLMServer`, with an engine of these requests and rates."""

    rates = 9e9

    async def __init__(self, llm_config, *, requests=3):
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: CONFIG), model="/m"
            ),
            parallel_config=SimpleNamespace(world_size=1),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        processor = SimpleNamespace(get_num_unfinished_requests=lambda: requests)
        self.engine = SimpleNamespace(
            _engine_client=SimpleNamespace(vllm_config=vllm_config, output_processor=processor)
        )

    async def collective_rpc(self, method, args=()):
        if self.rates is None:
            raise RuntimeError(f"no method {method}")
        if method == "kappa_engine":
            return [FACTS]
        return [{"device": "cpu", "peaks": {}, "gemm": [], **dict.fromkeys(RATES, self.rates)}]

    async def record_routing_stats(self):
        return {"theirs": 1}


class Replica(Announcing, Server):
    """A replica on a machine that is measured."""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """The replica's place in Serve, and a home of its own."""
    context = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="w"), rank=SimpleNamespace(rank=1)
    )
    monkeypatch.setattr(announcing.serve, "get_replica_context", lambda: context)
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path))
    monkeypatch.setattr(announcing, "time", SimpleNamespace(time=lambda: 1000.0))


async def started(kind=Replica, **engine_kwargs):
    replica, config = object.__new__(kind), Config(**engine_kwargs)
    await replica.__init__(config)
    return replica, config


async def test_a_replica_announces_what_is_measured_and_its_load():
    replica, config = await started(dtype="float32")
    assert config.engine_kwargs == {"dtype": "float32", "worker_extension_cls": EXTENSION}
    found = await replica.record_routing_stats()
    assert found.pop("theirs") == 1 and set(found) == {"kappa", "kappa_load"}
    said = Announcement.from_dict(found["kappa"])
    assert (said.worker, said.model, said.node.source) == ("w", "plain", "measured")
    assert (said.node.flops_per_s, said.kv_bytes_per_token) == (9e9, 1024.0)
    assert (said.device_blocks, said.block_tokens, said.max_sequences) == (1000, 16, 8)
    assert said.measured == {}, "rows that no router reads would travel with every count"
    assert found["kappa_load"] == {"time_s": 1000.0, "running": 3}


async def test_the_router_reads_what_a_replica_announces():
    replica, _ = await started()
    alone = StandaloneRouter()
    assert alone.replicas({"w": await replica.record_routing_stats(), "x": {}}) == []
    workers = alone._router.workers
    assert workers["w"].announcement.node.source == "measured"
    assert workers["x"].announcement.node.name == "h100-pcie5"
    assert [len(workers[name].flights) for name in "wx"] == [3, 0]


async def test_a_replica_that_cannot_be_measured_serves_and_counts():
    class Unmeasured(Replica):
        rates = None

    with structlog.testing.capture_logs() as logged:
        replica, _ = await started(Unmeasured)
    found = await replica.record_routing_stats()
    assert found["kappa"] == {} and found["kappa_load"]["running"] == 3
    (said,) = [entry for entry in logged if entry["event"] == "node_not_announced"]
    assert "kappa_engine" in said["error"] and "kappa_node" in said["remedy"]
    assert StandaloneRouter().replicas({"w": found}) == []


async def test_an_engine_without_vllms_client_has_no_load():
    replica, _ = await started()
    replica.engine = None
    assert (await replica.record_routing_stats())["kappa_load"] == {}


async def test_a_node_that_is_given_is_announced_unmeasured():
    class Given(Replica):
        rates = None

        def kappa_node(self):
            return node_profile("gh200-c2c" if self._rank else "h100-pcie5")

    replica, config = await started(Given)
    assert config.engine_kwargs == {}
    said = Announcement.from_dict((await replica.record_routing_stats())["kappa"])
    # Two layers of keys and values of 64 numbers each, in four bytes.
    assert said.kv_bytes_per_token == 2 * 2 * 64 * 4
    # Copies of a layer's block, of 16 tokens unless the engine says, reach little of the link.
    given = node_profile("gh200-c2c")
    copy_s = math.hypot(8192 / given.h2d_bytes_per_s, given.copy_fixed_s)
    assert said.node.h2d_bytes_per_s == pytest.approx(8192 / copy_s)
    link = {"h2d_bytes_per_s", "d2h_bytes_per_s", "copy_fixed_s"}
    assert {k for k, v in given.to_dict().items() if v != said.node.to_dict()[k]} == link


async def test_an_extension_that_the_user_gave_stays():
    _, config = await started(worker_extension_cls="mine")
    assert config.engine_kwargs == {"worker_extension_cls": "mine"}
