"""`kappa power`: watts per GPU or node, the cap that requests would not notice, and what it frees.

Of a running cluster with `--url`: NVML's figures where there are GPUs, else the catalogue's model,
labelled so; with what its last requests waited for it advises on each node's cap (`kappa.power`).
Without it, the GPUs of this machine at 200 ms, as in paper 001's Table 5. Advice only: nothing is
changed.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import httpx
import typer

from deploy.commands import console
from kappa.power import GPUS, GpuPower, Waited, advise
from workers.power import INTERVAL_S, NoNvmlError, PowerMeter, PowerRow, sample_power, summary

_LEAST_INTERVAL_S = 0.01
# Workers look at their power once a second.
_LEAST_CLUSTER_INTERVAL_S = 1.0
_CLUSTER_SECONDS, _GPU_SECONDS = 10.0, 30.0
_DECISIONS = 4096
_TIMEOUT_S = 30.0
# Of a GPU that is not in the catalogue, as shares of the cap that NVML reports.
_LEAST_SHARE, _IDLE_SHARE = 0.3, 0.12
_SOURCES = {
    "nvml": "measured", "model": "modelled", "paced": "modelled, paced: as the node it stands for",
}  # fmt: skip

Node = Mapping[str, Any]


class PowerError(RuntimeError):
    """The cluster does not report its power; the message says what to do."""


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
    key: console.ApiKey = None,
    json_output: console.Json = False,
) -> None:
    """Watts against caps, and which cap the requests would not notice. Ctrl-C ends it early."""
    try:
        if url is None:
            result = _of_machine(seconds or _GPU_SECONDS, interval)
        else:
            interval_s = max(interval, _LEAST_CLUSTER_INTERVAL_S)
            with console.cluster_at(url, key, _TIMEOUT_S) as client:
                samples, decisions = watch(client, seconds or _CLUSTER_SECONDS, interval_s)
            result = cluster_power(url, samples, decisions, tolerance)
    except NoNvmlError as error:
        console.fail(f"error: {error}; for a running cluster's nodes, give --url", 2)
    except PowerError as error:
        console.fail(f"error: {error}", 2)
    result |= {"machine": console.machine(), "command": console.command()}
    if json_output:
        console.print_json(result)
    elif url is None:
        _print_gpus(result)
    else:
        _print_nodes(result)


def _of_machine(seconds: float, interval_s: float) -> dict[str, Any]:
    import pynvml

    rows: list[PowerRow] = []
    with PowerMeter(pynvml) as meter:
        # What was sampled until then is the answer.
        with contextlib.suppress(KeyboardInterrupt):
            sample_power(meter, seconds, rows.append, interval_s)
        gpus = summary(meter.gpus, rows)
    samples = [{"t_s": row.t_s, "watts": row.watts} for row in rows]
    return {"gpus": gpus, "rows": samples, "interval_s": interval_s}


def watch(
    client: httpx.Client,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], object] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """A cluster's nodes, again and again for `seconds`, then its last decisions.

    Raises:
        HTTPError, ValueError, KeyError: it does not answer with them.
    """
    samples = []
    until_s = now_s() + seconds
    while True:
        samples.append(client.get("/v1/nodes").raise_for_status().json()["nodes"])
        if now_s() + interval_s > until_s:
            break
        sleep(interval_s)
    answer = client.get(f"/v1/decisions?limit={_DECISIONS}").raise_for_status()
    return samples, answer.json()["decisions"]


def cluster_power(
    url: str,
    samples: Sequence[Iterable[Node]],
    decisions: Iterable[Mapping[str, Any]],
    tolerance: float,
) -> dict[str, Any]:
    """A row per node, and the watts that their advised caps would free.

    Raises:
        PowerError: no node reports its power.
    """
    rows = node_rows(samples, decisions, tolerance)
    if not any(row["source"] for row in rows):
        raise PowerError(
            f"no node of {url} reports its power: their GPUs are not in the catalogue, and there "
            "is no NVML"
        )
    freed_w = sum(row["freed_w"] or 0.0 for row in rows)
    return {"nodes": rows, "freed_w": freed_w, "tolerance": tolerance}


def node_rows(
    samples: Sequence[Iterable[Node]], decisions: Iterable[Mapping[str, Any]], tolerance: float
) -> list[dict[str, Any]]:
    """A row per node: draw, cap and advice; figures are None where there are none."""
    waited = defaultdict(list)
    for decision in decisions:
        # What its first token waited for, as measured, else as predicted.
        for source in (decision.get("actual") or {}, decision.get("predicted") or {}):
            parts = [source.get(key) for key in ("queue_s", "load_s", "compute_s")]
            known = [max(float(p), 0.0) for p in parts if isinstance(p, int | float)]
            if len(known) == len(parts):
                waited[str(decision["node"])].append(Waited(*known))
                break
    by_worker = defaultdict(list)
    for sample in samples:
        for node in sample:
            by_worker[str(node["worker"])].append(node)
    return [_row(nodes, waited[str(nodes[-1]["node"])], tolerance) for nodes in by_worker.values()]


def _row(nodes: Sequence[Node], requests: list[Waited], tolerance: float) -> dict[str, Any]:
    last, totals = nodes[-1], [node.get("totals") or {} for node in nodes]
    metered = [t for t in totals if t.get("power_source")]
    source = metered[-1]["power_source"] if metered else ""
    watts = [float(t["power_w"]) for t in metered]
    cap_w = float(metered[-1]["power_cap_w"]) if metered else 0.0
    gpu = str(last["profile"]["gpu"])
    tokens, joules = (totals[-1].get(k) for k in ("step_tokens_total", "energy_j_total"))
    row: dict[str, Any] = {
        "node": last["node"], "worker": last["worker"], "gpu": gpu,
        "paced": last["paced"], "source": source, "samples": len(watts),
        "mean_w": sum(watts) / len(watts) if watts else None,
        "max_w": max(watts, default=None), "cap_w": cap_w or None, "requests": len(requests),
        "j_per_token": joules / tokens if tokens and joules else None,
        "advice": None, "freed_w": None,
    }  # fmt: skip
    node_power = _power(gpu, cap_w)
    if node_power is not None and requests:
        peak_w = row["max_w"] if source == "nvml" else None
        advice = advise(node_power, cap_w, requests, tolerance, peak_w)
        row |= {"advice": asdict(advice), "freed_w": advice.freed_w}
    return row


def _power(gpu: str, cap_w: float) -> GpuPower | None:
    """The node's GPUs together: the catalogue's, as many as its cap holds."""
    if cap_w <= 0:
        return None
    known = GPUS.get(gpu)
    if known is None:
        return GpuPower(cap_w, _LEAST_SHARE * cap_w, _IDLE_SHARE * cap_w, "shares of NVML's cap")
    count = max(round(cap_w / known.cap_w), 1)
    least_w, idle_w = known.least_cap_w * count, known.idle_w * count
    if cap_w < least_w:
        return None
    return replace(known, cap_w=max(known.cap_w * count, cap_w), least_cap_w=least_w, idle_w=idle_w)


def _print_nodes(result: dict[str, Any]) -> None:
    columns = (
        "node", "GPU", "mean W", "most W", "cap W", "J/token", "advised cap W", "TTFT +", "freed W",
    )  # fmt: skip
    rows, names = [], defaultdict(list)
    for row in result["nodes"]:
        advice, joules = row["advice"] or {}, row["j_per_token"]
        rows.append((
            row["node"], row["gpu"], *(_watts(row[key]) for key in ("mean_w", "max_w", "cap_w")),
            "-" if joules is None else f"{joules:.3g}", _watts(advice.get("cap_w")),
            console.percent(advice.get("ttft_growth")), _watts(row["freed_w"]),
        ))  # fmt: skip
        names[row["source"]].append(row["node"])
    console.print_table(None, columns, rows, left=2)
    sources = [f"{', '.join(names[s])}: {_SOURCES[s]}" for s in sorted(names) if s]
    advice = (
        f"{result['freed_w']:.0f} W could be freed at a mean TTFT within "
        f"{result['tolerance']:.1%}; advice only, nothing was changed"
    )
    console.print_text("\n".join([*sources, advice]))


def _print_gpus(result: dict[str, Any]) -> None:
    columns = ("GPU", "samples", "mean W", "most W", "limit W", "share of limit")
    rows = [
        (
            f"{gpu['index']} {gpu['name']}", str(gpu["samples"]),
            *(_watts(gpu[key]) for key in ("mean_w", "max_w", "limit_w")),
            console.percent(gpu["share_of_limit"], 0),
        )
        for gpu in result["gpus"]
    ]  # fmt: skip
    console.print_table(None, columns, rows)
    console.print_text(f"{result['command']}  on {result['machine']}")


def _watts(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
