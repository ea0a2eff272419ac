"""Runs the GPU's gather under Triton's interpreter on CPU tensors; prints the results."""

import json

import numpy as np
import torch

from kappa_engine.sparse.gather_kernel import gather_rows


def main() -> None:
    """One gather with odd sizes, counted, and one that is not."""
    rng = np.random.default_rng(0)
    source = torch.from_numpy(rng.standard_normal((500, 24)))
    store = torch.full((3, 4, 60, 24), -7.0, dtype=torch.float64)
    rows = torch.from_numpy(rng.integers(0, 500, (3, 4, 37)))
    rows[torch.from_numpy(rng.random((3, 4, 37)) < 0.5)] = -1
    want = store.clone()
    for b, h, n in (rows >= 0).nonzero().tolist():
        want[b, h, 10 + n] = source[rows[b, h, n]]
    counted = torch.zeros(1, dtype=torch.int64)
    gather_rows(store[:, :, 10:47], source, rows, counted)
    equal = torch.equal(store, want)
    gather_rows(store[:, :, 10:47], source, rows, None)
    print(
        json.dumps(
            {
                "equal": equal and torch.equal(store, want),
                "rows_counted": int(counted) == int((rows >= 0).sum()),
            }
        )
    )


main()
