"""`kappa power`: watts per GPU or node, the cap that requests would not notice, and what it frees.

Of a running cluster with `--url`: NVML's figures where there are GPUs, else the catalogue's model,
labelled so. Without it, the GPUs of this machine at 200 ms, as in paper 001's Table 5. Advice only:
nothing is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.commands.power_cluster import PowerError, watch
from deploy.commands.provenance import Json, command, machine
from workers.power import INTERVAL_S, NoNvmlError, PowerMeter, PowerRow, sample_power, summary

_LEAST_INTERVAL_S = 0.01
_LEAST_CLUSTER_INTERVAL_S = 1.0
_CLUSTER_SECONDS = 10.0
_GPU_SECONDS = 30.0
_SOURCES = {
    "nvml": "measured", "model": "modelled", "paced": "modelled, paced: as the node it stands for",
}  # fmt: skip


def power(
    url: Annotated[
        str | None, typer.Option(help="A running cluster; default: this machine's GPUs.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="How long to sample; 30, of a cluster 10.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=_LEAST_INTERVAL_S, help="Seconds between samples.")
    ] = INTERVAL_S,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Growth of the mean TTFT that is not noticed.")
    ] = 0.01,
    key: Annotated[
        str | None, typer.Option(help="API key of an operator; default: $KAPPA_API_KEY.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Watts against caps, and which cap the requests would not notice. Ctrl-C ends it early."""
    if url is not None:
        _of_cluster(url.rstrip("/"), seconds, interval, tolerance, key, json_output)
        return
    import pynvml

    rows: list[PowerRow] = []
    try:
        with PowerMeter(pynvml) as meter:
            # What was sampled until then is the answer.
            with contextlib.suppress(KeyboardInterrupt):
                sample_power(meter, seconds or _GPU_SECONDS, rows.append, interval)
            gpus = meter.gpus
    except NoNvmlError as error:
        typer.echo(f"error: {error}; for a running cluster's nodes, give --url", err=True)
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


def _of_cluster(
    url: str,
    seconds: float | None,
    interval_s: float,
    tolerance: float,
    key: str | None,
    json_output: bool,
) -> None:
    secret = key or os.environ.get("KAPPA_API_KEY")
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    # Workers look at their power once a second.
    every_s = max(interval_s, _LEAST_CLUSTER_INTERVAL_S)
    try:
        told = watch(url, seconds or _CLUSTER_SECONDS, every_s, tolerance, headers)
    except PowerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result = {**told, "tolerance": tolerance, "machine": machine(), "command": command()}
    if json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        _print_cluster(result)


def _print_cluster(result: dict[str, Any]) -> None:
    table = Table()
    for name in (
        "node", "GPU", "mean W", "most W", "cap W", "J/token", "advised cap W", "TTFT +", "freed W",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("node", "GPU") else "right")
    for row in result["nodes"]:
        advice = row["advice"] or {}
        joules, growth = row["j_per_token"], advice.get("ttft_growth")
        table.add_row(
            row["node"], row["gpu"], _watts(row["mean_w"]), _watts(row["max_w"]),
            _watts(row["cap_w"]), "-" if joules is None else f"{joules:.3g}",
            _watts(advice.get("cap_w")), "-" if growth is None else f"{growth:.1%}",
            _watts(row["freed_w"]),
        )  # fmt: skip
    console = Console()
    console.print(table)
    for source in sorted({row["source"] for row in result["nodes"] if row["source"]}):
        names = ", ".join(r["node"] for r in result["nodes"] if r["source"] == source)
        console.print(f"{names}: {_SOURCES[source]}", highlight=False)
    console.print(
        f"{result['freed_w']:.0f} W could be freed at a mean TTFT within "
        f"{result['tolerance']:.1%}; advice only, nothing was changed",
        highlight=False,
    )


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
