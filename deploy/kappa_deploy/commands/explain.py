"""`kappa tables` and `kappa explain`: the cost model on the command line.

`tables` sets paper 001's figures beside ours, and models and nodes side by side; `explain` prices
one request on one or more nodes, and each of its load plans. Rates of plans come from a node's
profile by formula, or from a file that an engine measured (workers keep theirs under KAPPA_HOME, in
profiles/). All seconds are undilated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kappa import cost, paper
from kappa.checks import read_json_object
from kappa.cost import TokenCounts, chunk_work, decode_work
from kappa.hardware import CATALOGUE, DEMO_NODES, NodeProfile, node_profile
from kappa.model import ModelShape, kv_bytes_per_token, weight_bytes
from kappa.model_config import unlisted
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import alternatives, decoding
from kappa.plans.rates import LineFit, PlanRates, rates_from_law
from kappa.power import table5_rows
from kappa.shapes import SHAPES, model_shape
from kappa.silicon import silicon_of
from kappa_deploy.commands.console import (
    Json,
    KvDtype,
    bad_parameter,
    print_json,
    print_table,
    print_text,
)
from kappa_router.console import warn

_NODES = ("h100-pcie5", "gh200-c2c")
_SEGMENTS = {"K": "load", "A": "activations", "R": "recompute", "C": "stays in host memory"}
_SYMBOLS = {"kappa": "κ", "kappa_crit": "κ_crit", "kappa_eff": "κ_eff"}


def tables(
    model: Annotated[
        list[str] | None, typer.Option(help="For the last table, instead of all built-in ones.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="For the last table; repeat for several.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Print paper 001's tables and case studies beside our own arithmetic, then nodes, then models
    with KV of 16 bits and of 8."""
    with bad_parameter():
        models = [model_row(name, node or _NODES) for name in model or SHAPES]
    cases = [
        {"name": c.name, "paper": c.paper, "recomputed": c.recomputed, "one_way": c.one_way,
         "kind": "quotient" if c.quotient else "equation"}
        for c in paper.cases()
    ]  # fmt: skip
    nodes = [
        {"node": n.name, "gpu": n.gpu, "link": n.link_name, "gbps": n.peak_link_bytes_per_s / 1e9,
         "load_gbps": n.h2d_bytes_per_s / 1e9, "store_gbps": n.store_bytes_per_s / 1e9,
         "dense_tflops": n.flops_per_s / 1e12, "hbm_tbps": n.hbm_bytes_per_s / 1e12}
        for n in CATALOGUE.values()
    ]  # fmt: skip
    keys = ("where", "printed", "holds", "why")
    slips = [{key: getattr(slip, key) for key in keys} for slip in paper.SLIPS]
    found: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "table2": ("Table 2: B/G in KB/GFLOP", paper.table2_rows()),
        "table3": (
            "Table 3: κ_crit as printed, from the printed factors, with F/M corrected, and besides "
            "of dense peaks in decimal units",
            paper.table3_rows(),
        ),
        "table5": (
            "Table 5: watts of a GPU, measured by the paper, and modelled (kappa.power, fitted to "
            "these four averages; off: the residual), as are the joules of a prompt on its eight "
            "GPUs, 40 prompts a step",
            table5_rows(),
        ),
        "cases": (
            "Case studies and derived figures, recomputed from the paper's own inputs: a check of "
            "its arithmetic, not a measurement of ours; a quotient of two printed figures cannot "
            "miss; one_way: with the data sheet's 450 GB/s of NVLink-C2C one way",
            cases,
        ),
        "law": (
            "The same figures by our law, which can miss: a step also reads its weights and "
            "attends to what is cached (kappa.cost, data-sheet rates)",
            paper.law_rows(),
        ),
        "slips": ("Where the paper slips", slips),
        "nodes": (
            "Nodes: data-sheet figures, and what large copies in and out reach of the link "
            "(docs/silicon.md); of pcie and c2c assumed sustained ones",
            nodes,
        ),
        "models": (
            "Models: layers with KV that grows, KV in KB per token and the paper's κ_crit on nodes "
            "(Eq. 6), KV in 16 bits and in 8",
            models,
        ),
    }
    if json_output:
        print_json({name: rows for name, (_, rows) in found.items()})
        return
    for title, rows in found.values():
        cells = [[_cell(key, value) for key, value in row.items()] for row in rows]
        print_table(title, list(rows[0]), cells, left=len(rows[0]))


def model_row(name: str, nodes: Sequence[str]) -> dict[str, Any]:
    """A model's attention, layers, experts, active parameters and F/M, and what halving its KV
    changes: KB per token and the paper's κ_crit on each node."""
    wide, narrow = model_shape(name, "bfloat16"), model_shape(name, "fp8")
    row: dict[str, Any] = {
        "model": wide.name,
        "attention": wide.attention,
        "layers": f"{wide.kv_layers} of {wide.layers}",
        "experts": f"{wide.experts_active} of {wide.experts}" if wide.experts else "dense",
        "active_b": wide.params_active / 1e9,
    }
    for bits, shape in (("16", wide), ("8", narrow)):
        row[f"kv_kb_{bits}"] = kv_bytes_per_token(shape) / 1e3
        for profile in map(node_profile, nodes):
            flops_per_byte = 2.0 * shape.params_active / kv_bytes_per_token(shape)
            bytes_per_flop = profile.peak_link_bytes_per_s / profile.flops_per_s
            row[f"{profile.name}_{bits}"] = paper.kappa_crit(flops_per_byte, bytes_per_flop)
    return row


Silicon = Annotated[
    str | None,
    typer.Option(help="Beside a table of real GPUs, system/model/tpN (docs/silicon.md)."),
]


Gpus = Annotated[
    int, typer.Option(min=1, help="GPUs of each node that work as one (tensor parallel).")
]


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
    host_weights: Annotated[
        float, typer.Option(min=0, help="GB of the weights that lie in host memory.")
    ] = 0.0,
    silicon: Silicon = None,
    tp: Gpus = 1,
    kv_dtype: KvDtype = "auto",
    json_output: Json = False,
) -> None:
    """Price one request on one or more nodes: its κ, which side bounds it, its seconds, its plans.

    The first table is the law, loading first and computing then; below it every load plan, each
    layer loaded beside the computing of the one before (Eq. 4, `engine.load: layers`), the chosen
    one marked, and what a decoding step behind the prompt takes.
    """
    counts = TokenCounts(device_tokens=0, cached_tokens=cached, new_tokens=new)
    names, costs, plans = [], [], []
    with bad_parameter():
        if rates is not None and (kv_dtype != "auto" or tp > 1):
            raise ValueError(f"{rates} holds rates of what was measured: drop --kv-dtype and --tp")
        shape = _noted_shape(model, kv_dtype)
        real = silicon_cost(counts, shape, silicon) if silicon else None
        crossing = min(host_weights * 1e9, weight_bytes(shape))
        for name in node or DEMO_NODES:
            profile = replace(node_profile(name).times(tp), host_weight_bytes=crossing)
            if note := _too_large(shape, profile):
                warn(note)
            found = rates_from_measured(rates) if rates else _rates(shape, profile, cpu_gbps)
            # Of MLA's two forms of attention a prompt may take the other than decoding.
            here = replace(profile, host_weight_bytes=0.0)
            prompt = None if rates else cost.step_model(shape, here, new, cached)
            names.append(profile.name + (f" tp{tp}" if tp > 1 else ""))
            costs.append(request_cost(counts, shape, profile))
            plans.append(_planned(found, prompt, counts, (block_tokens, room, activations)))
    if json_output:
        nodes = [{"node": n, **c, **p} for n, c, p in zip(names, costs, plans, strict=True)]
        whole = {**costs[0], **plans[0]} if len(nodes) == 1 else {"nodes": nodes}
        print_json(whole | ({"silicon": real} if real else {}))
        return
    print_text(f"{shape.name}: {cached:,} cached, {new:,} new tokens")
    _print_costs(names, costs)
    if real:
        _print_silicon(real)
    if rates is not None:
        names, plans = [str(rates)], plans[:1]
    for name, row in zip(names, plans, strict=True):
        _print_plans(name, row)


def _noted_shape(model: str, kv_dtype: str) -> ModelShape:
    """The model's shape, with a warning where its family is none that we know."""
    shape = model_shape(model, kv_dtype)
    if Path(shape.source).is_file() and (
        note := unlisted(read_json_object(shape.source, "model config"))
    ):
        warn(note)
    return shape


def _planned(
    found: PlanRates, prompt: cost.StepModel | None, counts: TokenCounts,
    how: tuple[int, int | None, bool],
) -> dict[str, Any]:  # fmt: skip
    """Every load plan of a request, and what a decoding step behind it takes.

    prompt: the step's constants of its prompt, if they are others; how: tokens of a block, tokens
    of the device that it may take (None: all), and whether activations are stored.
    """
    block_tokens, room, activations = how
    step = decoding(found, counts.cached_tokens + counts.new_tokens, block_tokens)
    ways = alternatives(
        found if prompt is None else replace(found, step=prompt), counts,
        block_tokens=block_tokens, room_tokens=room, activations=activations,
    )  # fmt: skip
    return {"plans": [way.to_dict() for way in ways], "decoding": step}


def _too_large(shape: ModelShape, profile: NodeProfile) -> str:
    """A sentence if the model's weights do not fit the node's memory; empty where they do, or its
    memory is not known."""
    needed, held = weight_bytes(shape) - profile.host_weight_bytes, profile.hbm_bytes
    if not 0 < held < needed:
        return ""
    gpus = math.ceil(needed / held * profile.gpus)
    return (
        f"{shape.name} does not fit {profile.name} with --tp {profile.gpus}: its weights take "
        f"{needed / 1e9:,.4g} GB, the memory has {held / 1e9:,.4g} GB; it takes {gpus} such GPUs"
    )


def _rates(shape: ModelShape, profile: NodeProfile, cpu_gbps: float) -> PlanRates:
    """Rates by formula; cpu_gbps: GB/s of KV that the node's CPU attends to, 0: none."""
    found = rates_from_law(shape, profile)
    if not cpu_gbps:
        return found
    return replace(found, attend=LineFit("CPU attention", found.kv_bytes / (cpu_gbps * 1e9)))


def _print_costs(names: Sequence[str], costs: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        [_SYMBOLS.get(key, key.removesuffix("_s")), *(_cell(key, c[key]) for c in costs)]
        for key in costs[0]
    ]
    print_table(None, ["", *names], rows, left=len(costs) + 1)
    if len(costs) > 1:
        best = min(range(len(costs)), key=lambda i: float(costs[i]["ttft_s"]))
        print_text(f"Least idle TTFT: {names[best]}")


def request_cost(counts: TokenCounts, shape: ModelShape, node: NodeProfile) -> dict[str, Any]:
    """The cost model for one request; ``kappa_eff`` is None where no κ is memory-bound."""
    effective = cost.kappa_eff(shape, node, counts.new_tokens)
    idle = cost.idle_cost(counts, shape, node)
    return {
        "kappa": counts.ratio,
        "kappa_crit": idle.kappa_crit,
        "kappa_eff": effective if math.isfinite(effective) else None,
        "bound": idle.bound,
        "ttft_s": idle.ttft_s,
        "load_s": idle.load_s,
        "compute_s": idle.compute_s,
        "plan": "load",
    }


def silicon_cost(counts: TokenCounts, shape: ModelShape, name: str) -> dict[str, Any]:
    """One step that computes the new tokens behind the cached ones, and one that decodes behind
    them, by a table of a real GPU and by the law for it; ValueError for a table of another model.

    beyond: parts of the steps that the table does not reach.
    """
    table = replace(silicon_of(shape, name), beyond=set())
    new, cached = counts.new_tokens, counts.cached_tokens
    real_s, law_s = table.step_s([(new, cached)]), table.law.work_s(chunk_work(new, cached))
    decode_s = table.step_s([], 1, new + cached)
    decode_law_s = table.law.work_s(decode_work(1, new + cached))
    return {
        "table": name, "compute_s": real_s, "law_s": law_s, "error": law_s / real_s - 1,
        "decode_s": decode_s, "decode_law_s": decode_law_s,
        "decode_error": decode_law_s / decode_s - 1, "beyond": sorted(table.beyond),
    }  # fmt: skip


def _print_silicon(real: Mapping[str, Any]) -> None:
    print_text(
        f"{real['table']}: {_ms(real['compute_s'])} of computing by its table, "
        f"{_ms(real['law_s'])} by the law ({real['error']:+.0%}); then {_ms(real['decode_s'])} "
        f"a token, {_ms(real['decode_law_s'])} by the law ({real['decode_error']:+.0%})"
    )
    if real["beyond"]:
        parts = " and ".join(real["beyond"])
        warn(f"{real['table']} does not reach as far: {parts} continue as the law has them")


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
        return {"kappa_eff": "never", "one_way": "-"}.get(key, "(lost)")
    if key == "off" and isinstance(value, float):
        return f"{value:+.1%}"
    if isinstance(value, float):
        return f"{value * 1e3:,.1f} ms" if key.endswith("_s") else f"{value:,.4g}"
    return str(value)
