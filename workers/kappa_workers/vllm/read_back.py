"""The limits of an engine, read back from its workers: vLLM chooses those that it is not given.
Names private to vLLM: tests/workers/vllm/test_read_back.py."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind

# Layers of these keep so much of a sequence however long it is.
_BOUNDED = frozenset({
    KVCacheSpecKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    KVCacheSpecKind.MAMBA,
    KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    KVCacheSpecKind.CROSS_ATTENTION,
})  # fmt: skip


def engine_facts(vllm_config: Any, kv_cache_config: Any, model: Any) -> dict[str, Any]:
    """The limits that all ranks of an engine share, and the memory of this one (`model`: its part):
    `EngineLimits`' fields but for `host_bytes`, and of this rank alone `kv_token_bytes` (what one
    more token takes of the cache) and `weight_bytes`.

    `graphs` is vLLM's `cudagraph_mode`; `block_tokens` is the unit in which prompts are hashed;
    with several groups of layers, which take blocks of one pool, `device_blocks` is what the pool
    holds of sequences, in that unit."""
    cache, model_config = vllm_config.cache_config, vllm_config.model_config
    scheduler, groups = vllm_config.scheduler_config, kv_cache_config.kv_cache_groups
    blocks, ranks = kv_cache_config.num_blocks, vllm_config.parallel_config
    if len(groups) == 1:
        shared_by = ranks.decode_context_parallel_size
        block_tokens, device_blocks = groups[0].kv_cache_spec.block_size * shared_by, blocks
    else:
        _, block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        tokens, _ = get_kv_cache_capacity(vllm_config, kv_cache_config)
        device_blocks = tokens // block_tokens
    dtype = str(model_config.dtype).removeprefix("torch.")
    kv_dtype = str(cache.cache_dtype)
    return {
        "max_context_tokens": int(model_config.max_model_len),
        "block_tokens": int(block_tokens),
        "device_blocks": int(device_blocks),
        "max_batch_tokens": int(scheduler.max_num_batched_tokens),
        "max_sequences": int(scheduler.max_num_seqs),
        "dtype": dtype,
        "kv_dtype": "" if kv_dtype in ("auto", dtype) else kv_dtype,
        "graphs": vllm_config.compilation_config.cudagraph_mode.name,
        "kv_token_bytes": _token_bytes(kv_cache_config, ranks.decode_context_parallel_size),
        "weight_bytes": sum(part.nbytes for part in model.parameters()),
    }


def _token_bytes(kv_cache_config: Any, shared_by: int) -> float:
    """Bytes that one more token of a long sequence takes; every group takes whole blocks of one
    pool, all of the same bytes."""
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    if not tensors or not blocks:
        return 0.0
    # Each tensor says where its layers lie in the one allocation, and repeats the size of that.
    block_bytes = tensors[0].size / blocks
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    growing = [spec for spec in specs if get_kv_cache_spec_kind(spec) not in _BOUNDED]
    return sum(block_bytes / (spec.block_size * shared_by) for spec in growing or specs)
