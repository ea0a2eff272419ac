"""`kappa tables` and `kappa explain`: the cost model on the command line.

`tables` sets paper 001's figures beside ours; `explain` prices one request on one or more nodes,
and every load plan of it. Rates of plans come from a node's profile by formula, or from a file that
an engine measured (workers keep theirs under KAPPA_HOME, in profiles/). All seconds are undilated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands.console import (
    Json,
    bad_parameter,
    print_json,
    print_table,
    print_text,
    warn,
)
from kappa import cost, paper
from kappa.checks import read_json_object
from kappa.cost import TokenCounts
from kappa.hardware import DEMO_NODES, NodeProfile, node_profile
from kappa.model import ModelShape
from kappa.model_config import unlisted
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import alternatives, decoding
from kappa.plans.rates import LineFit, rates_from_law
from kappa.shapes import model_shape

_SEGMENTS = {"K": "load", "A": "activations", "R": "recompute", "C": "stays in host memory"}
_SYMBOLS = {"kappa": "κ", "kappa_crit": "κ_crit", "kappa_eff": "κ_eff"}


def tables(json_output: Json = False) -> None:
    """Print paper 001's tables and case studies beside our own arithmetic."""
    table2, table3 = paper.table2_rows(), paper.table3_rows()
    cases = [{"name": c.name, "paper": c.paper, "ours": c.ours} for c in paper.cases()]
    keys = ("where", "printed", "holds", "why")
    slips = [{key: getattr(slip, key) for key in keys} for slip in paper.SLIPS]
    if json_output:
        print_json({"table2": table2, "table3": table3, "cases": cases})
        return
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
    names, costs, plans = [], [], []
    with bad_parameter():
        shape = model_shape(model)
        if Path(shape.source).is_file() and (
            note := unlisted(read_json_object(shape.source, "model config"))
        ):
            warn(note)
        for profile in [node_profile(name) for name in node or DEMO_NODES]:
            found = rates_from_law(shape, profile) if rates is None else rates_from_measured(rates)
            if cpu_gbps and rates is None:
                attend = LineFit("CPU attention", found.kv_bytes / (cpu_gbps * 1e9))
                found = replace(found, attend=attend)
            ways = alternatives(
                found, counts, block_tokens=block_tokens, room_tokens=room, activations=activations
            )
            names.append(profile.name)
            costs.append(request_cost(counts, shape, profile))
            plans.append({
                "plans": [way.to_dict() for way in ways],
                "decoding": decoding(found, cached + new, block_tokens),
            })  # fmt: skip
    if json_output:
        nodes = [
            {"node": n, **c, **p} for n, c, p in zip(names, costs, plans, strict=True)
        ]  # fmt: skip
        print_json({**costs[0], **plans[0]} if len(nodes) == 1 else {"nodes": nodes})
        return
    print_text(f"{shape.name}: {cached:,} cached, {new:,} new tokens")
    rows = [
        [_SYMBOLS.get(key, key.removesuffix("_s")), *(_cell(key, c[key]) for c in costs)]
        for key in costs[0]
    ]
    print_table(None, ["", *names], rows, left=len(costs) + 1)
    if len(costs) > 1:
        best = min(range(len(costs)), key=lambda i: float(costs[i]["ttft_s"]))
        print_text(f"Least idle TTFT: {names[best]}")
    if rates is not None:
        names, plans = [str(rates)], plans[:1]
    for name, row in zip(names, plans, strict=True):
        _print_plans(name, row)


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


def _print_plans(title: str, found: Mapping[str, Any]) -> None:
    """Every load plan of a request, the chosen one marked, and a decoding step behind it."""
    rows, notes = [], []
    for row in found["plans"]:
        if "ttft_s" not in row:
            notes.append(row["refused"] or "nothing is cached")
            continue
        parts = ", ".join(f"{_SEGMENTS[k]} {stop - start:,}" for k, start, stop in row["segments"])
        rows.append((
            row["plan"] + (" *" if row["chosen"] else ""),
            *(_ms(row[key]) for key in ("ttft_s", "load_s", "compute_s")),
            f"{row['load_bytes'] / 1e6:,.1f}", parts or "nothing is cached",
        ))  # fmt: skip
    columns = ("", "TTFT", "link", "gpu", "MB", "what")
    print_table(f"Load plans, {title}", columns, rows)
    chosen = [f"* chosen: {row['why']}" for row in found["plans"] if row["chosen"]]
    step = found["decoding"]
    ways = [f"{_ms(step['device_s'])} on the device"]
    if step["load_all_s"] is not None:
        ways.append(f"{_ms(step['load_all_s'])} loading all from host memory")
    if step["split_s"] is not None:
        ways.append(f"{_ms(step['cpu_all_s'])} with the CPU attending to all")
        ways.append(f"{_ms(step['split_s'])} with it attending to {step['cpu_share']:.0%}")
    behind = f"A decoding step behind it: {', '.join(ways)}"
    print_text("\n".join([*chosen, *dict.fromkeys(notes), behind]))


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:,.2f} ms"


def _cell(key: str, value: object) -> str:
    if value is None:
        return "never" if key == "kappa_eff" else "(lost)"
    if isinstance(value, float):
        return f"{value * 1e3:,.1f} ms" if key.endswith("_s") else f"{value:,.4g}"
    return str(value)
