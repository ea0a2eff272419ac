"""Whole rows copied between tables in host memory, as the host tier and its disk do with blocks.

A copy of bytes at the speed of memory, with numpy: torch's `index_copy_` moves int8 byte by byte,
and gathering into memory between passes over everything twice. Other threads run meanwhile, but
for a moment a run of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kappa_engine.block_pool import runs

Ids = NDArray[np.int64]
Table = NDArray[np.int8]


def copy_rows(
    targets: Sequence[Table], target_ids: Ids, sources: Sequence[Table], source_ids: Ids
) -> None:
    """Copy rows `source_ids` of every source to rows `target_ids` of the target beside it; tables
    are of shape (rows, bytes), those of a pair equally wide.

    Raises:
        IndexError: there is no such row.
        ValueError: tables or ids do not pair up.
    """
    to_rows, of_rows = target_ids.tolist(), source_ids.tolist()
    for tables, rows in ((targets, to_rows), (sources, of_rows)):
        count = min(map(len, tables), default=0)
        if rows and tables and not 0 <= min(rows) <= max(rows) < count:
            raise IndexError(f"rows {min(rows)} to {max(rows)} of a table of {count}")
    merged = runs(to_rows, of_rows)
    for target, source in zip(targets, sources, strict=True):
        if target.shape[1:] != source.shape[1:]:
            raise ValueError(f"rows of {source.shape[1:]} bytes do not fit {target.shape[1:]}")
        for to, of, count in merged:
            target[to : to + count] = source[of : of + count]
