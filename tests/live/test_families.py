"""Models whose attention or layers are unlike Llama's, in a real engine and in a cluster.

Tiny ones with random weights: a mixture of experts (Qwen3), and latent attention over experts
(DeepSeek-V2, of the head size that vLLM's kernel for CPUs is built for).
"""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest

from benchmarks.hardware.device import Device
from benchmarks.hardware.engines import VllmServed
from benchmarks.hardware.rungs import compare, prompt
from tests.live.conftest import Live, serving
from workers.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not os.environ.get("KAPPA_MORE_CLUSTERS"),
        reason="starts engines of its own: set KAPPA_MORE_CLUSTERS=1",
    ),
]

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_intermediate_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Qwen3Moe": {"num_key_value_heads": 1, "head_dim": 32, "num_experts": 4},
    "DeepseekV2": {
        "num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


CONFIG = """
model: {{id: Qwen3Moe, source: {Qwen3Moe}}}
pools:
  - {{name: experts, profile: pcie, paced: false}}
  - {{name: latent, profile: pcie, paced: false, model: {{id: DeepseekV2, source: {DeepseekV2}}},
     engine: {{block_tokens: 16, device_blocks: 128}}}}
engine: {{device_blocks: 64, host_bytes: 67108864, max_context_tokens: 1024}}
"""


def make_checkpoint(family, parent):
    """A folder that vLLM serves: weights by 1/sqrt(fan-in), the tiny model's tokenizer."""
    import torch
    import transformers

    tiny = make_tiny_model(parent / "tiny", [f"word{i}" for i in range(3000)])
    size = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, f"{family}Config")(vocab_size=size, **COMMON, **FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for value in model.parameters():
        if value.dim() > 1:
            torch.nn.init.normal_(value, 0.0, value.shape[-1] ** -0.5)
    folder = parent / family
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path):
    return make_checkpoint(request.param, tmp_path)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    made = {family: make_checkpoint(family, folder) for family in FAMILIES}
    with serving(folder, CONFIG.format(**made)) as ready:
        yield Live(ready, folder / "router.jsonl")


def test_experts_and_latent_attention_come_back_from_host_memory_and_are_measured(checkpoint):
    same, other = prompt(300, 1), prompt(300, 2)
    with closing(VllmServed(Device("cpu"), checkpoint, eager=True)) as served:
        block_bytes = served.kv_bytes * served._block_tokens

        def ask(ids):
            return served.play([ids], tokens=8, likeliest=20).answers[0]

        fresh, device = ask(same), ask(same)
        assert served.evict(), "all of it was stored"
        found = compare(fresh, device, ask(same), ask(other))
        # Latent attention computes a prompt and finds one with different kernels: `noise` is large.
        assert found["cached_tokens"] == 288 and found["same_tokens"]
        assert found["moved"] <= 1e-3 and found["control"] > 0.5
        measured = served.measured()
    assert not measured["unmeasured"] and measured["step"]["steps"] > 20
    # What the configuration says a block takes is what the engine moves.
    assert measured["h2d"][0]["bytes"] == block_bytes


def ask(live, model, seed):
    """The answer to a prompt of words, and the record of its decision."""
    words = " ".join(f"word{(seed * 997 + 7 * i) % 3000}" for i in range(150))
    raw = live.openai.completions.with_raw_response.create(
        model=model, prompt=words, max_tokens=8, temperature=0.0, extra_body={"ignore_eos": True}
    )
    return raw.parse(), live.decision(raw.headers["x-request-id"])


@pytest.mark.parametrize("model", FAMILIES)
def test_a_cluster_file_serves_them_and_what_left_the_device_comes_from_host_memory(cluster, model):
    first, _ = ask(cluster, model, 1)
    row = next(row for row in cluster.all_nodes() if row["model"] == model)
    assert not row["paced"] and row["measured"]["step"]["steps"] > 10
    device_tokens = 64 * 32
    for seed in range(2, 4 + device_tokens // first.usage.prompt_tokens):
        ask(cluster, model, seed)
    cluster.wait_idle()
    again, record = ask(cluster, model, 1)
    loaded, predicted = (record[which]["cached_tokens"] for which in ("actual", "predicted"))
    assert again.usage.prompt_tokens_details.cached_tokens >= loaded > 0
    if model == "DeepseekV2":
        # On CPUs vLLM turns its own prefix cache off for latent attention, and only events of that
        # one say whose a block is: the router cannot know what host memory holds.
        assert predicted == 0
        return
    assert loaded == predicted and again.choices[0].text == first.choices[0].text
