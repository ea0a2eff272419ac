"""`kappa power`: each node's watts, the cap that its requests would not notice, and what it frees.

NVML's figures where there are GPUs, else the catalogue's model, labelled so; caps by what the last
requests waited for (`kappa.power`). Advice only: nothing is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from kappa.power import node_power, table5_rows, unnoticed_cap
from kappa_deploy.commands import console
from kappa_router.console import fail

_DECISIONS = 4096
_TIMEOUT_S = 30.0
_COLUMNS = {
    "node": "node", "gpu": "GPU", "w": "W", "cap_w": "cap W", "source": "source",
    "model_off": "model off", "j_per_token": "J/token", "advised_w": "advised cap W",
    "ttft_growth": "TTFT +", "freed_w": "freed W",
}  # fmt: skip
"""Headings of the table by a row's keys."""


def power(
    url: Annotated[str, typer.Option(help="The cluster.")] = "http://127.0.0.1:8000",
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Growth of the mean TTFT that is not noticed.")
    ] = 0.01,
    key: console.ApiKey = None,
    json_output: console.Json = False,
) -> None:
    """Show each node's watts against its cap, and which cap its last requests would not notice."""
    with console.cluster_at(url, key, _TIMEOUT_S) as client:
        nodes = client.get("/v1/nodes").raise_for_status().json()["nodes"]
        answer = client.get(f"/v1/decisions?limit={_DECISIONS}").raise_for_status()
        rows = node_rows(nodes, answer.json()["decisions"], tolerance)
    if not any(row["source"] for row in rows):
        fail(
            f"no node of {url} reports its power: their GPUs are not in the catalogue, and there "
            "is no NVML",
            2,
        )
    table5 = table5_rows()
    freed_w = sum(row["freed_w"] or 0.0 for row in rows)
    if json_output:
        about = {"machine": console.machine(), "command": console.command()}
        found = {"nodes": rows, "freed_w": freed_w, "tolerance": tolerance, "table5": table5}
        console.print_json(found | about)
        return
    cells = [[_cell(key, row[key]) for key in _COLUMNS] for row in rows]
    console.print_table(None, tuple(_COLUMNS.values()), cells, left=2)
    console.print_text(
        f"{freed_w:.0f} W could be freed at a mean TTFT within {tolerance:.1%}; advice only, "
        "nothing was changed. model, paced: by the catalogue, not measured; model off: the model's "
        "joules over NVML's, since the worker began"
    )
    misses = [float(row["off"]) for row in table5]
    console.print_text(
        f"the model, fitted to the four averages of paper 001's Table 5, is {min(misses):+.1%} to "
        f"{max(misses):+.1%} off there (each row: kappa tables)"
    )


def node_rows(
    nodes: Iterable[Mapping[str, Any]], decisions: Iterable[Mapping[str, Any]], tolerance: float
) -> list[dict[str, Any]]:
    """A row for each of `/v1/nodes`: draw and cap in watts, how far the model is off where NVML
    measures, as a share, joules per token, the advised cap, and the watts between the caps; figures
    are None where there are none."""
    waits_s = defaultdict(list)
    for decision in decisions:
        # What its first token waited for, as measured, else as predicted.
        for source in (decision.get("actual") or {}, decision.get("predicted") or {}):
            parts = [source.get(part) for part in ("queue_s", "load_s", "compute_s")]
            known = [max(float(part), 0.0) for part in parts if isinstance(part, int | float)]
            if len(known) == len(parts):
                waits_s[str(decision["node"])].append((known[0], known[1], known[2]))
                break
    return [_row(node, waits_s[str(node["node"])], tolerance) for node in nodes]


def _row(
    node: Mapping[str, Any], waits_s: list[tuple[float, float, float]], tolerance: float
) -> dict[str, Any]:
    totals, gpu = node.get("totals") or {}, str(node["profile"]["gpu"])
    source = str(totals.get("power_source") or "")
    cap_w = float(totals["power_cap_w"]) if source else 0.0
    tokens, joules = totals.get("step_tokens_total"), totals.get("energy_j_total")
    modelled = totals.get("modelled_j_total")
    known, advised_w, growth = node_power(gpu, cap_w), None, None
    if known is not None and waits_s:
        advised_w, growth = unnoticed_cap(known, waits_s, tolerance)
    return {
        "node": node["node"], "worker": node["worker"], "gpu": gpu, "source": source,
        "w": float(totals["power_w"]) if source else None, "cap_w": cap_w or None,
        "model_off": modelled / joules - 1 if source == "nvml" and modelled and joules else None,
        "requests": len(waits_s), "j_per_token": joules / tokens if tokens and joules else None,
        "advised_w": advised_w, "ttft_growth": growth,
        "freed_w": None if advised_w is None else cap_w - advised_w,
    }  # fmt: skip


def _cell(key: str, value: Any) -> str:
    if key in ("ttft_growth", "model_off"):
        return console.percent(value)
    if value is None or key in ("node", "gpu", "source"):
        return value or "-"
    return f"{value:.3g}" if key == "j_per_token" else f"{value:.0f}"
