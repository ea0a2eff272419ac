"""The load plans that ``kappa explain`` prints for one request: every way, and the chosen one.

Rates come from a node's profile by formula, or from a file that an engine measured
(`engine.profiling`; workers keep theirs under KAPPA_HOME, in profiles/). All seconds are undilated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kappa.cost import TokenCounts
from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import alternatives, decoding
from kappa.plans.rates import LineFit, PlanRates, rates_from_law

_WORDS = {"K": "load", "A": "activations", "R": "recompute", "C": "stays in host memory"}


def plan_rates(
    shape: ModelShape, node: NodeProfile, measured: Path | None, cpu_gbps: float
) -> PlanRates:
    """What plans are made of: the file's, or the law's, with a CPU of that bandwidth if any.

    Raises:
        ValueError: a file that cannot be read or planned with.
    """
    if measured is not None:
        return rates_from_measured(measured)
    rates = rates_from_law(shape, node)
    if not cpu_gbps:
        return rates
    return replace(rates, attend=LineFit("CPU attention", rates.kv_bytes / (cpu_gbps * 1e9)))


def explain_plans(
    counts: TokenCounts,
    rates: PlanRates,
    block_tokens: int,
    room_tokens: int | None,
    *,
    activations: bool,
) -> dict[str, Any]:
    """{"plans": every way and "auto", "decoding": a step behind the prompt}."""
    found = alternatives(
        rates, counts, block_tokens=block_tokens, room_tokens=room_tokens, activations=activations
    )
    behind = counts.cached_tokens + counts.device_tokens + counts.new_tokens
    return {
        "plans": [one.to_dict() for one in found],
        "decoding": decoding(rates, behind, block_tokens),
    }


def print_plans(console: Console, title: str, found: Mapping[str, Any]) -> None:
    """Both, for people."""
    table = Table(title=f"Load plans, {title}", title_justify="left")
    table.add_column("")
    for name in ("TTFT", "link", "gpu", "MB"):
        table.add_column(name, justify="right")
    table.add_column("what")
    refusals: dict[str, None] = {}
    for row in found["plans"]:
        if "ttft_s" not in row:
            refusals[row["refused"] or "nothing is cached"] = None
            continue
        parts = ", ".join(f"{_WORDS[k]} {stop - start:,}" for k, start, stop in row["segments"])
        table.add_row(
            row["plan"] + (" *" if row["chosen"] else ""),
            *(_ms(row[key]) for key in ("ttft_s", "load_s", "compute_s")),
            f"{row['load_bytes'] / 1e6:,.1f}", parts or "nothing is cached",
        )  # fmt: skip
    console.print(table)
    for row in found["plans"]:
        if row["chosen"]:
            console.print(f"* chosen: {row['why']}")
    for reason in refusals:
        console.print(reason)
    console.print(f"A decoding step behind it: {', '.join(_step(found['decoding']))}")


def _step(step: Mapping[str, Any]) -> list[str]:
    ways = [f"{_ms(step['device_s'])} on the device"]
    if step["load_all_s"] is not None:
        ways.append(f"{_ms(step['load_all_s'])} loading all from host memory")
    if step["split_s"] is not None:
        ways.append(f"{_ms(step['cpu_all_s'])} with the CPU attending to all")
        ways.append(f"{_ms(step['split_s'])} with it attending to {step['cpu_share']:.0%}")
    return ways


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
