"""Offers made by hand: each worker a dictionary of the parts that matter, the rest plain."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from router.offers import Offers

_SCALARS = {
    "now_s": 0.0,
    "prompt_tokens": 1000,
    "block_tokens": 16,
    "session": "",
    "expected_output_tokens": 100,
}
_PLAIN = {"capacity_tokens": 1e6, "h2d_bytes_per_s": 63e9, "flops_per_s": 1e15}


def offers(*workers, prefix_hashes=(), **scalars):
    """Offers over `workers`; a part that a worker does not name is zero, or plain."""
    known = {f.name for f in fields(Offers)}
    for worker in workers:
        assert set(worker) <= known, set(worker) - known
    parts = known - {
        "workers",
        "slots",
        "prefix_hashes",
        "plans",
        "fetching",
        "fetch_from",
        "fetch_s",
        "fetch_tokens",
        *_SCALARS,
    }
    return Offers(
        workers=[f"w{i}" for i in range(len(workers))],
        slots=np.arange(len(workers)),
        prefix_hashes=np.array(prefix_hashes, dtype=np.uint64),
        fetch_s=None,
        **{**_SCALARS, **scalars},
        **{
            part: np.array([float(w.get(part, _PLAIN.get(part, 0.0))) for w in workers])
            for part in parts
        },
    )
