"""Unlike models behind one endpoint, in vLLM: each is answered by its own workers, from its cache.

Tiny ones with random weights: two of unlike vocabularies, an adapter of the first, a mixture of
experts (Qwen3), and latent attention over experts (DeepSeek-V2, of the head size that vLLM's kernel
for CPUs is built for). The latter two are not paced: what they measure of themselves is real.
"""

from __future__ import annotations

import json

import pytest

from kappa.model import kv_bytes_per_token
from kappa_benchmarks.hardware.device import read_shape
from kappa_benchmarks.hardware.engines import Answer
from kappa_benchmarks.hardware.rungs import EQUAL, compare
from kappa_workers.tiny_model import make_tiny_model
from tests.deploy.adapters import make_adapter
from tests.live.conftest import Live, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

CONFIG = """
model: {{adapters: {{fine: {adapter}}}}}
pools:
  - {{name: pcie, profile: pcie, paced: true}}
  - {{name: other, profile: c2c, paced: true, model: {{id: other, source: {other}}}}}
  - {{name: experts, profile: pcie, model: {{id: Qwen3Moe, source: {Qwen3Moe}}},
     engine: {{device_blocks: 64, host_bytes: 67108864, max_context_tokens: 1024, planner: kv}}}}
  - {{name: latent, profile: pcie, model: {{id: DeepseekV2, source: {DeepseekV2}}},
     engine: {{device_blocks: 128, host_bytes: 67108864, max_context_tokens: 1024, planner: kv,
              block_tokens: 16}}}}
engine: {{device_blocks: 200, max_context_tokens: 6144}}
# Unpaced pools are as fast as the machine, which may be too slow for the objective.
router: {{admission: false}}
"""

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
BLOCK_TOKENS = {"Qwen3Moe": 32, "DeepseekV2": 16}
DEVICE_TOKENS = 64 * 32

TEXT = "The story of the long tail counts again and again. " * 60


def make_checkpoint(family, tiny, folder):
    """A folder that vLLM serves: weights by 1/sqrt(fan-in), the tiny model's tokenizer."""
    import torch
    import transformers

    size = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, f"{family}Config")(vocab_size=size, **COMMON, **FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for value in model.parameters():
        if value.dim() > 1:
            torch.nn.init.normal_(value, 0.0, value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def cluster(folder):
    corpus = [f"quite another corpus, of {i} words and numbers {i * 7919}" for i in range(200)]
    other = make_tiny_model(folder / "other", corpus, seed=7)
    # All tiny models are of one shape.
    adapter = make_adapter(folder / "fine", other)
    words = make_tiny_model(folder / "words", [f"word{i}" for i in range(3000)])
    made = {family: make_checkpoint(family, words, folder / family) for family in FAMILIES}
    with serving(folder, CONFIG.format(other=other, adapter=adapter, **made)) as ready:
        yield Live(ready, folder / "router.jsonl")


def ask(live, model):
    """Its answer, and the record of its decision."""
    raw = live.openai.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": TEXT}], max_tokens=8, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return raw.parse(), live.decision(raw.headers["x-request-id"])


def test_each_model_and_adapter_has_its_own_workers_and_cache(cluster):
    own = {"pcie"}
    nodes = {"other": {"other"}, cluster.model: own, "fine": own}
    answers = {}
    for model, its_nodes in nodes.items():
        cold, decided = ask(cluster, model)
        answers[model] = cold
        assert cold.model == model and decided["node"] in its_nodes
        predicted, actual = decided["predicted"], decided["actual"]
        assert predicted["device_tokens"] == predicted["cached_tokens"] == 0
        assert actual["device_tokens"] == actual["cached_tokens"] == 0
        assert actual["new_tokens"] == cold.usage.prompt_tokens
    for model, its_nodes in nodes.items():
        said = [{"role": "user", "content": TEXT}]
        known = answers[model].usage.prompt_tokens - 64
        cluster.until_known(known, model=model, messages=said)
        warm, decided = ask(cluster, model)
        assert decided["node"] in its_nodes
        found = decided["actual"]["device_tokens"]
        assert found == decided["predicted"]["device_tokens"] >= warm.usage.prompt_tokens - 64
        assert warm.usage.prompt_tokens_details.cached_tokens == found
        assert warm.choices[0].message.content == answers[model].choices[0].message.content
    texts = {answer.choices[0].message.content for answer in answers.values()}
    assert len(texts) == 3, "the adapter and the other model say something else"
    lengths = {model: answer.usage.prompt_tokens for model, answer in answers.items()}
    assert lengths["fine"] == lengths[cluster.model] != lengths["other"]


def test_nodes_name_their_model(cluster):
    assert {row["node"]: row["model"] for row in cluster.all_nodes()} == {
        "pcie": cluster.model, "other": "other", "experts": "Qwen3Moe", "latent": "DeepseekV2",
    }  # fmt: skip


def prompt_of(seed):
    return " ".join(f"word{(seed * 997 + 7 * i) % 3000}" for i in range(150))


def complete(live, model, seed):
    """The answer to a prompt of words, token by token; its length; the record of its decision."""
    raw = live.openai.completions.with_raw_response.create(
        model=model, prompt=prompt_of(seed), max_tokens=8, temperature=0.0, logprobs=20,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    found, record = raw.parse(), live.decision(raw.headers["x-request-id"])
    listed = found.choices[0].logprobs
    cached = found.usage.prompt_tokens_details.cached_tokens
    answer = Answer(0.0, cached, listed.tokens, logprobs=listed.top_logprobs)
    return answer, found.usage.prompt_tokens, record


@pytest.mark.parametrize("model", FAMILIES)
def test_experts_and_latent_attention_come_back_from_host_memory(cluster, model):
    fresh, prompt_tokens, _ = complete(cluster, model, 1)
    device, _, _ = complete(cluster, model, 1)
    for seed in range(2, 4 + DEVICE_TOKENS // prompt_tokens):
        control, _, _ = complete(cluster, model, seed)
    cluster.wait_idle()
    whole = (prompt_tokens - 1) // BLOCK_TOKENS[model] * BLOCK_TOKENS[model]
    if model != "DeepseekV2":
        cluster.until_known(whole, model=model, prompt=prompt_of(1))
    host, _, record = complete(cluster, model, 1)
    assert host.cached_tokens == record["actual"]["cached_tokens"] == whole
    # On CPUs vLLM turns its own prefix cache off for latent attention, and only events of that one
    # name a block's prompt: the router cannot know what host memory holds.
    assert record["predicted"]["cached_tokens"] == (0 if model == "DeepseekV2" else whole)
    # Latent attention computes a prompt and finds one with different kernels: `noise` is large.
    found = compare(fresh, device, host, control)
    assert found["same_tokens"] and found["moved"] <= 1e-3 and found["control"] > 0.5, found
    assert found["verdict"] == EQUAL or model == "DeepseekV2"


@pytest.mark.parametrize("model", FAMILIES)
def test_experts_and_latent_attention_are_measured(cluster, folder, model):
    row = next(row for row in cluster.all_nodes() if row["model"] == model)
    measured = row["measured"]
    assert not row["paced"] and not measured["unmeasured"] and measured["step"]["steps"] > 20
    # What the configuration says a block takes is what the engine moves.
    token_bytes = kv_bytes_per_token(read_shape(folder / model, "float32"))
    assert measured["h2d"][0]["bytes"] == token_bytes * BLOCK_TOKENS[model]
