"""Tiny random Hugging Face models, eager attention, as references for exactness.

`reference(family, dtype)` is a model of theirs. In float64 its norms and softmax, which they round
to float32 whatever the model's dtype, are computed in float64 too, or nothing could agree to 1e-10.
`save` writes it as a checkpoint.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 3, "hidden_size": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_ROTARY: dict[str, Any] = {
    **_COMMON, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
_OPT: dict[str, Any] = {
    **_COMMON, "ffn_dim": 96, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
_MADE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "opt": (OPTConfig, OPTForCausalLM, _OPT),
    "opt-post-norm": (
        OPTConfig, OPTForCausalLM,
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "llama": (LlamaConfig, LlamaForCausalLM, {**_ROTARY, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        LlamaConfig, LlamaForCausalLM,
        {
            **_ROTARY,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {**_ROTARY, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_ROTARY, "head_dim": 16}),
}  # fmt: skip
FAMILIES = ("opt", "llama", "qwen2", "qwen3")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def eager_as_wide(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Eager attention, its softmax in the dtype of the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).contiguous(), None


AttentionInterface.register("eager_as_wide", eager_as_wide)
AttentionMaskInterface.register("eager_as_wide", eager_mask)


@cache
def reference(family: str, dtype: torch.dtype = torch.float64, layers: int = 3) -> Any:
    """A model in evaluation mode, its weights large enough to matter."""
    config_class, model_class, options = _MADE[family]
    config = config_class(**{**options, "num_hidden_layers": layers})
    config._attn_implementation = "eager_as_wide" if dtype == torch.float64 else "eager"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # Their own initialisation is so small that a wrong position would go unnoticed.
            spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            base = 1.0 if parameter.dim() == 1 and "bias" not in name else 0.0
            torch.nn.init.normal_(parameter, base, spread)
    model.tie_weights()
    model = model.to(dtype)
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            module.forward = _wide_norm(module)
    return model


def _wide_norm(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return module.weight * (x * torch.rsqrt(variance + module.variance_epsilon))

    return forward


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model as a checkpoint."""
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def logits(model: Any, tokens: Any) -> Tensor:
    """Their logits (tokens, vocabulary) of one sequence."""
    out: Tensor = model(torch.as_tensor(np.asarray(tokens))[None]).logits[0]
    return out


def greedy(model: Any, tokens: Any, count: int) -> tuple[list[int], Tensor]:
    """Their next `count` greedy tokens, and the logits (count, vocabulary) that chose them.

    One pass: the tokens are checked against the logits of all of them at once, and extended.
    """
    sequence = [int(t) for t in tokens]
    start = len(sequence)
    for _ in range(count):
        sequence.append(int(logits(model, sequence)[-1].argmax()))
    return sequence[start:], logits(model, sequence[:-1])[start - 1 :]
