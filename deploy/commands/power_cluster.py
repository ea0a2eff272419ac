"""The part of `kappa power` that looks at a running cluster: draw, cap, advice, watts freed.

Watches the nodes for a while, takes what their last requests waited for, and advises on each node's
cap (`kappa.power`). It changes nothing: caps are set by whoever runs the machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import httpx

from kappa.power import Advice, GpuPower, Waited, advise, gpu_power

_LIMIT = 4096
_TIMEOUT_S = 30.0
# Of a GPU that is not in the catalogue, as shares of the cap that NVML tells.
_LEAST_SHARE, _IDLE_SHARE = 0.3, 0.12


class PowerError(RuntimeError):
    """The cluster cannot be asked; the message says what to do."""


def watch(
    url: str,
    seconds: float,
    interval_s: float,
    tolerance: float,
    headers: Mapping[str, str],
    sleep: Callable[[float], object] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Ask a cluster's nodes for `seconds`, then its decisions, and advise.

    Raises:
        PowerError: it does not answer, or tells no power.
    """
    samples: list[list[dict[str, Any]]] = []
    try:
        with httpx.Client(base_url=url, headers=dict(headers), timeout=_TIMEOUT_S) as client:
            until_s = now_s() + seconds
            while True:
                samples.append(_get(client, "/v1/nodes")["nodes"])
                if now_s() + interval_s > until_s:
                    break
                sleep(interval_s)
            decisions = _get(client, f"/v1/decisions?limit={_LIMIT}")["decisions"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise PowerError(
            f"{url} cannot be asked for its nodes: {error}. Start a cluster with `kappa serve`, or "
            "give --url (and --key where nodes are an operator's to see)"
        ) from None
    rows = node_rows(samples, decisions, tolerance)
    if not any(row["source"] for row in rows):
        raise PowerError(
            f"no node of {url} tells its power: their GPUs are not in the catalogue, and there is "
            "no NVML"
        )
    return {"nodes": rows, "freed_w": sum(row["freed_w"] or 0.0 for row in rows)}


def node_rows(
    samples: Sequence[Iterable[Mapping[str, Any]]],
    decisions: Iterable[Mapping[str, Any]],
    tolerance: float,
) -> list[dict[str, Any]]:
    """A row per node: draw, cap and advice; figures are None where there are none."""
    waited: dict[str, list[Waited]] = {}
    for decision in decisions:
        found = _waited(decision)
        if found is not None:
            waited.setdefault(str(decision["node"]), []).append(found)
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        for node in sample:
            by_worker.setdefault(str(node["worker"]), []).append(node)
    return [
        _row(seen, waited.get(str(seen[-1]["node"]), []), tolerance)
        for seen in by_worker.values()
    ]  # fmt: skip


def _row(
    seen: Sequence[Mapping[str, Any]], requests: list[Waited], tolerance: float
) -> dict[str, Any]:
    last = seen[-1]
    totals = [node.get("totals") or {} for node in seen]
    told = [t for t in totals if t.get("power_source")]
    source = told[-1]["power_source"] if told else ""
    watts = [float(t["power_w"]) for t in told]
    cap_w = float(told[-1]["power_cap_w"]) if told else 0.0
    row: dict[str, Any] = {
        "node": last["node"], "worker": last["worker"], "gpu": last["profile"]["gpu"],
        "paced": last["paced"], "source": source, "samples": len(watts),
        "mean_w": sum(watts) / len(watts) if watts else None,
        "max_w": max(watts, default=None), "cap_w": cap_w or None, "requests": len(requests),
        "j_per_token": _j_per_token(totals), "advice": None, "freed_w": None,
    }  # fmt: skip
    power = _power(str(last["profile"]["gpu"]), cap_w)
    if power is not None and requests:
        peak_w = row["max_w"] if source == "nvml" else None
        advice: Advice = advise(power, cap_w, requests, tolerance, peak_w)
        row["advice"], row["freed_w"] = asdict(advice), advice.freed_w
    return row


def _power(gpu: str, cap_w: float) -> GpuPower | None:
    """The node's GPUs together: the catalogue's, as many as its cap holds."""
    if cap_w <= 0:
        return None
    known = gpu_power(gpu)
    if known is None:
        return GpuPower(cap_w, _LEAST_SHARE * cap_w, _IDLE_SHARE * cap_w, "shares of NVML's cap")
    count = max(round(cap_w / known.cap_w), 1)
    least_w, idle_w = known.least_cap_w * count, known.idle_w * count
    if cap_w < least_w:
        return None
    return replace(known, cap_w=max(known.cap_w * count, cap_w), least_cap_w=least_w, idle_w=idle_w)


def _waited(decision: Mapping[str, Any]) -> Waited | None:
    """What a request's first token waited for, as measured, else as predicted."""
    for told in (decision.get("actual") or {}, decision.get("predicted") or {}):
        parts = [told.get(key) for key in ("queue_s", "load_s", "compute_s")]
        if all(isinstance(part, int | float) for part in parts):
            return Waited(*(max(float(part), 0.0) for part in parts if part is not None))
    return None


def _j_per_token(totals: Sequence[Mapping[str, Any]]) -> float | None:
    """Energy per computed token, over the node's life."""
    tokens = totals[-1].get("step_tokens_total") if totals else 0
    joules = totals[-1].get("energy_j_total") if totals else 0
    return float(joules) / float(tokens) if tokens and joules else None


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.get(path)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told
