"""`kappa profile`: what this machine really does, measured inside an engine's worker process."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from deploy.commands.console import Json, fail, percent, print_json, print_table, print_text
from deploy.commands.serve import Config, running, settings_or_exit

_TIMEOUT_S = 200.0


def profile(
    url: Annotated[
        str | None, typer.Option(help="A running cluster; default: one engine started for this.")
    ] = None,
    config: Config = None,
    json_output: Json = False,
) -> None:
    """Measure bandwidth by transfer size and FLOP/s at the model's shapes, on every worker."""
    if url is not None:
        rows = _measure(url)
    else:
        settings = settings_or_exit(config, port=0, unpaced=True)
        settings = settings.first_worker()
        with running(settings) as cluster:
            rows = _measure(cluster.url)
    if json_output:
        print_json({"nodes": rows})
        return
    for row in rows:
        _print(row)


def _measure(url: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.post(f"{url.rstrip('/')}/v1/nodes/profile", timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        fail(f"{url}: {error}")
    rows: list[dict[str, Any]] = answer.json()["nodes"]
    keep = ("worker", "node", "paced", "measured", "profile", "profile_error", "kappa_crit")
    return [{key: row[key] for key in keep} for row in rows]


def _print(row: dict[str, Any]) -> None:
    measured = row["measured"]
    if not measured:
        print_text(f"{row['node']}: {row['profile_error']}")
        return
    title = f"{row['node']}: {measured['device']}, {measured['threads']} thread(s)"
    if row["paced"]:
        title += " (the node is paced; these are the real machine's figures)"
    names = {"h2d": "host to device", "d2h": "device to host", "scatter": "by blocks"}
    rows = [
        (name, f"{point['bytes'] / (1 << 20):.0f} MiB", f"{point['bytes_per_s'] / 1e9:.2f} GB/s",
         percent(point["spread"], 0))
        for key, name in names.items()
        for point in measured[key]
    ]  # fmt: skip
    rows += [
        ("GEMM", f"{point['tokens']} tokens", f"{point['flops_per_s'] / 1e9:.2f} GFLOP/s",
         percent(point["spread"], 0))
        for point in measured["gemm"]
    ]  # fmt: skip
    print_table(title, ("what", "size", "rate", "spread (IQR)"), rows)
