"""`kappa power`: watts per GPU at 200 ms, as in paper 001's Table 5; NVIDIA GPUs only."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.commands.provenance import Json, command, machine
from workers.power import INTERVAL_S, NoNvmlError, PowerMeter, PowerRow, sample_power, summary

_LEAST_INTERVAL_S = 0.01


def power(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to sample.")] = 30.0,
    interval: Annotated[
        float, typer.Option(min=_LEAST_INTERVAL_S, help="Seconds between samples.")
    ] = INTERVAL_S,
    json_output: Json = False,
) -> None:
    """Watts per GPU: mean, most, and the mean's share of the limit. Ctrl-C ends it early."""
    import pynvml

    rows: list[PowerRow] = []
    try:
        with PowerMeter(pynvml) as meter:
            # What was sampled until then is the answer.
            with contextlib.suppress(KeyboardInterrupt):
                sample_power(meter, seconds, rows.append, interval)
            gpus = meter.gpus
    except NoNvmlError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result: dict[str, Any] = {
        "gpus": summary(gpus, rows),
        "rows": [{"t_s": row.t_s, "watts": row.watts} for row in rows],
        "interval_s": interval, "machine": machine(), "command": command(),
    }  # fmt: skip
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    table = Table()
    for name in ("GPU", "samples", "mean W", "most W", "limit W", "share of limit"):
        table.add_column(name, justify="left" if name == "GPU" else "right")
    for gpu in result["gpus"]:
        share = gpu["share_of_limit"]
        table.add_row(
            f"{gpu['index']} {gpu['name']}", str(gpu["samples"]),
            *(_watts(gpu[key]) for key in ("mean_w", "max_w", "limit_w")),
            "-" if share is None else f"{share:.0%}",
        )  # fmt: skip
    Console().print(table)
    print(f"{result['command']}  on {result['machine']}")


def _watts(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
