"""The rows of `kappa doctor --gpu`: the cost model fitted to them, sentences, a page of Markdown.

Pure: rows in, text out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kappa.cost import chunk_work
from kappa.plans.measured import fit_line, fit_steps

CPU_LABEL = "cpu (no GPU): the ladder's own check, not a GPU measurement"
"""What a ladder's results are called that no GPU had a part in."""

Row = dict[str, Any]
Rows = Sequence[Row]
_GB, _MS = 1e-9, 1e3


# -- the cost model -------------------------------------------------------------------------------


def predicted(rows: Rows) -> list[Row]:
    """The rows; those of TTFT with what the cost model says of them, and behind them its fit.

    Steps are fitted to what took no load (the prefix on the device), loads to the loads; the TTFT
    that they are held against is in neither fit. An engine that was ended early may have no fit.
    """
    found = [dict(row) for row in rows]
    for arm in {row["arm"]: 0 for row in rows if row["kind"] == "ttft"}:
        here = [row for row in found if row.get("arm") == arm]
        about = next(row for row in here if row["kind"] == "engine")
        try:
            fit = _fit([row for row in here if row["kind"] == "ttft"], about)
        except ValueError as error:
            fit = {"kind": "unfitted", "why": str(error)}
        found.append({"arm": arm, **fit})
    return found


def _fit(cells: Rows, about: Row) -> Row:
    works = [chunk_work(float(row["new"]), float(row["cached"])) for row in cells]
    fit = fit_steps(works, [row["compute_s"] for row in cells])
    cached = [row["cached"] for row in cells]
    load = fit_line("load", cached, [row["load_s"] for row in cells], relative=True)
    for row, work in zip(cells, works, strict=True):
        times = load.seconds(row["cached"]), float(fit.step.parts(work).step_s)
        row["modelled_share"] = times[0] / sum(times)
        # Of the longer all, of the shorter what the other does not hide.
        row["predicted_s"] = max(times) + about["serial_share"] * min(times)
        row["predicted_error"] = row["predicted_s"] / row["measured_s"] - 1.0
    errors = [abs(row["predicted_error"]) for row in cells]
    return {
        "kind": "fit", "step": fit.step.to_dict(), "step_r2": fit.r2,
        "load_token_s": load.per_token_s, "load_fixed_s": load.fixed_s, "load_r2": load.r2,
        "load_bytes_per_s": about["kv_bytes"] / load.per_token_s,
        "kappa_crit": fit.step.token_s / load.per_token_s,
        "median_error": statistics.median(errors), "most_error": max(errors),
    }  # fmt: skip


# -- a sentence a row -----------------------------------------------------------------------------


def sentences(rows: Rows) -> list[str]:
    """What a rung found, line by line; nothing where it found nothing."""
    lines = [_SENTENCES[row["kind"]](row) for row in rows if row["kind"] in _SENTENCES]
    return [line for line in lines if line]


def _copy(r: Row) -> str:
    return f"{r['way']}, {r['layout']}: {r['bytes_per_s'] * _GB:.3g} GB/s" if r["largest"] else ""


def _fitted(r: Row) -> str:
    rate = f"loads at {r['load_bytes_per_s'] * _GB:.3g} GB/s"
    errors = f"within {r['median_error']:.0%} (median), {r['most_error']:.0%} (most)"
    return f"{r['arm']}: κ_crit {r['kappa_crit']:.3g}, {rate}, TTFT predicted {errors}"


def _compared(r: Row) -> str:
    return (
        f"{r['arm']} (tier {r['tier']}): {r['verdict']}; {r['cached_tokens']} of {r['tokens']} "
        f"tokens found; log-probabilities moved by {r['moved']:.2g} (computed anew "
        f"{r['noise']:.2g}, another prompt {r['control']:.2g})"
    )


def _policy(r: Row) -> str:
    # What is compared with its baseline, and neither that nor a copy alone.
    if not r.get("speedup") or r["policy"] == r["baseline"]:
        return ""
    return f"{r['system']} {r['cell']}: {r['policy']} {r['speedup']:.2f} times {r['baseline']}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * _MS:.3g} ms"


_SENTENCES: Mapping[str, Callable[[Row], str]] = {
    "copy": _copy, "compare": _compared, "fit": _fitted, "policy": _policy,
    "product": lambda r: f"product of {r['tokens']} tokens: {r['flops_per_s'] / 1e12:.3g} TFLOP/s",
    "engine": lambda r: "; ".join(r.get("unmeasured", ())),
    "unfitted": lambda r: f"{r['arm']}: no fit: {r['why']}",
    "decode": lambda r: f"{r['arm']}, batch {r['batch']}: step {_ms(r['step_s'])}, "
    f"between tokens {_ms(r['between_tokens_s'])}",
    "burst": lambda r: f"{r['arm']}, loads {r['loads']}: TTFT {_ms(r['ttft_s'])} (longest "
    f"{_ms(r['ttft_most_s'])}), step {_ms(r['step_s'])} (longest {_ms(r['step_most_s'])})",
}  # fmt: skip


# -- the page -------------------------------------------------------------------------------------


def page(result: Mapping[str, Any]) -> str:
    """What it was measured on, then rung by rung: how it ended, why, and what was found."""
    known = result["facts"]
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in known["machine"]["gpus"] or ()]
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    lines = [
        f"# Ladder of {result['date']}: {result['device']}",
        f"GPUs: {', '.join(gpus) or 'none'}; CUDA {known['cuda']}; {versions}; "
        f"{result['machine']}; {result['total_s']:.0f} s in all; model: {result['model']}",
    ]
    for rung in result["rungs"]:
        lines += [
            f"## {rung['rung']}: {rung['status']}",
            f"{rung['what']}; {rung['seconds']:.1f} s",
            *rung["why"],
            "\n".join(f"- {one}" for one in sentences(rung["rows"])),
        ]
    return "\n\n".join(line for line in lines if line) + "\n"
