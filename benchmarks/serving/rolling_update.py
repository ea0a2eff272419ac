"""The hit rate before, during and after a worker is replaced, on a running cluster.

`python -m benchmarks.serving.rolling_update [--without] [--json]`: a two-node paced cluster is
filled with documents, one of its workers is killed, and Serve starts another. How much of the
documents is held is asked of the router (`POST /v1/route`, which changes nothing); at the end they
are sent for real. With `--without` the host tiers go with their engines, as a comparison.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.app.cluster import Cluster
from deploy.commands.provenance import command, machine
from kappa.settings.cluster import ClusterSettings, load_settings

_DOCUMENTS = 8
_WORDS = 900
_PATIENCE_S = 300.0
_SETTLE_S = 2.0


def settings_for(handover_dir: str | None) -> ClusterSettings:
    """The demo's nodes, fast, with room for the documents on the host and not on the device."""
    engine = {"device_blocks": 200, "max_context_tokens": 6144, "handover_dir": handover_dir}
    return load_settings(None, dilation=10, engine=engine, http={"port": 0})


class Documents:
    """Long prompts, and how much of them the cluster holds."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self._texts = [
            f"document {i}: " + " ".join(f"{word} of {i}" for word in range(_WORDS // 3))
            for i in range(_DOCUMENTS)
        ]

    def send(self) -> float:
        """Ask each a question; returns the share of prompt tokens that were held."""
        held = all_tokens = 0
        for text in self._texts:
            answer = self._client.post("/v1/chat/completions", json=self._body(text))
            answer.raise_for_status()
            actual = self._actual(answer.headers["x-request-id"])
            kept = actual["device_tokens"] + actual["cached_tokens"]
            held, all_tokens = held + kept, all_tokens + kept + actual["new_tokens"]
        return held / all_tokens

    def foreseen(self) -> float:
        """The share that the workers chosen for them hold, as the router knows; sends nothing."""
        held = all_tokens = 0
        for text in self._texts:
            told = self._client.post("/v1/route", json=self._body(text)).raise_for_status().json()
            best = next(c for c in told["candidates"] if c["node"] == told["node"])
            held += best["device_tokens"] + best["cached_tokens"]
            all_tokens += told["prompt_tokens"]
        return held / all_tokens

    def _actual(self, request_id: str) -> dict[str, Any]:
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            told = self._client.get(f"/v1/decisions/{request_id}").raise_for_status().json()
            actual: dict[str, Any] = told["actual"]
            if actual["new_tokens"] is not None:
                return actual
            time.sleep(0.1)
        raise TimeoutError(f"no worker reported request {request_id}")

    def _body(self, text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": self._model, "messages": messages, "max_tokens": 2}


def measure(handover_dir: str | None) -> dict[str, Any]:
    """One cluster: fill it, replace the worker that holds more, and tell the shares held."""
    settings = settings_for(handover_dir)
    said = Cluster(settings, lambda what: print(what, flush=True))
    with said as cluster, httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        documents = Documents(client, settings.model.id)
        documents.send()
        result = {"before_sent": documents.send()}
        time.sleep(_SETTLE_S)
        result["before"] = documents.foreseen()
        worker = _busiest(client)
        killed_s = time.monotonic()
        _kill(worker)
        _until(client, lambda workers: worker not in workers)
        result["during"] = documents.foreseen()
        _until(client, lambda workers: worker not in workers and len(workers) == 2)
        result["away_s"] = time.monotonic() - killed_s
        time.sleep(_SETTLE_S)
        result["after"] = documents.foreseen()
        result["after_sent"] = documents.send()
    return result


def _workers(client: httpx.Client) -> dict[str, dict[str, Any]]:
    nodes = client.get("/v1/nodes").raise_for_status().json()["nodes"]
    return {node["worker"]: node for node in nodes}


def _busiest(client: httpx.Client) -> str:
    """The worker that has stored most."""
    workers = _workers(client)
    return max(workers, key=lambda worker: (workers[worker]["totals"] or {})["store_tokens_total"])


def _until(client: httpx.Client, reached: Any) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not reached(_workers(client)):
        if time.monotonic() > until_s:
            raise TimeoutError("the worker was not replaced in time")
        time.sleep(0.2)


def _kill(worker: str) -> None:
    """End a replica's process as a lost machine would."""
    import ray
    from ray.util import list_named_actors

    named = list_named_actors(all_namespaces=True)
    (found,) = [actor for actor in named if actor["name"].endswith(worker)]
    ray.kill(ray.get_actor(found["name"], namespace=found["namespace"]), no_restart=True)


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", action="store_true", help="host tiers go with their engines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = None if asked.without else tempfile.mkdtemp(prefix="kappa-kept-", dir=root)
    try:
        result = {
            "handover": not asked.without, **measure(folder), "documents": _DOCUMENTS,
            "paced": True, "machine": machine(), "command": command(),
        }  # fmt: skip
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if asked.json:
        print(json.dumps(result))
    else:
        for name in ("before", "during", "after", "after_sent"):
            print(f"{name:<12} {result[name]:.1%} of the documents' tokens held")
        print(f"away for {result['away_s']:.0f} s; {result['command']}  on {result['machine']}")


if __name__ == "__main__":
    main()
