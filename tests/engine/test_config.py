"""Configs as checkpoints write them, and the architectures that are refused by name."""

import json

import pytest

from kappa.plans.architecture import architecture_from_config
from kappa_engine.config import UnsupportedModel, read_config
from tests.engine import hf

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50,
}  # fmt: skip
OPT = {
    "model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "ffn_dim": 96, "vocab_size": 50, "max_position_embeddings": 128,
}  # fmt: skip


def test_old_and_new_forms_of_rope_mean_the_same():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    old = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    older = {**scaling, "type": "llama3"}
    del older["rope_type"]
    new = read_config({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old.rope == new.rope
    assert read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": older}).rope == new.rope
    assert read_config(LLAMA).rope["rope_type"] == "default"


def test_what_an_old_opt_config_leaves_out():
    config = read_config(OPT)
    assert config.qkv_bias and config.out_bias and config.mlp_bias and config.tied
    assert config.pre_norm and config.final_norm and config.activation == "relu"
    assert config.embed == 64 and not config.rope and not config.gated
    post = read_config({**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32})
    assert not post.pre_norm and not post.final_norm and post.embed == 32


def test_each_family_has_its_own_biases_and_head_norms():
    qwen2 = read_config({**LLAMA, "model_type": "qwen2", "use_sliding_window": False,
                         "sliding_window": 4096})  # fmt: skip
    assert qwen2.qkv_bias and not qwen2.out_bias and not qwen2.head_norms
    qwen3 = read_config({**LLAMA, "model_type": "qwen3", "head_dim": 16})
    assert qwen3.head_norms and qwen3.query_width == 128 and qwen3.kv_width == 32
    llama = read_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert llama.qkv_bias and llama.out_bias and llama.mlp_bias


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "deepseek_v3.*latent.*work: K, R"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
         "keep 32 tokens.*work: K, R"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"model_type": "mamba"}, "'mamba'.*keep a state.*work: R"),
        ({"model_type": "gemma2"}, r"'gemma2'.*all kinds \(K, A, R\) would work"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic RoPE.*work: K. "),
        ({"rope_parameters": {"rope_type": "longrope"}}, "dynamic RoPE.*work: K. "),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope' is not computed here: use one of"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "'relu2'.*use one of relu"),
    ],
)  # fmt: skip
def test_read_config_refuses_a_model_with_the_plans_that_work(change, says):
    with pytest.raises(UnsupportedModel, match=says):
        read_config({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide among 3"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
    ],
)
def test_a_config_that_no_model_has_names_the_key(change, says):
    with pytest.raises(ValueError, match=says):
        read_config({**LLAMA, **change})


def test_a_file_that_is_no_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: holds list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_saved_config_reads_as_the_model_is(family, tmp_path):
    theirs = hf.reference(family).config
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert ours.layers == theirs.num_hidden_layers and ours.hidden == theirs.hidden_size
    assert ours.kv_heads == getattr(theirs, "num_key_value_heads", 4)
    assert ours.head_dim == getattr(theirs, "head_dim", None) or ours.head_dim * ours.heads == 64
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == ours.family


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, "KAR"),
        ({"sliding_window": 32}, "KR"),
        ({"sliding_window": 32, "use_sliding_window": False}, "KAR"),
        ({"sliding_window": 32, "max_window_layers": 2}, None),
        ({"model_type": "qwen3", "sliding_window": 32}, None),
        ({"layer_types": ["full_attention", "linear_attention"]}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "KAR"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "K"),
    ],
)
def test_engine_and_planners_allow_the_same_architectures(change, kinds):
    config = {**LLAMA, **change}
    allowed = architecture_from_config(config).kinds()
    assert kinds is None or allowed == frozenset(kinds)
    if allowed == frozenset("KAR"):
        read_config(config)
    else:
        with pytest.raises(UnsupportedModel, match=f"work: {', '.join(sorted(allowed))}\\. "):
            read_config(config)
