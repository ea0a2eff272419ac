"""``kappa tables``, ``kappa explain`` and ``kappa roofline``: the law on the command line.

``tables`` sets paper 001's figures beside ours, ``explain`` prices one request on one or more
nodes, ``roofline`` draws the paper's Figures 4 and 7. Each prints for people, or one JSON object
with ``--json``. All seconds are undilated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.commands.law_plans import explain_plans, plan_rates, print_plans
from kappa import cost as law
from kappa import paper
from kappa.cost import TokenCounts
from kappa.hardware import DEMO_NODES, NodeProfile, node_profile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.shapes import model_shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_ROOFLINE_MODELS = ("qwen3-235b-a22b", "deepseek-v3")
_GPU_COLOURS = {"A100": "#4c72b0", "H100": "#55a868", "B200": "#c44e52"}
_LINK_COLOURS = {"PCIe-5": "#c44e52", "NVLink-C2C": "#8172b3", "unified HBM": "#64b5cd"}
_MARKERS = ("o", "s", "^", "D", "v")


def tables(json_output: JsonOption = False) -> None:
    """Print paper 001's tables and case studies beside our own arithmetic."""
    table2, table3 = paper.table2_rows(), paper.table3_rows()
    cases = [{"name": c.name, "paper": c.paper, "ours": c.ours} for c in paper.cases()]
    if json_output:
        _print_json({"table2": table2, "table3": table3, "cases": cases})
        return
    console = Console()
    console.print(_rich_table("Table 2: B/G in KB/GFLOP", table2))
    console.print(
        _rich_table(
            "Table 3: κ_crit as printed, from the printed factors, and with F/M corrected", table3
        )
    )
    console.print(_rich_table("Case studies and derived figures", cases))
    slips = [
        {"where": s.where, "printed": s.printed, "holds": s.holds, "why": s.why}
        for s in paper.SLIPS
    ]
    console.print(_rich_table("Where the paper slips", slips))


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
    json_output: JsonOption = False,
) -> None:
    """Price one request on one or more nodes: its κ, which side bounds it, its seconds, its plans.

    The first table is the law, loading first and computing then; below it every load plan, the
    chosen one marked, and what a decoding step behind the prompt takes.
    """
    counts = TokenCounts(device_tokens=0, cached_tokens=cached, new_tokens=new)
    try:
        shape = model_shape(model)
        profiles = [node_profile(name) for name in node or DEMO_NODES]
        answers = [explain_request(counts, shape, profile) for profile in profiles]
        plans = [
            explain_plans(
                counts, plan_rates(shape, profile, rates, cpu_gbps), block_tokens, room,
                activations=activations,
            )
            for profile in profiles
        ]  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json_output:
        whole = [{**answer, **more} for answer, more in zip(answers, plans, strict=True)]
        if len(whole) == 1:
            _print_json(whole[0])
        else:
            named = zip(profiles, whole, strict=True)
            _print_json({"nodes": [{"node": p.name, **answer} for p, answer in named]})
        return
    console = Console()
    console.print(f"{shape.name}: {cached:,} cached, {new:,} new tokens")
    _print_law(console, profiles, answers)
    for profile, found in zip(profiles, plans, strict=True):
        print_plans(console, profile.name if rates is None else str(rates), found)
        if rates is not None:
            break


def _print_law(
    console: Console, profiles: Sequence[NodeProfile], answers: Sequence[dict[str, Any]]
) -> None:
    table = Table("", *(p.name for p in profiles))
    for key in answers[0]:
        table.add_row(_label(key), *(_cell(key, answer[key]) for answer in answers))
    console.print(table)
    if len(answers) > 1:
        best = min(range(len(answers)), key=lambda i: float(answers[i]["ttft_s"]))
        console.print(f"Least idle TTFT: {profiles[best].name}")


def explain_request(counts: TokenCounts, shape: ModelShape, node: NodeProfile) -> dict[str, Any]:
    """What ``explain`` prints for one node; ``kappa_eff`` is None where no κ is memory-bound."""
    cached, new = counts.cached_tokens, counts.new_tokens
    effective = law.kappa_eff(shape, node, new)
    return {
        "kappa": counts.ratio,
        "kappa_crit": law.kappa_crit(shape, node),
        "kappa_eff": effective if math.isfinite(effective) else None,
        "bound": law.bound(counts, shape, node),
        "ttft_s": law.ttft_s(shape, node, cached, new),
        "load_s": law.load_s(shape, node, cached),
        "compute_s": law.compute_s(shape, node, new, cached),
        "plan": "load",
    }


def roofline(
    out: Annotated[Path, typer.Option("--out", help="PNG to write.")] = Path("roofline.png"),
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Built-in name or config.json; repeat.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Draw the rooflines of paper 001's Figures 4 and 7, with its peaks and units."""
    try:
        shapes = [model_shape(name) for name in model or _ROOFLINE_MODELS]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a folder: create it, or change --out")
    draw_rooflines(out, shapes)
    if json_output:
        _print_json({"out": str(out), "models": [shape.name for shape in shapes]})
    else:
        Console().print(f"Wrote {out}")


def draw_rooflines(out: Path, shapes: Sequence[ModelShape]) -> None:
    """Write both panels as a PNG: GPUs by PCIe generation (left), a B200 by link (right)."""
    # Drawing is rare and matplotlib slow to import; the other commands should not wait for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    # The GPUs share the links' slopes: one grey line each, or the last GPU would hide the others.
    for link, style in (("PCIe-4", "--"), ("PCIe-5", "-")):
        _draw_roof(left, "B200", link, "0.55", style, label=link, upto_ridge=True)
    for gpu, colour in _GPU_COLOURS.items():
        peak, link_rate = _roof(gpu, "PCIe-5")
        left.plot((peak / link_rate, 1e7), (peak, peak), color=colour, linewidth=2, label=gpu)
    for link, colour in _LINK_COLOURS.items():
        _draw_roof(right, "B200", link, colour, "-", label=f"B200, {link}")
    for index, shape in enumerate(shapes):
        marker = _MARKERS[index % len(_MARKERS)]
        on_h100 = ("H100", "PCIe-5")
        _draw_ratios(left, shape, on_h100, (1, 10, 100, 1000), marker, above=index % 2 == 1)
        for link in _LINK_COLOURS:
            ratios = (100, 5000) if link != "unified HBM" else (5000,)
            _draw_ratios(right, shape, ("B200", link), ratios, marker, above=False)
    left.set_title("Figure 4: GPUs and PCIe generations (points on H100, PCIe-5)")
    right.set_title("Figure 7: a B200 behind PCIe-5, NVLink-C2C, unified HBM")
    left.set_ylabel("attainable FLOP/s")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlim=(2e1, 3e6), ylim=(1e12, 1.2e16))
        axes.set_xlabel("arithmetic intensity of offloaded prefill, (F/M)/κ, FLOP/byte")
        axes.grid(True, which="major", alpha=0.25)
        _draw_legend(axes, shapes)
    figure.suptitle(
        "Rooflines of KV offloading, peaks as paper 001 prints them (FP16 with sparsity)"
    )
    figure.savefig(out, dpi=120)


def _roof(gpu: str, link: str) -> tuple[float, float]:
    """Peak FLOP/s and link bytes/s in the paper's units: PCIe binary, the rest decimal."""
    peak = paper.SPARSE_FP16_TFLOPS[gpu] * 1e12
    kb_per_gb = 1024.0**2 if link.startswith("PCIe") else 1e6
    return peak, paper.LINK_GB_PER_S[link] * kb_per_gb * paper.KB


def _draw_roof(
    axes: Axes,
    gpu: str,
    link: str,
    colour: str,
    style: str,
    label: str,
    upto_ridge: bool = False,
) -> None:
    peak, link_rate = _roof(gpu, link)
    intensities = [1e1, peak / link_rate] + ([] if upto_ridge else [1e7])
    heights = [min(peak, link_rate * x) for x in intensities]
    axes.plot(intensities, heights, color=colour, linestyle=style, linewidth=2, label=label)


def _draw_ratios(
    axes: Axes,
    shape: ModelShape,
    node: tuple[str, str],
    ratios: Sequence[float],
    marker: str,
    above: bool,
) -> None:
    """Mark where a model's requests of the given κ stand on a node's roofline."""
    peak, link_rate = _roof(*node)
    flops_per_byte = 2.0 * shape.params_active / kv_bytes_per_token(shape)
    for ratio in ratios:
        x = flops_per_byte / ratio
        y = min(peak, link_rate * x)
        axes.plot(x, y, marker=marker, color="black", markersize=6, linestyle="none")
        axes.annotate(
            f"κ={ratio:g}",
            (x, y),
            xytext=(-6, 7) if above else (6, -13),
            textcoords="offset points",
            ha="right" if above else "left",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


def _draw_legend(axes: Axes, shapes: Sequence[ModelShape]) -> None:
    for index, shape in enumerate(shapes):
        marker = _MARKERS[index % len(_MARKERS)]
        axes.plot([], [], marker=marker, color="black", linestyle="none", label=shape.name)
    axes.legend(loc="lower right", fontsize=9)


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, allow_nan=False))


def _label(key: str) -> str:
    symbols = {"kappa": "κ", "kappa_crit": "κ_crit", "kappa_eff": "κ_eff"}
    return symbols.get(key, key.removesuffix("_s"))


def _cell(key: str, value: object) -> str:
    if value is None:
        return "never" if key == "kappa_eff" else "(lost)"
    if isinstance(value, float):
        return f"{value * 1e3:,.1f} ms" if key.endswith("_s") else f"{value:,.4g}"
    return str(value)


def _rich_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(key, value) for key, value in row.items()))
    return table
