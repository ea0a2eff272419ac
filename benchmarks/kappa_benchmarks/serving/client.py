"""A cluster of ours as benches see it: completions, nodes, decisions, and what the nodes did."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kappa_loadtest.client import Endpoint, EndpointSettings, Prepared
from kappa_loadtest.run_folder import RequestRecord

MAX_OVERRUN_SHARE = 0.05
"""Steps that may overrun their pace before a run is invalid."""

_TOTALS = (
    "time_s", "step_seconds_total", "load_seconds_total", "store_seconds_total", "steps_total",
    "overruns_total", "stores_dropped_total",
)  # fmt: skip


def served_model(url: str) -> str:
    """The name of a running cluster's model; raises as `ClusterClient.nodes`."""
    answer = httpx.get(f"{url}/v1/models", timeout=30.0).raise_for_status()
    name: str = answer.json()["data"][0]["id"]
    return name


class ClusterClient:
    """Use as an async context manager; times are those of `time.monotonic`."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._model = model
        self._endpoint = Endpoint(EndpointSettings(url, model, timeout_s=timeout_s), time.monotonic)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def __aenter__(self) -> ClusterClient:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._endpoint.__aexit__()

    def prepare(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> Prepared:
        """A completion of exactly `max_tokens` tokens, encoded before it is due."""
        body = {
            "model": self._model, "prompt": list(prompt), "max_tokens": max_tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, **more,
        }  # fmt: skip
        return Prepared("/v1/completions", json.dumps(body, separators=(",", ":")).encode())

    async def send(self, prepared: Prepared) -> RequestRecord:
        """Send it and await its end; a failure becomes the record's error."""
        record = RequestRecord("", 0)
        await self._endpoint.send(prepared, record)
        return record

    async def nodes(self) -> list[dict[str, Any]]:
        """Every worker, from `GET /v1/nodes`.

        Raises:
            httpx.HTTPError: no answer, or another status than 200.
        """
        return (await self._http.get("/v1/nodes")).raise_for_status().json()["nodes"]

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, from `GET /v1/decisions`; raises as `nodes`."""
        answer = await self._http.get("/v1/decisions", params={"limit": limit})
        return answer.raise_for_status().json()["decisions"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Work of the nodes over a window."""

    # Share of the time in which a node computed: the mean of the nodes, and by node.
    load: float
    # Seconds of steps of all nodes together.
    busy_s: float
    load_by_node: Mapping[str, float]
    # Shares of the time in which a node loaded and stored, means of the nodes.
    link_load: float
    store_load: float
    # Of the steps: those that took longer than their pace.
    overrun_share: float
    # Stores to the host tier that were given up.
    stores_dropped: int


def usage(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Usage:
    """Busy shares between two answers of `GET /v1/nodes`; each worker's own report times it.

    Raises:
        ValueError: a worker is missing, did not report, or reported only once.
    """
    earlier = {row["worker"]: row["totals"] for row in before}
    gpu: dict[str, float] = {}
    link, store = [], []
    steps, overruns, dropped, busy_s = 0, 0, 0, 0.0
    for row in after:
        old, new = earlier.get(row["worker"]), row["totals"]
        if not old or not new or new["time_s"] <= old["time_s"]:
            raise ValueError(f"node {row['node']} has no two reports to compare")
        grown = {key: new[key] - old[key] for key in _TOTALS}
        elapsed_s = grown["time_s"]
        gpu[row["node"]] = grown["step_seconds_total"] / elapsed_s
        busy_s += grown["step_seconds_total"]
        link.append(grown["load_seconds_total"] / elapsed_s)
        store.append(grown["store_seconds_total"] / elapsed_s)
        steps += grown["steps_total"]
        overruns += grown["overruns_total"]
        dropped += grown["stores_dropped_total"]
    if not gpu:
        raise ValueError("no nodes")
    return Usage(
        statistics.fmean(gpu.values()), busy_s, gpu, statistics.fmean(link),
        statistics.fmean(store), overruns / steps if steps else 0.0, dropped,
    )  # fmt: skip
