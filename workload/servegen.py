"""ServeGen client rates: how fast and how burstily each client of a real service sent requests.

A Parquet table of `client`, `window_s` (start of a window of 600 s), `rate_rps`, `cv`, `pattern`
(Gamma or Weibull), `arg1` (shape) and `arg2` (scale) of the gaps between a client's requests.
`workload.arrivals` makes arrivals of them. Source: alibaba/ServeGen, fits to Bailian production.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workload.reading import WorkloadError, read_table, refuse_rows

WINDOW_S = 600
SOURCE = "ServeGen m-small client rates, alibaba/ServeGen, Apache-2.0"

_COLUMNS: dict[str, type] = {
    "client": int,
    "window_s": int,
    "rate_rps": float,
    "cv": float,
    "pattern": str,
    "arg1": float,
    "arg2": float,
}
_PATTERNS = ("Gamma", "Weibull")


@dataclass(frozen=True, slots=True)
class ClientRate:
    """One client in one window: its rate, and the distribution of its gaps up to their mean.

    The recorded scale is not kept: it disagrees with the rate where a client paused within the
    window, and the rate is what was counted.
    """

    rate_rps: float
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True)
class RateDay:
    """Consecutive windows of `WINDOW_S`, each with its active clients; it may be shorter than a
    day, or longer.
    """

    windows: tuple[tuple[ClientRate, ...], ...]

    @property
    def mean_rps(self) -> float:
        """Mean rate of all clients together over all windows."""
        total = sum(client.rate_rps for window in self.windows for client in window)
        return total / len(self.windows)


def read_rates(path: Path) -> RateDay:
    """Read a table of rates; windows between the first and the last that have no row are idle."""
    table = read_table(path, _COLUMNS)
    starts, patterns, shapes = table["window_s"], table["pattern"], table["arg1"]
    refuse_rows(path, starts, starts % WINDOW_S != 0, f"must be a multiple of {WINDOW_S}")
    refuse_rows(path, patterns, ~patterns.is_in(_PATTERNS), f"must be one of {_PATTERNS}")
    refuse_rows(path, shapes, shapes <= 0, "must be above zero")
    windows: dict[int, list[ClientRate]] = {}
    for _, start_s, rate_rps, _, pattern, shape, _ in table.iter_rows():
        windows.setdefault(start_s // WINDOW_S, []).append(ClientRate(rate_rps, pattern, shape))
    first, last = min(windows), max(windows)
    day = RateDay(tuple(tuple(windows.get(index, ())) for index in range(first, last + 1)))
    if not day.mean_rps:
        raise WorkloadError(f"{path}: every rate in column 'rate_rps' is zero")
    return day
