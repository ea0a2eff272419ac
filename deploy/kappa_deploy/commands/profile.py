"""`kappa profile`: what this machine really does, measured inside an engine's worker process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kappa.settings.cluster import home
from kappa_deploy.commands.console import (
    ApiKey,
    Json,
    cluster_at,
    percent,
    print_json,
    print_table,
    print_text,
    seconds,
)
from kappa_deploy.commands.serve import Config, running, settings_or_exit

_TIMEOUT_S = 200.0
_BAR = 24
WAYS = ("h2d", "d2h")


def profile(
    url: Annotated[
        str | None, typer.Option(help="A running cluster; default: one engine started for this.")
    ] = None,
    config: Config = None,
    key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Show bandwidth by size of transfer, seconds of steps and FLOP/s of every worker.

    An engine measures its own copies and steps before it serves, and a later start on the same
    machine takes what is known; without --url the engine started for this measures again. Of a
    running cluster the machine's peaks are measured again.
    """
    if url is not None:
        rows = _measure(url, key)
    else:
        settings = settings_or_exit(config, port=0, unpaced=True)
        settings = settings.first_worker()
        for known in (home() / "profiles").glob(f"{'[0-9a-f]' * 16}.json"):
            known.unlink(missing_ok=True)
        with running(settings) as cluster:
            rows = _measure(cluster.url)
    if json_output:
        print_json({"nodes": rows})
        return
    for row in rows:
        _print(row)


def _measure(url: str, key: str | None = None) -> list[dict[str, Any]]:
    with cluster_at(url, key, _TIMEOUT_S) as client:
        rows = client.post("/v1/nodes/profile").raise_for_status().json()["nodes"]
    keep = ("worker", "node", "paced", "measured", "measured_s_ago", "profile", "profile_error",
            "kappa_crit")  # fmt: skip
    return [{key: row[key] for key in keep} for row in rows]


def _print(row: dict[str, Any]) -> None:
    measured = row["measured"]
    if not measured:
        print_text(f"{row['node']}: {row['profile_error']}")
        return
    title = f"{row['node']}: {measured['device']}, {measured['threads']} thread(s)"
    if row["paced"]:
        title += " (the node is paced; these are the real machine's figures)"
    if row["measured_s_ago"] is not None:
        title += f", measured {row['measured_s_ago'] / 3600:.1f} h ago"
    own = "load_fixed_s" in measured
    names = ("load", "store") if own else ("host to device", "device to host")
    points = [(name, row) for name, way in zip(names, WAYS, strict=True) for row in measured[way]]
    most = max(point["bytes_per_s"] for _, point in points)
    columns = "what", "blocks", "size", "time", "rate", "beside compute", "spread", ""
    print_table(title, columns, [
        (name, str(point.get("blocks", "")), _size(point["bytes"]), seconds(point["seconds"]),
         _rate(point["bytes_per_s"]), _rate(point.get("beside_bytes_per_s")),
         percent(point["spread"], 0), "█" * round(_BAR * point["bytes_per_s"] / most))
        for name, point in points
    ])  # fmt: skip
    peaks = measured["peaks"]
    lines = [
        f"Peaks: copies {_rate(peaks['h2d_bytes_per_s'])} in, {_rate(peaks['d2h_bytes_per_s'])} "
        f"out, memory {_rate(peaks['hbm_bytes_per_s'])}, "
        f"products {peaks['flops_per_s'] / 1e9:.3g} GFLOP/s."
    ]
    if own:
        lines += [
            f"A {kind} takes {seconds(measured[f'{kind}_fixed_s'])} and its bytes at "
            f"{_rate(measured[f'{way}_bytes_per_s'])}; the sizes above differ from that by up to "
            f"{percent(measured[f'{kind}_line_error'], 0)}."
            for kind, way in zip(names, WAYS, strict=True)
        ]
    if step := measured.get("step"):
        lines.append(
            f"A step takes {seconds(step['fixed_s'])}, the longer of products "
            f"({seconds(step['token_s'])} a token) and reading weights "
            f"({seconds(step['weights_s'])}), and the longer of attending "
            f"({1e9 * step['pair_s']:.3g} ns a pair) and reading KV "
            f"({1e9 * step['context_token_s']:.3g} ns a token): R² {step['r2']:.3f} over "
            f"{step['steps']} steps, half of them within {percent(step['error'], 0)}."
        )
        lines += [
            f"Of {kind} steps half are within {percent(median, 0)}, nine of ten within "
            f"{percent(p90, 0)}."
            for kind, (median, p90) in step.get("errors", {}).items()
        ]
    if row["profile_error"]:
        lines.append(f"Note: {row['profile_error']}.")
    print_text("\n".join(lines))


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def _size(count: float) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):.0f} KiB"
