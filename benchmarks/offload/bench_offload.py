"""`kappa bench offload`: what load plans are worth on this machine, predicted beside measured.

The experiments are the engine's own (`benchmarks.offload`), which run the same without this command
on a machine that has torch and nothing of ours installed. Here are options, a table and a picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.offload.bench_sparse import PREFIX, offload_sparse
from deploy.commands.provenance import Json, machine

_WIDTH = 170


def offload(
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu-small, cpu-paced, cpu-paced-fast, cpu-offload-small, cpu-offload-paced; on a "
            "GPU kvpr-6.7b, kvpr-13b, kvpr-weights, hybrid-13b, ttft, cpu-offload-13b, cpu-kv-1 "
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
    sparse = [name for name in setting or [] if name.startswith(PREFIX)]
    if sparse:
        if len(sparse) < len(setting or []) or plot is not None or limit_s:
            typer.echo(f"error: settings {PREFIX}… run apart, without --plot, --limit-s", err=True)
            raise typer.Exit(2)
        offload_sparse(sparse, repeats, only or [], out, json_output)
        return
    # torch: only when it is wanted.
    from benchmarks.offload.run import Options, run
    from engine.arena import ArenaTooLarge

    told = Console(stderr=True, highlight=False)
    try:
        options = Options(repeats, tuple(only or ()), limit_s or float("inf"), out)
        result = run(setting or ["cpu-small"], options, told.print)
    except (ArenaTooLarge, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result["machine"] = machine()
    if out is not None:
        out.write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")
    if plot is not None:
        from benchmarks.offload.plot import draw

        draw(result, plot)
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        key = tuple(row[name] for name in ("setting", "system", "model", "weights", "cell", "link"))
        cells.setdefault(key, []).append(row)
    for (name, system, model, weights, cell, link), rows in cells.items():
        title = f"{name}: {system} {cell}, {model}, weights {weights}, link {link}"
        console.print(_table(title, rows))
    for goal in result["goals"]:
        where = f" ({goal['where']})" if goal["where"] else ""
        console.print(f"{goal['said']}: {goal['goal']}{where}: {goal['value']:.3g}, {goal['text']}")
    for one in result["left_out"]:
        console.print(f"left out: {one['what']}: {one['why']}")
    load = ", ".join(f"{one:.1f}" for one in result["load_average"]["start"])
    console.print(f"{result['device']}, {result['seconds']:.0f} s, load average {load} at first")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("ms", "IQR", "predicted", "error", "tokens/s", "busy", "MB to device", "GB/s",
                 "GB/s, copying", "speed-up", "IQR", "same tokens"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        error = row["predicted_error"]
        table.add_row(
            row["policy"] + (" *" if row["chosen"] else ""), _of(row["latency_s"], 1e3),
            _of(row["latency_iqr_s"], 1e3), _of(row["predicted_s"], 1e3),
            "" if error is None else f"{error:+.0%}", _of(row["tokens_per_s"]),
            "" if row["gpu_busy"] is None else f"{row['gpu_busy']:.0%}",
            _of(row["bytes_h2d"], 1e-6), _of(row["gbps"]), _of(row["link_gbps"]),
            _of(row["speedup"]), _of(row["speedup_iqr"]),
            "" if row["tokens_equal"] is None else f"{row['tokens_equal']:.0%}",
        )  # fmt: skip
    return table


def _of(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.3g}"
