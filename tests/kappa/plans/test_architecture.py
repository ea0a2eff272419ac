"""Which kinds an architecture allows, read from configs as hubs write them."""

from __future__ import annotations

from typing import Any

import pytest

from kappa.plans.architecture import (
    Architecture,
    architecture_from_config,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
DYNAMIC = {"type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "kinds", "reason"),
    [
        (LLAMA, "KAR", ""),
        ({"model_type": "opt", "num_attention_heads": 32}, "KAR", ""),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "KAR", ""),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, "KAR", ""),
        ({**LLAMA, "sliding_window": 4096, "layer_types": ["full_attention"]}, "KAR", ""),
        ({**LLAMA, "kv_lora_rank": 512}, "KR", "latent"),
        ({**LLAMA, "sliding_window": 4096}, "KR", "keep 4096 tokens"),
        (
            {**LLAMA, "sliding_window": 512, "layer_types": ["sliding_attention"]},
            "KR",
            "keep 512 tokens",
        ),
        ({**LLAMA, "rope_scaling": DYNAMIC}, "K", "dynamic RoPE"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "K", "dynamic RoPE"),
        (
            {"model_type": "opt", "num_attention_heads": 16, "do_layer_norm_before": False},
            "KAR",
            "",
        ),
        ({**LLAMA, "model_type": "qwen3", "sliding_window": 4096}, "KAR", ""),
        (
            {**LLAMA, "sliding_window": 64, "max_window_layers": 4, "num_hidden_layers": 4},
            "KAR",
            "",
        ),
        ({"model_type": "mamba", "num_hidden_layers": 64}, "R", "64 layers keep a state"),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"]}, "R", "keep a state"),
    ],
)
def test_kinds_by_config(config: dict[str, Any], kinds: str, reason: str) -> None:
    found = architecture_from_config(config)
    assert found.kinds() == frozenset(kinds)
    why = found.peculiar()
    assert reason in why and bool(reason) == bool(why)
    assert why.endswith(f"would work: {', '.join(sorted(kinds))}" if reason else "")


def test_a_model_without_any_exact_kind_says_none() -> None:
    found = architecture_from_config({**LLAMA, "layer_types": ["mamba"], "rope_scaling": DYNAMIC})
    assert found.peculiar().endswith("would work: none")


def test_an_architecture_of_which_nothing_is_said_can_do_all() -> None:
    plain = Architecture()
    assert plain.kinds() == {"K", "A", "R"} and plain.peculiar() == "" and plain.refused() == {}


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"attention_chunk_size": 256}, 256),
        ({"sliding_window": 512, "layer_types": ["chunked_attention"]}, 512),
        ({"layer_types": ["sliding_attention"]}, 1),  # of unknown length: not none
        ({"sliding_window": 512, "model_type": "qwen2"}, 0),
        ({"sliding_window": 512, "model_type": "qwen2", "use_sliding_window": True}, 512),
        # Of 4 layers the first 3 attend to all, then the first 4, so that none has a window.
        ({"sliding_window": 512, "num_hidden_layers": 4, "max_window_layers": 3}, 512),
        ({"sliding_window": 512, "num_hidden_layers": 4, "max_window_layers": 4}, 0),
    ],
)
def test_the_window_that_a_config_switches_on(more: dict[str, Any], window: int) -> None:
    assert architecture_from_config({**LLAMA, **more}).sliding_window == window


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"num_hidden_layers": 48, "model_type": "mamba"}, 48),
        ({"model_type": "mamba"}, 1),
        ({"num_hidden_layers": 48}, 0),
        ({"layer_types": ["full_attention", "linear_attention", "linear_attention"]}, 2),
    ],
)
def test_layers_that_keep_a_state_are_counted(more: dict[str, Any], layers: int) -> None:
    found = architecture_from_config({**LLAMA, **more})
    assert found.state_layers == layers
    assert found.kinds() == (frozenset("R") if layers else frozenset("KAR"))
