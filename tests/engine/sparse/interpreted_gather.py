"""Runs the GPU's gather under Triton's interpreter on CPU tensors; prints what came of it."""

import json

import numpy as np
import torch

from engine.sparse.gather import gather_rows


def main() -> None:
    """One gather with odd sizes, counted, and one that is not."""
    rng = np.random.default_rng(0)
    source = torch.from_numpy(rng.standard_normal((500, 24)))
    store = torch.full((3, 4, 60, 24), -7.0, dtype=torch.float64)
    rows = torch.from_numpy(rng.integers(0, 500, (3, 4, 37)))
    wanted = torch.from_numpy(rng.random((3, 4)) < 0.5)
    want = store.clone()
    for b, h in wanted.nonzero().tolist():
        want[b, h, 10:47] = source[rows[b, h]]
    counted = torch.zeros(1, dtype=torch.int64)
    gather_rows(store[:, :, 10:47], source, rows, wanted, counted)
    equal = torch.equal(store, want)
    gather_rows(store[:, :, 10:47], source, rows, wanted, None)
    print(
        json.dumps(
            {
                "equal": equal and torch.equal(store, want),
                "rows_counted": int(counted) == 37 * int(wanted.sum()),
            }
        )
    )


main()
