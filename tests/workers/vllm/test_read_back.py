"""What an engine chose itself, read back from its configuration and its cache's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kappa_workers.vllm.read_back import engine_facts

pytestmark = pytest.mark.vllm

HEADS = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
PAGE = 16 * 2 * 8 * 128 * 2
"""Bytes of one layer's block of 16 tokens."""


def engine(groups, blocks=1000, cache_dtype="auto", context=4096, dcp=1):
    """A configuration, and a cache of `blocks` blocks: [(layers, spec of each)]."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, enable_prefix_caching=True, prefix_match_unit=None,
            mamba_cache_mode="align", block_size=groups[0][1].block_size,
        ),
        model_config=SimpleNamespace(max_model_len=context, dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=1
        ),
        kv_transfer_config=None,
        max_in_flight_tokens=512,
    )  # fmt: skip
    block_bytes = max(layers * spec.page_size_bytes for layers, spec in groups)
    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(blocks * block_bytes, [f"{i}"], 0, block_bytes) for i in range(3)
        ],
        kv_cache_groups=[
            KVCacheGroupSpec([f"{g}.{i}" for i in range(layers)], spec)
            for g, (layers, spec) in enumerate(groups)
        ],
    )
    return config, cache, torch.nn.Linear(10, 20, dtype=torch.bfloat16)


def full(block=16, **changes):
    return FullAttentionSpec(block_size=block, **{**HEADS, **changes})


def test_limits_and_bytes_of_a_plain_model():
    assert engine_facts(*engine([(32, full())])) == {
        "max_context_tokens": 4096, "block_tokens": 16, "device_blocks": 1000,
        "max_batch_tokens": 8192, "max_sequences": 256, "dtype": "bfloat16", "kv_dtype": "",
        "graphs": "FULL_DECODE_ONLY",
        "kv_token_bytes": 32 * PAGE / 16, "weight_bytes": (10 * 20 + 20) * 2,
    }  # fmt: skip


def test_kv_of_eight_bits_takes_half_and_is_named():
    spec = full(dtype=torch.float8_e4m3fn)
    facts = engine_facts(*engine([(32, spec)], cache_dtype="fp8"))
    assert (facts["kv_dtype"], facts["dtype"]) == ("fp8", "bfloat16")
    assert facts["kv_token_bytes"] == 32 * PAGE / 16 / 2


def test_a_latent_is_one_vector_a_layer():
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, head_size_v=0, dtype=torch.bfloat16
    )
    facts = engine_facts(*engine([(61, spec)]))
    assert (facts["block_tokens"], facts["kv_token_bytes"]) == (64, 61 * 576 * 2)


def test_engine_facts_count_kv_per_token_of_full_attention_only():
    window = SlidingWindowSpec(block_size=16, sliding_window=128, **HEADS)
    facts = engine_facts(*engine([(18, full()), (18, window)], blocks=2000))
    assert facts["kv_token_bytes"] == 18 * PAGE / 16
    # A sequence of 4,096 tokens takes 256 blocks of the one group; of the other what its window and
    # the tokens under way cover: 127 + 512 are 40 blocks, and one more as they may begin amid one.
    assert facts["device_blocks"] == int(2000 / (256 + 41) * 4096) // 16


def test_states_of_linear_attention_are_not_per_token():
    state = MambaSpec(
        block_size=64, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align",
        page_size_padded=12 * 4 * PAGE,
    )  # fmt: skip
    facts = engine_facts(*engine([(12, full(64)), (1, state)]))
    assert facts["block_tokens"] == 64
    assert facts["kv_token_bytes"] == 12 * 4 * PAGE / 64


def test_where_nothing_grows_all_of_it_counts():
    window = SlidingWindowSpec(block_size=16, sliding_window=128, **HEADS)
    assert engine_facts(*engine([(4, window)]))["kv_token_bytes"] == 4 * PAGE / 16


def test_ranks_that_share_a_context_hash_in_their_common_unit():
    facts = engine_facts(*engine([(32, full())], dcp=2))
    assert (facts["block_tokens"], facts["kv_token_bytes"]) == (32, 32 * PAGE / 32)


def test_a_model_without_a_cache_takes_nothing():
    config, cache, model = engine([(32, full())])
    cache.kv_cache_tensors = []
    assert engine_facts(config, cache, model)["kv_token_bytes"] == 0.0
