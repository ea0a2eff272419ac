"""`kappa bench offload --setting clo-…`: sparse decoding with injected hit rates, and its table.

The experiments are the engine's own (`benchmarks.offload.sparse`), which run the same without this
command. Every row names the hit rate that was injected: it is no property of a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.commands.provenance import machine

PREFIX = "clo-"
"""Settings of this bench begin so."""

_WIDTH = 150


def offload_sparse(
    names: list[str], repeats: int, only: list[str], out: Path | None, json_output: bool
) -> None:
    """Measure the settings of these names, and print."""
    # torch: only when it is wanted.
    from benchmarks.offload.sparse import run_sparse

    told = Console(stderr=True, highlight=False)
    try:
        result = run_sparse(names, repeats, only, told.print, out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result["machine"] = machine()
    if out is not None:
        out.write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    if not result["rows"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        key = tuple(str(row[name]) for name in ("setting", "cell", "model", "link"))
        cells.setdefault(key, []).append(row)
    for (name, cell, model, link), rows in cells.items():
        title = f"{name}: {cell}, {model}, link {link}; hit rates injected"
        console.print(_table(title, rows))
    for goal in result["goals"]:
        said = "met" if goal["met"] else "missed"
        where = f" ({goal['where']})" if "where" in goal else ""
        console.print(f"{said}: {goal['goal']}{where}: {goal['value']:.3g}, {goal['text']}")
    for one in result["left_out"]:
        console.print(f"left out: {one['what']}: {one['why']}")
    load = ", ".join(f"{one:.1f}" for one in result["load_average"]["start"])
    console.print(f"{result['device']}, load average {load} at first")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("hits", "ms/step", "IQR", "least", "predicted", "error", "tokens/s", "MB/step",
                 "GB/s, copying", "speed-up", "IQR"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        error = row["predicted_error"]
        table.add_row(
            row["policy"], _of(row["hits"]), _of(row["latency_s"], 1e3),
            _of(row["latency_iqr_s"], 1e3), _of(row["latency_least_s"], 1e3),
            _of(row["predicted_s"], 1e3), "" if error is None else f"{error:+.0%}",
            _of(row["tokens_per_s"]), _of(row["bytes_h2d"], 1e-6), _of(row["link_gbps"]),
            _of(row["speedup"]), _of(row["speedup_iqr"]),
        )  # fmt: skip
    return table


def _of(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.3g}"
