"""Prompts of one letter a block, and estimates of them made by hand."""

from hashlib import blake2b

import numpy as np

from kappa_router.decision import Estimates
from tests.router.offering import estimates

BLOCK = 16


def chain(labels: str) -> np.ndarray:
    """Prefix-chained ids, one block a letter."""
    prefixes = (labels[: i + 1].encode() for i in range(len(labels)))
    return np.array(
        [int.from_bytes(blake2b(p, digest_size=8).digest()) for p in prefixes], dtype=np.uint64
    )


def offer(in_flight, prompt="", session="", workers=None, **arrays) -> Estimates:
    """A prompt of one block a letter on as many workers as there are queues."""
    columns = {"in_flight": in_flight, "capacity_tokens": [1000.0] * len(in_flight), **arrays}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return estimates(
        *rows, names=workers, block_tokens=BLOCK, prompt_tokens=BLOCK * len(prompt),
        prefix_hashes=chain(prompt), session=session,
    )  # fmt: skip


def chosen(policy, *args, **arrays) -> tuple[int, str]:
    """The row that a policy picks of an offer, and why."""
    choice = policy.choose(offer(*args, **arrays))
    return choice.index, choice.reason
