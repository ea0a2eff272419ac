"""Angles equal those of Hugging Face for every type that the engine runs."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kappa_engine.layers import angles, frequencies, rotate

TYPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256,
     "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256,
     "attention_factor": 1.25},
]  # fmt: skip


@pytest.mark.parametrize("rope", TYPES, ids=lambda r: r["rope_type"])
def test_turned_heads_are_theirs(rope):
    rope = {"rope_theta": 10000.0, **rope}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=rope
    )
    positions = torch.tensor([0, 1, 7, 255, 256, 1000])
    x = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(0))
    cosine, sine = LlamaRotaryEmbedding(config)(x, positions[None])
    want = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cosine, sine)[0]
    inverse, factor = frequencies(rope, 16)
    got = rotate(x, *angles(positions, inverse, factor, torch.float32))
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=1e-6)
