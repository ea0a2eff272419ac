"""Hugging Face's offloaded cache as a baseline, with our weights: no copy of them is made.

Their model is built on the meta device and given views of our tensors, so both compute with the
same numbers. Its cache keeps one layer on the device, prefetches the next, and sends each back
after use; it needs a GPU, whose streams it makes, and is left out by name elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload.rig import Rig
from benchmarks.offload.rounds import Arm, Sample
from benchmarks.offload.settings import DecodeCell
from engine.weights import Weights, layer_specs, outer_specs

NAME = "hf-offloaded"


def offloaded_refused(rig: Rig) -> str:
    """Why this baseline cannot run here, or ""."""
    if rig.device.type != "cuda":
        return (
            "transformers' offloaded cache makes a stream of an accelerator and stops without "
            "one: there is nothing to compare with on a CPU"
        )
    if rig.streamed:
        return "its weights would have to be on the device, and here they are streamed"
    return ""


def state_of(weights: Weights) -> dict[str, Tensor]:
    """Our weights under the names of a checkpoint, as views."""
    config = weights.config
    base = "model.decoder." if config.family == "opt" else "model."
    state: dict[str, Tensor] = {}
    for name, spec in outer_specs(config).items():
        source = spec.names[0]
        prefix = "" if source.startswith("lm_head") else "model."
        state[prefix + source] = weights.outer[name]
    state.setdefault("lm_head.weight", weights.outer["embed"])
    for index in range(config.layers):
        layer = weights.layer(index)
        for name, spec in layer_specs(config).items():
            parts = getattr(layer, name).split(spec.rows)
            for source, part in zip(spec.names, parts, strict=True):
                state[f"{base}layers.{index}.{source}"] = part
    return state


def their_model(weights: Weights) -> Any:
    """Their OPT model, of our shape, over our tensors.

    Raises:
        ValueError: another family: rotary tables are not made on the meta device.
    """
    config = weights.config
    if config.family != "opt":
        raise ValueError(f"the Hugging Face baseline is for OPT, not {config.family}")
    from transformers import OPTConfig, OPTForCausalLM

    shape = OPTConfig(
        vocab_size=config.vocab, num_hidden_layers=config.layers, hidden_size=config.hidden,
        num_attention_heads=config.heads, ffn_dim=config.inner,
        max_position_embeddings=config.max_tokens, word_embed_proj_dim=config.embed,
        activation_function=config.activation, attn_implementation="sdpa", dtype=weights.dtype,
    )  # fmt: skip
    with torch.device("meta"):
        model = OPTForCausalLM(shape)
    model.load_state_dict(state_of(weights), strict=True, assign=True)
    return model.eval()


@torch.no_grad()
def generate(
    model: Any, cache: Any, prompts: Tensor, gen: int, timed: Callable[[Callable[[], Any]], Sample]
) -> tuple[Sample, Sample, Tensor]:
    """Greedy tokens (sequences, gen); samples of the prompt and of decoding."""
    tokens: list[Tensor] = []

    def one() -> None:
        inputs = tokens[-1][:, None] if tokens else prompts
        out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens.append(out.logits[:, -1].argmax(dim=-1))

    def others() -> None:
        for _ in range(gen - 1):
            one()

    before = timed(one)
    sample = timed(others)
    return before, sample, torch.stack(tokens, dim=1)


def offloaded_arm(rig: Rig, cell: DecodeCell) -> Arm:
    """Their way of the cell; what crosses the link and what stalls is not counted there."""
    from transformers import DynamicCache

    model = their_model(rig.forward.weights)

    def run() -> Sample:
        prompts = torch.as_tensor(np.stack(rig.prompts(cell.sequences, cell.prompt))).to(rig.device)
        cache = DynamicCache(config=model.config, offloading=True)
        before, sample, tokens = generate(model, cache, prompts, cell.gen, rig.timed)
        return replace(
            sample, before_s=before.latency_s, tokens=tuple(tokens.cpu().flatten().tolist())
        )

    return Arm(NAME, run, None, "transformers' cache, offloaded")
