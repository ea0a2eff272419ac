"""`kappa bench offload`: what load plans are worth on this machine, predicted beside measured.

The experiments run the same without this command on a machine that has torch and nothing of ours
installed (`python -m benchmarks.offload`). Here are options, a table and a picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.commands.provenance import Json, machine

_WIDTH = 170
_SPARSE = "clo-"
_CHOSEN, _BASELINE, _OTHER = "#228833", "#4477aa", "#bbbbbb"
_COLUMNS = (
    ("ms", "latency_s", 1e3), ("IQR", "latency_iqr_s", 1e3), ("predicted", "predicted_s", 1e3),
    ("error", "predicted_error", "+.0%"), ("tokens/s", "tokens_per_s", 1.0),
    ("busy", "gpu_busy", ".0%"), ("MB to device", "bytes_h2d", 1e-6), ("GB/s", "gbps", 1.0),
    ("GB/s, copying", "link_gbps", 1.0), ("speed-up", "speedup", 1.0),
    ("IQR", "speedup_iqr", 1.0), ("same tokens", "tokens_equal", ".0%"),
)  # fmt: skip
_SPARSE_COLUMNS = (
    ("hits", "hits", 1.0), ("ms/step", "latency_s", 1e3), ("IQR", "latency_iqr_s", 1e3),
    ("least", "latency_least_s", 1e3), ("predicted", "predicted_s", 1e3),
    ("error", "predicted_error", "+.0%"), ("tokens/s", "tokens_per_s", 1.0),
    ("MB/step", "bytes_h2d", 1e-6), ("GB/s, copying", "link_gbps", 1.0),
    ("speed-up", "speedup", 1.0), ("IQR", "speedup_iqr", 1.0),
)  # fmt: skip


def offload(
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu-small, cpu-paced, cpu-paced-fast, cpu-offload-small, cpu-offload-paced; on a "
            "GPU kvpr-6.7b, kvpr-13b, kvpr-weights, hybrid-13b, ttft, cpu-kv-1 "
            "(4, 8, 15); of sparse decoding, apart, clo-cpu, clo-cpu-paced, on a GPU clo-llama-8k "
            "(-long), clo-qwen-8k (-long); as often as wanted."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=5, help="Rounds, beside a warm-up.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Part of a cell's name: 64x128, column, ttft.")
    ] = None,
    limit_s: Annotated[
        float, typer.Option(min=0, help="Begin no cell that is predicted to exceed it; 0: none.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows here (PNG).")] = None,
    json_output: Json = False,
) -> None:
    """Ways to bring a cache back from host memory, in turns: KV, activations, recomputation."""
    names = setting or ["cpu-small"]
    sparse = [name for name in names if name.startswith(_SPARSE)]
    if sparse and (len(sparse) < len(names) or plot is not None or limit_s):
        typer.echo(f"error: settings {_SPARSE}… run apart, without --plot, --limit-s", err=True)
        raise typer.Exit(2)
    # torch: only when it is wanted.
    from benchmarks.offload.run import Options, run
    from engine.arena import ArenaTooLarge

    progress = Console(stderr=True, highlight=False)
    try:
        options = Options(repeats, tuple(only or ()), limit_s or float("inf"), out)
        result = run(names, options, progress.print)
    except (ArenaTooLarge, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result["machine"] = machine()
    if out is not None:
        out.write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")
    if plot is not None:
        draw(result, plot)
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    if sparse and not result["rows"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    for (name, system, model, cell), rows in _cells(result["rows"]).items():
        first = rows[0]
        title = f"{name}: {system} {cell}, {model}, link {first['link']}"
        title += f", weights {first['weights']}" if "weights" in first else "; hit rates injected"
        console.print(_table(title, rows))
    for goal in result["goals"]:
        where = f" ({goal['where']})" if goal["where"] else ""
        console.print(f"{goal['said']}: {goal['goal']}{where}: {goal['value']:.3g}, {goal['text']}")
    for one in result["left_out"]:
        console.print(f"left out: {one['what']}: {one['why']}")
    load = ", ".join(f"{one:.1f}" for one in result["load_average"]["start"])
    console.print(f"{result['device']}, {result['seconds']:.0f} s, load average {load} at first")


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("setting", "system", "model", "cell"))
        cells.setdefault(key, []).append(row)
    return cells


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    columns = _SPARSE_COLUMNS if "hits" in rows[0] else _COLUMNS
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        mark = " *" if row.get("chosen") else ""
        table.add_row(row["policy"] + mark, *(_of(row[key], form) for _, key, form in columns))
    return table


def _of(value: float | None, form: float | str) -> str:
    """A value by a format, or times a factor."""
    if value is None:
        return ""
    return format(value, form) if isinstance(form, str) else f"{value * form:.3g}"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw a panel for each cell; returns `path`.

    A bar is a policy's median latency with its interquartile range, the diamond its prediction, the
    dashed line the baseline.

    Raises:
        ValueError: there are no rows.
    """
    # Half a second to import: only where it is used, or every command would wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The link alone is no policy.
    cells = _cells([row for row in result["rows"] if row["policy"] != "link-alone"])
    if not cells:
        raise ValueError("there are no rows to draw: every cell was left out")
    wide = min(3, len(cells))
    high = -(-len(cells) // wide)
    figure = Figure(figsize=(5.2 * wide, 4.4 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False).ravel()
    for axes, (key, rows) in zip(panels, cells.items(), strict=False):
        _panel(axes, rows)
        axes.set_title(" ".join(key), fontsize=9)
    for axes in panels[len(cells) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"{result['device']}, {result['date']}: median and IQR; diamonds: predicted; "
        "green: chosen by the planner; blue: baseline",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    chosen = {row["same_as"] or row["policy"] for row in rows if row["chosen"]}
    # What is the same plan has the same bar.
    rows = [row for row in rows if not row["same_as"]]
    places = range(len(rows))
    axes.barh(
        places, [1e3 * row["latency_s"] for row in rows],
        xerr=[0.5e3 * row["latency_iqr_s"] for row in rows],
        color=[_color(row, chosen) for row in rows], capsize=2,
    )  # fmt: skip
    known = [(i, 1e3 * row["predicted_s"]) for i, row in enumerate(rows) if row["predicted_s"]]
    axes.plot([x for _, x in known], [i for i, _ in known], "D", color="#cc3311", markersize=5)
    base = next((row for row in rows if row["policy"] == row["baseline"]), None)
    if base is not None:
        axes.axvline(1e3 * base["latency_s"], color=_BASELINE, linestyle="--", linewidth=1)
    axes.set_yticks(list(places), [row["policy"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(left=0)


def _color(row: dict[str, Any], chosen: set[str]) -> str:
    if row["policy"] in chosen:
        return _CHOSEN
    return _BASELINE if row["policy"] == row["baseline"] else _OTHER
