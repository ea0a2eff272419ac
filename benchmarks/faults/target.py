"""The cluster that faults are tried on: where it answers, who it is, how faults are injected.

An emulated engine, and a process of the cluster, read their faults from files.

Start it with the variables of `environment`; the harness has no other way into it than HTTP,
signals and these files.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faults.processes import Family, worker_pids

T = TypeVar("T")

INJECT = Path(__file__).with_name("inject")
_POLL_S = 0.1


class FaultsError(RuntimeError):
    """The faults could not be tried; the message says why."""


def environment(folder: Path) -> dict[str, str]:
    """Variables to start a cluster with, so that it reads faults from files in `folder`."""
    paths = [str(INJECT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "KAPPA_EMULATED_FAULTS": str(folder / "engines.json"),
        "KAPPA_PROCESS_FAULTS": str(folder / "processes.json"),
        "KAPPA_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(paths),
    }


class Target:
    """A running cluster."""

    def __init__(
        self, url: str, model: str, pid: int, folder: Path, headers: Mapping[str, str] | None = None
    ) -> None:
        """`pid`: of the process that started it; `folder`: as given to `environment`."""
        self.url, self.model, self.folder = url, model, folder
        self.headers = dict(headers or {})
        self.family = Family(pid)
        self.http = httpx.Client(base_url=url, timeout=20.0, headers=self.headers)
        self.pid_of_worker: dict[str, int] = {}

    # -- questions ----------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """Rows of `/v1/nodes`; none while nobody answers."""
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return list(self.http.get("/v1/nodes").json()["nodes"])
        return []

    def node(self, name: str) -> dict[str, Any] | None:
        """The row of the node of that name, if it is there."""
        return next((row for row in self.nodes() if row["node"] == name), None)

    def worker(self, name: str) -> dict[str, Any] | None:
        """The row of that worker, if it is there; its node may get another name as ranks change."""
        return next((row for row in self.nodes() if row["worker"] == name), None)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels; -1 while nobody answers."""
        try:
            text = self.http.get("/metrics").raise_for_status().text
            families = list(text_string_to_metric_families(text))
        except (httpx.HTTPError, ValueError):
            return -1.0
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def decisions(self, limit: int = 200) -> list[dict[str, Any]]:
        """The last decisions with their outcomes."""
        with suppress(httpx.HTTPError, ValueError, KeyError):
            answer = self.http.get("/v1/decisions", params={"limit": limit}).json()
            return list(answer["decisions"])
        return []

    def reservations(self) -> int:
        """Requests that the router holds something for; -1 while nobody answers."""
        return int(self.metric("kappa_reservations"))

    def pid(self, worker: str) -> int:
        """The process of a worker.

        Raises:
            FaultsError: it is not on this machine.
        """
        pids = worker_pids()
        if worker not in pids:
            raise FaultsError(f"worker {worker} has no process here; faults need the whole cluster")
        return pids[worker]

    def until(self, question: Callable[[], T], patience_s: float) -> T | None:
        """Ask until the answer is true; None when the time is up."""
        deadline_s = time.monotonic() + patience_s
        while not (answer := question()):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)
        return answer

    # -- faults to inject -----------------------------------------------------------------------

    def set_engine_faults(self, faults: Mapping[str, Mapping[str, Any]]) -> None:
        """Faults of emulated engines, by worker."""
        _write(self.folder / "engines.json", faults)

    def set_process_faults(self, faults: Mapping[str, Any]) -> None:
        """Faults of processes: `clock` by pid, `full` folders."""
        _write(self.folder / "processes.json", faults)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def close(self) -> None:
        self.http.close()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """All at once, so that nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


async def aside(question: Callable[[], Any]) -> Any:
    """Ask on a thread: the load must not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(None, question)
