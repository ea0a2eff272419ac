"""Rows of results: medians with their spread, what was predicted beside what was measured.

`speedup` is the median over the rounds of the baseline's latency to the policy's, in one round.
`gpu_busy` is the share of the latency in which the computation did not stand still for a copy.
`gbps` is bytes to the device over the whole latency, `link_gbps` over the seconds in which copies
ran, `alone_gbps` that of like copies with nothing else to do, in the same rounds; GB is 1e9.
`same_as` names the row of a plan that is the very same: it was measured once. `predicted_error` is
that of the median; rates are the least of their repeats, what other work on the machine adds left
out, and `predicted_error_of_least` compares them with the same.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.offload.rig import Rig
from benchmarks.offload.rounds import LINK, Arm, Sample, leaders, ratios, spread
from benchmarks.offload.settings import Cell, DecodeCell, PrefixCell, Setting


def rows_of(
    setting: Setting,
    rig: Rig,
    cell: Cell,
    arms: list[Arm],
    samples: dict[str, list[Sample]],
    baseline: str,
) -> list[dict[str, Any]]:
    """One row per arm, in their order."""
    alone = statistics.median(one.h2d_bytes / one.link_s / 1e9 for one in samples[LINK])
    leads = leaders(arms)
    want = samples[baseline][-1].tokens
    rows = []
    for arm in arms:
        mine = samples[arm.name]
        latency = spread([one.latency_s for one in mine])
        least_s = min(one.latency_s for one in mine)
        gain = ratios(samples, baseline, arm.name)
        decoding = arm.name != LINK
        row: dict[str, Any] = {
            **_where(setting, rig, cell),
            "policy": arm.name,
            "latency_s": latency.median,
            "latency_iqr_s": latency.iqr,
            "latency_least_s": least_s,
            "repeats": len(mine),
            "tokens_per_s": _rate(cell, latency.median) if decoding else None,
            **_copied(arm, mine),
            "alone_gbps": alone,
            "predicted_s": arm.predicted_s,
            "predicted_error": error(arm.predicted_s, latency.median),
            "predicted_error_of_least": error(arm.predicted_s, least_s),
            "baseline": baseline,
            "speedup": gain.median if decoding else None,
            "speedup_iqr": gain.iqr if decoding else None,
            "tokens_equal": _equal(want, mine[-1].tokens) if decoding else None,
            "chosen": arm.chosen,
            "note": arm.note,
            "same_as": None if leads[arm.name] == arm.name else leads[arm.name],
        }
        if not isinstance(cell, PrefixCell) and decoding:
            row |= _end_to_end(cell, samples, baseline, arm.name)
        rows.append(row)
    return rows


def _where(setting: Setting, rig: Rig, cell: Cell) -> dict[str, Any]:
    common = {
        "setting": setting.name,
        "cell": cell.name,
        "model": rig.config.shape.name,
        "dtype": setting.dtype,
        "weights": "streamed" if rig.streamed else "device",
        "link": setting.link,
    }
    if isinstance(cell, DecodeCell):
        system = {"row": "decode-row", "column": "decode-column"}[cell.order]
        sizes = {"batch": cell.sequences, "batches": cell.batches, "prompt": cell.prompt}
        return {"system": system, **common, **sizes, "gen": cell.gen}
    return {"system": "prefix-ttft", **common, "batch": 1, "batches": 1,
            "prompt": cell.cached + cell.new, "cached": cell.cached, "gen": 1}  # fmt: skip


def error(predicted_s: float | None, measured_s: float) -> float | None:
    """Of a prediction, relative to what was measured."""
    return None if predicted_s is None else predicted_s / measured_s - 1.0


def _rate(cell: Cell, latency_s: float) -> float:
    """Generated tokens per second; of decoding, those behind the first one (paper 000)."""
    if isinstance(cell, PrefixCell):
        return 1 / latency_s
    return cell.sequences * (cell.gen - 1) / latency_s


def _copied(arm: Arm, samples: list[Sample]) -> dict[str, Any]:
    """Bytes and rates."""
    busy = [1.0 - min(1.0, one.stalled_s / one.latency_s) for one in samples]
    return {
        "gpu_busy": None if arm.name == LINK else statistics.median(busy),
        "bytes_h2d": samples[-1].h2d_bytes,
        "gbps": statistics.median(one.h2d_bytes / one.latency_s / 1e9 for one in samples),
        "link_gbps": statistics.median(
            one.h2d_bytes / one.link_s / 1e9 if one.link_s else 0.0 for one in samples
        ),
    }


def _end_to_end(
    cell: DecodeCell, samples: dict[str, list[Sample]], baseline: str, name: str
) -> dict[str, float]:
    """With the prompts' computation (paper 003 counts it): tokens per second, and the speed-up."""
    both = [[one.before_s + one.latency_s for one in samples[which]] for which in (baseline, name)]
    total_s = statistics.median(both[1])
    return {
        "prefill_s": statistics.median(one.before_s for one in samples[name]),
        "end_to_end_tokens_per_s": cell.sequences * cell.gen / total_s,
        "end_to_end_speedup": statistics.median(
            base / own for base, own in zip(*both, strict=True)
        ),
    }


def _equal(want: tuple[int, ...], got: tuple[int, ...]) -> float:
    """Share of the tokens that are the baseline's; a near tie may fall otherwise by rounding."""
    if len(want) != len(got) or not want:
        return 0.0
    return sum(a == b for a, b in zip(want, got, strict=True)) / len(want)
