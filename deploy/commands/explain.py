"""`kappa tables` and `kappa explain`: the cost model on the command line.

`tables` sets paper 001's figures beside ours; `explain` prices one request on one or more nodes,
and every load plan of it. Rates of plans come from a node's profile by formula, or from a file that
an engine measured (workers keep theirs under KAPPA_HOME, in profiles/). All seconds are undilated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands.console import Json, bad_parameter, print_json, print_table, print_text
from kappa import cost, paper
from kappa.cost import TokenCounts
from kappa.hardware import DEMO_NODES, NodeProfile, node_profile
from kappa.model import ModelShape
from kappa.plans.planners import alternatives, decoding
from kappa.plans.rates import LineFit, PlanRates, rates_from_law, rates_from_measured
from kappa.shapes import model_shape

_SEGMENTS = {"K": "load", "A": "activations", "R": "recompute", "C": "stays in host memory"}
_SYMBOLS = {"kappa": "κ", "kappa_crit": "κ_crit", "kappa_eff": "κ_eff"}


def tables(json_output: Json = False) -> None:
    """Print paper 001's tables and case studies beside our own arithmetic."""
    table2, table3 = paper.table2_rows(), paper.table3_rows()
    cases = [{"name": c.name, "paper": c.paper, "ours": c.ours} for c in paper.cases()]
    if json_output:
        print_json({"table2": table2, "table3": table3, "cases": cases})
        return
    slips = [
        {"where": s.where, "printed": s.printed, "holds": s.holds, "why": s.why}
        for s in paper.SLIPS
    ]
    for title, rows in (
        ("Table 2: B/G in KB/GFLOP", table2),
        ("Table 3: κ_crit as printed, from the printed factors, and with F/M corrected", table3),
        ("Case studies and derived figures", cases),
        ("Where the paper slips", slips),
    ):
        cells = [[_cell(key, value) for key, value in row.items()] for row in rows]
        print_table(title, list(rows[0]), cells, left=len(rows[0]))


def explain(
    model: Annotated[str, typer.Option("--model", help="Built-in name or config.json.")],
    cached: Annotated[int, typer.Option("--cached", min=0, help="Tokens in the host tier.")],
    new: Annotated[int, typer.Option("--new", min=1, help="Tokens to compute.")],
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="Catalogue name or profile JSON; repeat to compare."),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(help="Rates that an engine measured (JSON), for the plans of every node."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Plans are cut at blocks.")] = 16,
    room: Annotated[
        int | None, typer.Option(min=0, help="Tokens that a request may take on the device.")
    ] = None,
    cpu_gbps: Annotated[
        float, typer.Option(min=0, help="GB/s of KV that the node's CPU attends to; 0: none.")
    ] = 0.0,
    activations: Annotated[bool, typer.Option(help="Activations are stored beside the KV.")] = True,
    json_output: Json = False,
) -> None:
    """Price one request on one or more nodes: its κ, which side bounds it, its seconds, its plans.

    The first table is the law, loading first and computing then; below it every load plan, the
    chosen one marked, and what a decoding step behind the prompt takes.
    """
    counts = TokenCounts(device_tokens=0, cached_tokens=cached, new_tokens=new)
    found = []
    with bad_parameter():
        shape = model_shape(model)
        for profile in [node_profile(name) for name in node or DEMO_NODES]:
            plan_rates = _plan_rates(shape, profile, rates, cpu_gbps)
            behind = counts.cached_tokens + counts.device_tokens + counts.new_tokens
            ways = alternatives(
                plan_rates,
                counts,
                block_tokens=block_tokens,
                room_tokens=room,
                activations=activations,
            )
            plans = {
                "plans": [way.to_dict() for way in ways],
                "decoding": decoding(plan_rates, behind, block_tokens),
            }
            found.append((profile.name, request_cost(counts, shape, profile), plans))
    if json_output:
        nodes = [{"node": name, **costs, **plans} for name, costs, plans in found]
        print_json({**found[0][1], **found[0][2]} if len(found) == 1 else {"nodes": nodes})
        return
    print_text(f"{shape.name}: {cached:,} cached, {new:,} new tokens")
    _print_costs([name for name, _, _ in found], [costs for _, costs, _ in found])
    for name, _, plans in found:
        _print_plans(name if rates is None else str(rates), plans)
        if rates is not None:
            break


def request_cost(counts: TokenCounts, shape: ModelShape, node: NodeProfile) -> dict[str, Any]:
    """The cost model for one request; ``kappa_eff`` is None where no κ is memory-bound."""
    cached, new = counts.cached_tokens, counts.new_tokens
    effective = cost.kappa_eff(shape, node, new)
    return {
        "kappa": counts.ratio,
        "kappa_crit": cost.kappa_crit(shape, node),
        "kappa_eff": effective if math.isfinite(effective) else None,
        "bound": cost.bound(counts, shape, node),
        "ttft_s": cost.ttft_s(shape, node, cached, new),
        "load_s": cost.load_s(shape, node, cached),
        "compute_s": cost.compute_s(shape, node, new, cached),
        "plan": "load",
    }


def _plan_rates(
    shape: ModelShape, node: NodeProfile, measured: Path | None, cpu_gbps: float
) -> PlanRates:
    """What plans are made of: the file's, or the node's, with a CPU of that bandwidth if any."""
    if measured is not None:
        return rates_from_measured(measured)
    rates = rates_from_law(shape, node)
    if not cpu_gbps:
        return rates
    return replace(rates, attend=LineFit("CPU attention", rates.kv_bytes / (cpu_gbps * 1e9)))


def _print_costs(names: list[str], costs: list[dict[str, Any]]) -> None:
    rows = [
        [_SYMBOLS.get(key, key.removesuffix("_s")), *(_cell(key, c[key]) for c in costs)]
        for key in costs[0]
    ]
    print_table(None, ["", *names], rows, left=len(costs) + 1)
    if len(costs) > 1:
        best = min(range(len(costs)), key=lambda i: float(costs[i]["ttft_s"]))
        print_text(f"Least idle TTFT: {names[best]}")


def _print_plans(title: str, found: Mapping[str, Any]) -> None:
    """Every load plan of a request, the chosen one marked, and a decoding step behind it."""
    rows: list[Sequence[str]] = []
    refusals: dict[str, None] = {}
    for row in found["plans"]:
        if "ttft_s" not in row:
            refusals[row["refused"] or "nothing is cached"] = None
            continue
        parts = ", ".join(f"{_SEGMENTS[k]} {stop - start:,}" for k, start, stop in row["segments"])
        times = (_ms(row[key]) for key in ("ttft_s", "load_s", "compute_s"))
        rows.append((
            row["plan"] + (" *" if row["chosen"] else ""), *times,
            f"{row['load_bytes'] / 1e6:,.1f}", parts or "nothing is cached",
        ))  # fmt: skip
    columns = ("", "TTFT", "link", "gpu", "MB", "what")
    print_table(f"Load plans, {title}", columns, rows)
    for row in found["plans"]:
        if row["chosen"]:
            print_text(f"* chosen: {row['why']}")
    print_text("\n".join([*refusals, f"A decoding step behind it: {_step(found['decoding'])}"]))


def _step(step: Mapping[str, Any]) -> str:
    ways = [f"{_ms(step['device_s'])} on the device"]
    if step["load_all_s"] is not None:
        ways.append(f"{_ms(step['load_all_s'])} loading all from host memory")
    if step["split_s"] is not None:
        ways.append(f"{_ms(step['cpu_all_s'])} with the CPU attending to all")
        ways.append(f"{_ms(step['split_s'])} with it attending to {step['cpu_share']:.0%}")
    return ", ".join(ways)


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:,.2f} ms"


def _cell(key: str, value: object) -> str:
    if value is None:
        return "never" if key == "kappa_eff" else "(lost)"
    if isinstance(value, float):
        return f"{value * 1e3:,.1f} ms" if key.endswith("_s") else f"{value:,.4g}"
    return str(value)
