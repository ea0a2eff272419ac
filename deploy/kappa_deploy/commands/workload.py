"""`kappa workload`: how many tokens a workload's requests reuse and compute, and where that hurts.

Draws the distributions of paper 001's Figure 3 for any workload, puts the paper's own figures
beside ours, and shows for each node of a cluster which share of the requests is memory-bound there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kappa.shapes import model_shape
from kappa_deploy.commands import console
from kappa_loadtest.datasets import open_workload
from kappa_simulator.clusters import SimulatedCluster, cluster_named
from kappa_workload.analysis import Ratios, analyse, engine_ratios, source_ratios
from kappa_workload.replay import ENGINE_BLOCK_TOKENS
from kappa_workload.shapes import Workload

Critical = dict[str, float | None]
"""κ_crit by name; None: never."""

_LEAST_SHOWN = 0.1  # an axis of logarithms has no zero


def workload(
    name: Annotated[
        str,
        typer.Argument(
            help="A built-in workload, a file, a published data set's folder, or hf:OWNER/NAME."
        ),
    ],
    cluster: console.ClusterName = "mixed",
    model: console.ModelName = "llama-3.1-8b",
    kv_dtype: console.KvDtype = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json or a model's folder, to measure texts.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Read no more talks, questions or records of texts."),
    ] = None,
    as_cut: Annotated[
        bool, typer.Option("--as-cut", help="ShareGPT lengths without the estimated history.")
    ] = False,
    json_output: console.Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write the picture there, as PNG.")] = None,
) -> None:
    """Show cached and new tokens of a workload, their ratio, and each node's critical ratio."""
    with console.bad_parameter():
        where = cluster_named(cluster)
        shape = model_shape(model, kv_dtype)
        read = open_workload(
            name,
            tokenizer=tokenizer,
            block_tokens=ENGINE_BLOCK_TOKENS,
            max_context_tokens=None,
            whole_history=not as_cut,
            limit=limit,
            readers=1,
        )
        profiles = {node.name: node.profile for node in where.nodes}
        figures = analyse(read, shape, profiles) | {"cluster": where.name, "model": shape.name}
        if plot is not None:
            _draw(read, where, figures["kappa_crit"], plot)
    if json_output:
        console.print_json(figures)
    else:
        _print(figures, where)


def _draw(read: Workload, where: SimulatedCluster, critical: Critical, path: Path) -> None:
    """Distribution functions of new, cached and κ, with each kind of node's κ_crit."""
    # Drawing is rare and matplotlib slow to import; the other commands should not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: give a name that ends in .png")
    views: dict[str, Ratios] = {
        "as the source counts": source_ratios(read),
        f"in an engine, blocks of {ENGINE_BLOCK_TOKENS}": engine_ratios(read),
    }
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    new, cached, kappa = figure.subplots(1, 3, sharey=True)
    for label, ratios in views.items():
        for axes, values in (
            (new, ratios.new_tokens), (cached, ratios.cached_tokens), (kappa, ratios.kappa),
        ):  # fmt: skip
            shown = np.sort(np.maximum(values, _LEAST_SHOWN))
            axes.step(shown, np.arange(1, len(shown) + 1) / len(shown), where="post", label=label)
    for number, (kind, limit) in enumerate(_kinds(where, critical).items()):
        if limit is None:
            continue
        # Lines of like nodes nearly coincide: dashes of different phase show both.
        style = (7 * number, (7, 7))
        kappa.axvline(limit, color=f"C{number + 2}", linestyle=style, label=f"κ_crit {kind}")
    for axes, title in ((new, "new tokens"), (cached, "cached tokens"), (kappa, "κ")):
        axes.set_xscale("log")
        axes.set_xlabel(f"{title} (none: at {_LEAST_SHOWN})")
        axes.grid(alpha=0.3)
    new.set_ylabel("share of requests")
    kappa.legend(fontsize="small")
    figure.suptitle(f"{read.name}: {read.source}", fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from None


def _kinds(where: SimulatedCluster, critical: Critical) -> Critical:
    """κ_crit of each kind of node; nodes of a kind have one GPU, link and κ_crit."""
    kinds: Critical = {}
    for node in where.nodes:
        label = f"{node.profile.gpu} {node.profile.link_name}"
        if kinds.get(label, critical[node.name]) != critical[node.name]:
            label = node.name
        kinds[label] = critical[node.name]
    return kinds


def _print(figures: dict[str, Any], where: SimulatedCluster) -> None:
    notes = "".join(f"\n  {note}" for note in figures["notes"])
    console.print_text(
        f"{figures['workload']}: {figures['requests']:,} requests of {figures['sessions']:,} "
        f"sessions ({figures['source']}){notes}"
    )
    views = {
        "as the source counts": figures,
        f"in an engine: blocks of {ENGINE_BLOCK_TOKENS}, cold at first": figures["engine"],
    }
    for title, view in views.items():
        rows = [
            (symbol, *map(_number, view[key].values()))
            for key, symbol in (("new", "new"), ("cached", "cached"), ("kappa", "κ"))
        ]
        console.print_table(title, ("", "p10", "p50", "p90", "p99"), rows)
    critical, shares = figures["kappa_crit"], []
    for kind, limit in _kinds(where, critical).items():
        names = [name for name in critical if critical[name] == limit]
        above = (view["share_above"][names[0]] for view in views.values())
        shown = "never" if limit is None else f"{limit:.4g}"
        shares.append((kind, str(len(names)), shown, *map(console.percent, above)))
    columns = ("node", "count", "κ_crit", "memory-bound", "in an engine")
    console.print_table(f"{figures['model']} on {figures['cluster']}", columns, shares)
    if figures["paper"]:
        beside = [
            (
                r["where"],
                f"{r['quantity']} {r['statistic']}",
                *map(_number, (r["paper"], r["ours"])),
            )
            for r in figures["paper"]
        ]
        ours = "ours" if figures["built_in"] else "this file"
        beside_columns = ("paper 001", "", "paper", ours)
        console.print_table("beside the paper's figures", beside_columns, beside, left=2)
        if figures["why_ours_differ"]:
            console.print_text(figures["why_ours_differ"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
