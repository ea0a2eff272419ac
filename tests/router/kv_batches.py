"""Batches of KV events as vLLM publishes them, and how one is decoded."""

from collections import Counter

import msgspec

from kappa_router.index.kv_event_types import CacheGroups, decode


def stored(hashes=(11, 12), parent=None, size=2, medium="GPU", **more):
    """The event that blocks were stored; their tokens count from 0 unless they are given."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
        "token_ids": list(range(len(hashes) * size)), "block_size": size, "lora_id": None,
        "medium": medium, "lora_name": None,
    } | more  # fmt: skip


def removed(*hashes, medium="GPU", **more):
    """The event that blocks were removed."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | more


def batch(*events, time_s=0.0, rank=0):
    """These events as one payload."""
    return msgspec.msgpack.encode([time_s, list(events), rank])


def published(*hashes, **more):
    """A payload of one event: blocks one after the other."""
    return batch(stored(hashes, **more))


def decode_batch(payload, worker, skipped=None):
    """The events of one batch; `skipped` counts those that are left out."""
    return decode(payload, worker, Counter() if skipped is None else skipped, CacheGroups()).events
