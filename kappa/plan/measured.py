"""What a file of measured rates may hold beside what every one does: decoding steps, CPU attention.

Files of machines where those were not measured lack the keys, and rates then go without. A line
over CPU attention too poor to plan with counts as not measured: the CPU is not asked, and the rest
of the file is as good as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kappa.plan.fits import LEAST_R2, ComputeGrid, LineFit, fit_line


class Attention(NamedTuple):
    """As `kappa.plan.rates.PlanRates` has them: line, link's share beside it, own beside a load."""

    attend: LineFit | None = None
    h2d_attending: float = 1.0
    attend_loading: float = 1.0


def layers_fit(name: str, samples: Mapping[str, Any], layers: int) -> LineFit:
    """A line over all layers from the samples of one: {"tokens": [...], "seconds": [...]}."""
    return fit_line(name, samples["tokens"], [layers * float(s) for s in samples["seconds"]])


def grid_of(data: Mapping[str, Any], rows: str, columns: str) -> ComputeGrid:
    """A grid from {rows: [...], columns: [...], "seconds": [[...]]}."""
    return ComputeGrid(
        tuple(map(float, data[rows])),
        tuple(map(float, data[columns])),
        tuple(tuple(map(float, row)) for row in data["seconds"]),
    )


def decode_grid(data: Mapping[str, Any]) -> ComputeGrid | None:
    """Decoding steps by sequences and by context tokens of all of them; None if not measured."""
    found = data.get("decode")
    return None if found is None else grid_of(found, "sequences", "resident_tokens")


def attention(data: Mapping[str, Any], layers: int, alone_bytes_per_s: float) -> Attention:
    """CPU attention: {"tokens", "seconds"} of one layer, and the two rates of both at once."""
    found = data.get("attend")
    if found is None:
        return Attention()
    try:
        line = layers_fit("CPU attention", found, layers)
    except ValueError:
        return Attention()
    if not line.r2 >= LEAST_R2:
        return Attention()
    link = min(1.0, float(found["h2d_bytes_per_s"]) / alone_bytes_per_s)
    return Attention(line, link, min(1.0, float(found["share_while_loading"])))
