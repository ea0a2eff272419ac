"""Published batches of KV events, each as if it were the first of its stream."""

from collections import Counter

from kappa_router.index.kv_events import CacheGroups, decode


def decode_batch(payload, worker, skipped=None):
    """The events of one batch; `skipped` counts those that are left out."""
    return decode(payload, worker, Counter() if skipped is None else skipped, CacheGroups()).events
