"""Whether something grows or is left behind: slopes with their uncertainty, and a before and after.

A slope is judged by the upper end of its 95% confidence interval, so that noise speaks against us.
Samples of one process depend on those before them; their number is discounted for that by their
lag-1 correlation. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.soak.samples import Sample

MOST_MB_PER_HOUR = 20.0
JUDGED_SHARE = 2.0 / 3.0
_LEAST_SAMPLES = 8
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth of one process' memory, in MB (1e6 bytes) an hour; upper: of its 95% interval."""

    pid: int
    role: str
    samples: int
    mb_per_hour: float
    upper_mb_per_hour: float
    last_mb: float

    @property
    def kept(self) -> bool:
        """Whether it surely grows by less than the limit."""
        return self.upper_mb_per_hour < MOST_MB_PER_HOUR


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per second, and the upper end of its 95% interval.

    Raises:
        ValueError: fewer than 8 samples, or all at one time.
    """
    # Half a second to import: only where it is used, or every command would wait for it.
    from scipy import stats

    count = len(times_s)
    if count < _LEAST_SAMPLES:
        raise ValueError(f"{count} samples say nothing of a slope: take {_LEAST_SAMPLES} or more")
    t, y = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    t = t - t.mean()
    spread = float(t @ t)
    if spread == 0:
        raise ValueError("all samples are of one moment")
    slope = float(t @ y) / spread
    rest = y - y.mean() - slope * t
    noise = float(rest @ rest)
    if noise <= 1e-12 * max(float(y @ y), 1.0):
        return slope, slope
    correlation = max(float(rest[1:] @ rest[:-1]) / noise, 0.0)
    independent = max(count * (1 - correlation) / (1 + correlation), 3.0)
    error = math.sqrt(noise / (count - 2) / spread * count / independent)
    return slope, slope + float(stats.t.ppf(0.975, independent - 2)) * error


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Of every process that lived through the judged last part; steepest first."""
    if not samples:
        return []
    end_s = samples[-1].t_s
    judged = [s for s in samples if s.t_s >= (1 - JUDGED_SHARE) * end_s]
    through = set.intersection(*(set(s.processes) for s in judged))
    found = []
    for pid in through:
        values = [s.processes[pid].rss_bytes / 1e6 for s in judged]
        try:
            slope, upper = slope_of([s.t_s for s in judged], values)
        except ValueError:
            continue
        role = judged[-1].processes[pid].role
        found.append(Slope(pid, role, len(judged), slope * _HOUR_S, upper * _HOUR_S, values[-1]))
    return sorted(found, key=lambda s: -s.upper_mb_per_hour)


def left_behind(before: Sample, after: Sample) -> list[str]:
    """What is not exactly as it was, in words: reservations, index, descriptors of each process
    that is there both times."""
    found = []
    for name in ("reservations", "index_blocks"):
        was, now = getattr(before, name), getattr(after, name)
        if was < 0 or now < 0:
            found.append(f"{name}: not known, as nobody answered")
        elif was != now:
            found.append(f"{name}: {was} before, {now} after")
    for pid in sorted(set(before.processes) & set(after.processes)):
        was, now = before.processes[pid].fds, after.processes[pid].fds
        if was != now:
            found.append(f"descriptors of {before.processes[pid].role} {pid}: {was}, then {now}")
    return found
