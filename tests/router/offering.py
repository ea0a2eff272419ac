"""Estimates made by hand: each worker a dictionary of the columns that matter, the rest plain."""

import numpy as np

from kappa_router.decision import ESTIMATE, Estimates

_PLAIN = {"capacity_tokens": 1e6, "h2d_bytes_per_s": 63e9, "flops_per_s": 1e15}


def estimates(*workers, names=None, prefix_hashes=(), **scalars):
    """Estimates over `workers`, called w0, w1, ... without `names`; a column that a worker does not
    name is zero, or plain."""
    rows = np.zeros(len(workers), dtype=ESTIMATE)
    for row, worker in zip(rows, workers, strict=True):
        for name, value in {**_PLAIN, **worker}.items():
            row[name] = value
    plain = {
        "now_s": 0.0, "prompt_tokens": 1000, "block_tokens": 16, "session": "",
        "expected_output_tokens": 100,
    }  # fmt: skip
    return Estimates(
        workers=names or [f"w{i}" for i in range(len(workers))],
        slots=np.arange(len(workers)),
        rows=rows,
        prefix_hashes=np.array(prefix_hashes, dtype=np.uint64),
        **{**plain, **scalars},
    )
