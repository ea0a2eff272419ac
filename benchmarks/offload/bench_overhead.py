"""`kappa bench offload-overhead`: paper 001's microbenchmark on paced vLLM engines.

At every point of N new tokens behind C cached ones: new tokens only, a device hit, a host hit. A
regression over all of them recovers what each node was configured with, knowing only the model;
beside it stands the paper's own fit of overhead against κ, with its bias.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.offload.overhead.points import (
    ARMS,
    Limits,
    Point,
    Sample,
    check_points,
    parse_points,
    rounds,
)
from deploy.commands.provenance import Json, command, machine
from kappa.hardware import DEMO_NODES, NodeProfile, node_profile
from kappa.model import ModelShape
from kappa.paper import pcie_overhead
from kappa.shapes import model_shape

POINTS = "32:4096,64:16384,192:1024,192:16384,256:8192,512:1024,512:4096"
LIMITS = Limits(
    context_tokens=32_768, block_tokens=512, step_tokens=4_096, device_tokens=131_072,
    host_tokens=524_288,
)  # fmt: skip
"""What each engine holds; its model takes up to 32,768 positions."""

_WARM_UP_ROUNDS = 2
_OVERRUNS = 0.05
_WIDTH = 150
_ARM_STYLES = (("new", "o", "#4477aa"), ("device", "s", "#228833"), ("host", "^", "#cc3311"))


def offload_overhead(
    node: Annotated[
        list[str] | None,
        typer.Option(help="A node by name, or a profile's path; as often as wanted: pcie, c2c."),
    ] = None,
    points: Annotated[
        str, typer.Option(help="NEW:CACHED tokens, with commas. A few need many new tokens.")
    ] = POINTS,
    requests: Annotated[int, typer.Option(min=2, help="Requests per point and arm.")] = 200,
    dilation: Annotated[float, typer.Option(min=1, help="Wall seconds per emulated second.")] = 4.0,
    model: Annotated[str, typer.Option(help="The dense model to emulate.")] = "llama-3.1-8b",
    seed: Annotated[int, typer.Option(help="Of prompts, order and resampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw overheads and fits here (PNG).")] = None,
    records: Annotated[
        Path | None, typer.Option(help="Write every request here, as JSON lines.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Recover a node's bandwidth and FLOP/s from TTFTs; the paper's fit of overheads beside it."""
    try:
        profiles, shape, chosen = _checked(node or [*DEMO_NODES], points, model)
        _require_writable([path for path in (out, plot, records) if path is not None])
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    samples: dict[str, list[Sample]] = {profile.name: [] for profile in profiles}
    start_s = time.monotonic()
    try:
        _measure(profiles, shape, chosen, requests, dilation, seed, samples)
    finally:
        # Of a measurement that broke off, too.
        if records is not None:
            _write_records(records, samples)
    seconds = time.monotonic() - start_s
    try:
        fitted = _result(profiles, shape, samples, seed)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    result = fitted | {
        "model": shape.name, "dilation": dilation, "requests_per_cell": requests,
        "warm_up_rounds": _WARM_UP_ROUNDS, "seed": seed, "points": [str(p) for p in chosen],
        "seconds": seconds, "machine": machine(), "machine_load": os.getloadavg(),
        "command": command(),
    }  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(result, allow_nan=False) + "\n")
    if plot is not None:
        draw(result["nodes"], plot)
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    if result["void"]:
        typer.echo(f"void: over {_OVERRUNS:.0%} of the requests overran their pace", err=True)
        raise typer.Exit(1)


def _checked(
    nodes: list[str], points: str, model: str
) -> tuple[list[NodeProfile], ModelShape, tuple[Point, ...]]:
    """Everything that can be refused, refused before an engine is started."""
    from benchmarks.offload.overhead.law_fit import ModelFacts

    profiles = [node_profile(name) for name in nodes]
    names = [profile.name for profile in profiles]
    if len(set(names)) < len(names):
        raise ValueError(f"nodes {', '.join(names)}: name each once")
    shape = model_shape(model)
    ModelFacts.of(shape)
    chosen = parse_points(points)
    check_points(chosen, LIMITS)
    return profiles, shape, chosen


def _require_writable(paths: list[Path]) -> None:
    """Before minutes of measuring, not after."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def _measure(
    profiles: list[NodeProfile],
    shape: ModelShape,
    points: tuple[Point, ...],
    requests: int,
    dilation: float,
    seed: int,
    samples: dict[str, list[Sample]],
) -> None:
    """Start the engines and ask them; every request is put into `samples`, by node."""
    # vLLM: only when it is wanted.
    from benchmarks.offload.overhead.vllm_runs import OverheadNode

    # Engines are ended on the way out, whatever the reason.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    async def measure(nodes: list[OverheadNode], bar: Progress) -> None:
        for one in nodes:
            await one.fill(points)
        total = (requests + _WARM_UP_ROUNDS) * len(points) * len(ARMS) * len(nodes)
        task = bar.add_task("measuring", total=total)

        def heard(name: str, number: int, sample: Sample) -> None:
            bar.advance(task)
            if number >= 0:
                samples[name].append(sample)

        await rounds(nodes, points, requests, _WARM_UP_ROUNDS, seed, heard)

    # vLLM's client lives in the loop that it was made in: one loop for all of it.
    async def run() -> None:
        with ExitStack() as ended, Progress(console=Console(stderr=True)) as bar:
            nodes = []
            for profile in profiles:
                bar.console.print(f"[dim]starting {profile.name}[/dim]", highlight=False)
                nodes.append(OverheadNode(profile, shape, dilation, LIMITS, seed))
                ended.callback(nodes[-1].close)
            await measure(nodes, bar)

    asyncio.run(run())


def _result(
    profiles: list[NodeProfile], shape: ModelShape, samples: dict[str, list[Sample]], seed: int
) -> dict[str, Any]:
    from benchmarks.offload.overhead.result import node_result  # scipy

    rows = [node_result(samples[p.name], shape, p, seed) for p in profiles]
    void = any(row["overrun_share"] > _OVERRUNS for row in rows)
    return {"paced": True, "nodes": rows, "void": void}


def _write_records(path: Path, samples: dict[str, list[Sample]]) -> None:
    with path.open("w") as file:
        for name, found in samples.items():
            for sample in found:
                print(json.dumps({"node": name, **asdict(sample)}), file=file)


_RECOVERED = (
    ("link_bytes_per_s", "link, GB/s", 1e-9), ("flops_per_s", "GEMM, TFLOP/s", 1e-12),
    ("attention_flops_per_s", "attention, TFLOP/s", 1e-12), ("hbm_bytes_per_s", "HBM, TB/s", 1e-12),
    ("kappa_crit", "κ_crit", 1.0), ("request_fixed_s", "request, fixed ms", 1e3),
    ("load_fixed_s", "load, fixed ms", 1e3), ("prompt_token_s", "prompt token, us", 1e6),
)  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else _WIDTH)
    for row in result["nodes"]:
        console.print(_table(row, result["model"]))
        left_out = f", {row['left_out']} left out: {row['faults']}" if row["left_out"] else ""
        console.print(
            f"{row['requests']} requests{left_out}; overruns {row['overrun_share']:.1%}; R² "
            f"{row['r_squared']:.4f} of requests, {row['cells_r_squared']:.5f} of medians; bound "
            f"by reading weights: {', '.join(row['read_bound_points']) or 'no point'}",
            highlight=False,
        )
        console.print(_by_point(row))
    print(f"{result['command']}  on {result['machine']}, paced, {result['seconds']:.0f} s")


def _table(row: dict[str, Any], model: str) -> Table:
    table = Table(title=f"{row['node']}, paced, as {model}", title_justify="left")
    table.add_column("constant")
    for name in ("configured", "recovered", "95 % interval", "one point left out", "error"):
        table.add_column(name, justify="right")
    for name, title, scale in _RECOVERED:
        found = row["recovered"].get(name)
        if found is None:
            continue
        table.add_row(
            title, _number(row["configured"].get(name), scale), _number(found["value"], scale),
            f"{_number(found['low'], scale)} to {_number(found['high'], scale)}",
            f"{_number(found['left_out_low'], scale)} to {_number(found['left_out_high'], scale)}",
            _percent(found.get("error")),
        )  # fmt: skip
    for name, title, scale in _RECOVERED[:2]:
        alone = row["host_arm_alone"][name]
        table.add_row(
            f"{title}, host arm alone", _number(row["configured"][name], scale),
            _number(alone["value"], scale), "", "", _percent(alone["error"]),
        )  # fmt: skip
    for key, title in (
        ("paper_fit", "κ_crit, paper's method"),
        ("paper_fit_device_baseline", "κ_crit, paper's, device hit as baseline"),
    ):
        found = row[key]
        table.add_row(
            title, _number(row["configured"]["kappa_crit"], 1.0), _number(found["kappa_crit"], 1.0),
            f"{_number(found['low'], 1.0)} to {_number(found['high'], 1.0)}", "",
            _percent(found["bias"]),
        )  # fmt: skip
    return table


def _by_point(row: dict[str, Any]) -> Table:
    table = Table(title=f"{row['node']}: TTFT in ms, and Eq. 8 at each point", title_justify="left")
    columns = ("new", "cached", "κ", "new only", "device hit", "host hit", "link's share", "κ_crit")
    for name in columns:
        table.add_column(name, justify="right")
    medians = {
        (cell["new_tokens"], cell["cached_tokens"], cell["arm"]): 1e3 * cell["ttft_median_s"]
        for cell in row["cells"]
    }
    for point in row["paper_fit"]["points"]:
        key = point["new_tokens"], point["cached_tokens"]
        table.add_row(
            str(key[0]), str(key[1]), f"{point['kappa']:.3g}",
            *(f"{medians[(*key, arm)]:.2f}" for arm in ARMS),
            f"{point['overhead']:.1%}", _number(point["kappa_crit"], 1.0),
        )  # fmt: skip
    return table


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def draw(nodes: list[dict[str, Any]], path: Path) -> Path:
    """Draw the rows of `result.node_result`, a column for each node; returns `path`.

    Above: the paper's overhead at each point, the curve of Eq. 8 that the paper's method fits to
    it, and those of the recovered and the configured κ_crit. Below: the median TTFT of each point
    and arm against that of the regression.
    """
    # Half a second to import: only where it is used, or every command would wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(nodes), 8), layout="constrained")
    panels = figure.subplots(2, len(nodes), squeeze=False)
    for column, row in enumerate(nodes):
        _overhead(panels[0][column], row)
        _ttft(panels[1][column], row)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _overhead(axes: Any, row: dict[str, Any]) -> None:
    published, isolated = row["paper_fit"], row["paper_fit_device_baseline"]
    kappas = [point["kappa"] for point in published["points"]]
    axes.errorbar(
        kappas, [point["overhead"] for point in published["points"]],
        [point["deviation"] for point in published["points"]],
        fmt="o", color="#cc3311", capsize=2, label="against new tokens only (paper)",
    )  # fmt: skip
    axes.plot(
        kappas, [point["overhead"] for point in isolated["points"]],
        "s", color="#228833", markersize=4, label="against a device hit",
    )  # fmt: skip
    grid = np.geomspace(min(kappas) / 2, max(kappas) * 2, 200)
    recovered = row["recovered"]["kappa_crit"]["value"]
    for critical, style, label in (
        (published["kappa_crit"], "--", "paper's fit"),
        (recovered, "-", "regression"),
        (row["configured"]["kappa_crit"], ":", "configured"),
    ):
        if critical is not None:
            axes.plot(
                grid, [pcie_overhead(kappa, critical) for kappa in grid], style,
                color={"--": "#cc3311", "-": "#4477aa", ":": "black"}[style],
                label=f"{label}: κ_crit {critical:.1f}",
            )  # fmt: skip
    axes.set(
        xscale="log", xlabel="κ = C/N", ylabel="link's share of TTFT", ylim=(0, 1),
        title=f"{row['node']} (paced)",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _ttft(axes: Any, row: dict[str, Any]) -> None:
    for arm, marker, colour in _ARM_STYLES:
        cells = [cell for cell in row["cells"] if cell["arm"] == arm]
        axes.plot(
            [1e3 * cell["ttft_fit_s"] for cell in cells],
            [1e3 * cell["ttft_median_s"] for cell in cells],
            marker, color=colour, label={"new": "new tokens only"}.get(arm, f"{arm} hit"),
        )  # fmt: skip
    most = max(1e3 * cell["ttft_median_s"] for cell in row["cells"])
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    axes.set(xlabel="fitted TTFT, ms", ylabel="measured TTFT, ms (median)")
    axes.set_title(
        f"R² {row['r_squared']:.4f} of requests, {row['cells_r_squared']:.5f} of medians"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
