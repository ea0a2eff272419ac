"""The cluster that faults are tried on: a `kappa serve` of our own, its processes, its answers.

Its caches, and the files that name the faults, lie in one folder; the harness reaches it by HTTP,
signals and these files alone. However the trials end, the cluster is stopped, first politely, then
by force; processes that outlive it are reported. Linux only.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kappa_loadtest.run_folder import write_whole

T = TypeVar("T")

INJECT = Path(__file__).with_name("inject")
_POLL_S = 0.1
_START_S = 480.0
_STOP_S = 60.0
_LEFT_S = 15.0

EMULATED = """
engine: {kind: emulated, device_blocks: 400, max_context_tokens: 4096}
dilation: 2
nodes:
  - {name: pcie-1, profile: pcie}
  - {name: pcie-2, profile: pcie}
  - {name: c2c-1, profile: c2c}
  - {name: c2c-2, profile: c2c}
router: {max_queue: 800, request_timeout_s: 60, admission: false}
"""
"""Four emulated workers, two of a kind."""

VLLM = """
engine: {device_blocks: 200, max_context_tokens: 4096}
dilation: 5
router: {max_queue: 200, request_timeout_s: 60, admission: false}
"""
"""Two vLLM workers, paced."""

SETTINGS = {"emulated": EMULATED, "vllm": VLLM}

_TENANTS = ("operator", "honest", "hostile")
CLOSED = f"""
tenants:
  by_key: {{{", ".join(f"sk-faults-{name}-0123456789abcdef: {name}" for name in _TENANTS)}}}
  operators: [operator]
  unknown: refuse
"""
"""No access without a key: for trials of one tenant against another."""


class FaultsError(RuntimeError):
    """The faults could not be tried; the message says why."""


def key_of(tenant: str) -> dict[str, str]:
    """The header that makes a request one of a tenant of `CLOSED`."""
    return {"authorization": f"Bearer sk-faults-{tenant}-0123456789abcdef"}


# Processes ----------------------------------------------------------------------------------------

_SOCKET = re.compile(r"@kappa-(\d+)-(.+)-(?:stats|kv)$")
_ROLES = {
    "controller": re.compile(r"ServeController"),
    "decider": re.compile(r"ray::(?:ServeReplica|SERVE_REPLICA).*KappaDecider"),
    "envoy": re.compile(r"envoy\.json"),
    "engine": re.compile(r"EngineCore|VLLM::|multiprocessing.spawn"),
    "gcs": re.compile(r"gcs_server"),
}
"""Ray names its processes by what they run."""


class Family:
    """The process `pid` and all that it started; remembers them, to find survivors."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], str] = {}

    def members(self) -> dict[int, str]:
        """Titles of all living processes by pid, the starter's among them."""
        found = {}
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    title = " ".join(process.cmdline())[:160] or process.name()
                    found[process.pid] = title
                    self._seen[process.pid, process.create_time()] = title
        return found

    def of_role(self, role: str) -> list[int]:
        return [pid for pid, title in self.members().items() if _ROLES[role].search(title)]

    def below(self, pid: int) -> list[int]:
        """Pids of all that a process started."""
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []

    def strays(self) -> list[str]:
        """Processes of this cluster that have lost their parent in it."""
        members = self.members()
        return [line for line in self.survivors() if int(line.split()[0]) not in members]

    def survivors(self) -> list[str]:
        """Processes ever seen that still live: pid and title."""
        living = []
        for (pid, created_s), title in self._seen.items():
            with suppress(psutil.Error):
                if alive(pid) and psutil.Process(pid).create_time() == created_s:
                    living.append(f"{pid} {title}")
        return living


def worker_pids() -> dict[str, int]:
    """Living workers of this machine by name, found by the Unix sockets that carry it."""
    pids = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        found = _SOCKET.search(line)
        if found is not None and alive(int(found[1])):
            pids[found[2]] = int(found[1])
    return pids


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes; those that are gone are skipped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """Kill processes at once."""
    send(signal.SIGKILL, pids)


# A running cluster --------------------------------------------------------------------------------


class Target:
    """A running cluster, its processes, and the folder that `environment` named when it started.

    headers: an operator's, where every request needs a key.
    """

    def __init__(
        self, url: str, model: str, family: Family, folder: Path,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.url, self.model, self.folder = url, model, folder
        self.home = folder / "home"
        self.headers = dict(headers or {})
        self.family = family
        self.http = httpx.Client(base_url=url, timeout=20.0, headers=self.headers)

    def nodes(self) -> list[dict[str, Any]]:
        """Rows of `/v1/nodes`; none without an answer."""
        return self._rows("/v1/nodes", "nodes")

    def decisions(self, limit: int = 200) -> list[dict[str, Any]]:
        """The last decisions with their outcomes; none without an answer."""
        return self._rows(f"/v1/decisions?limit={limit}", "decisions")

    def row(self, key: str, name: str) -> dict[str, Any] | None:
        """The row with that `node` or `worker`; None if it is not there."""
        return next((row for row in self.nodes() if row[key] == name), None)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples; -1 without an answer."""
        try:
            text = self.http.get("/metrics").raise_for_status().text
            families = list(text_string_to_metric_families(text))
        except (httpx.HTTPError, ValueError):
            return -1.0
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)

    def reservations(self) -> int:
        """Requests with a reservation in the router; -1 without an answer."""
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
        """Poll until the answer is true; None when the time is up."""
        deadline_s = time.monotonic() + patience_s
        while not (answer := question()):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)
        return answer

    def set_engine_faults(self, faults: Mapping[str, Mapping[str, Any]]) -> None:
        """Faults of emulated engines, by worker."""
        write_whole(self.folder / "engines.json", json.dumps(faults).encode())

    def set_process_faults(self, faults: Mapping[str, Any]) -> None:
        """Faults of processes: `clock` by pid, `full` folders."""
        write_whole(self.folder / "processes.json", json.dumps(faults).encode())

    def close(self) -> None:
        self.http.close()

    def _rows(self, path: str, key: str) -> list[dict[str, Any]]:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return list(self.http.get(path).json()[key])
        return []


async def aside(question: Callable[[], Any]) -> Any:
    """Run `question` on a thread: the load must not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(None, question)


# Starting one -------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """Variables to start a cluster with, so that it reads faults from files in `folder`."""
    paths = [str(INJECT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "KAPPA_EMULATED_FAULTS": str(folder / "engines.json"),
        "KAPPA_PROCESS_FAULTS": str(folder / "processes.json"),
        "KAPPA_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(paths),
    }


@contextmanager
def started(
    folder: Path, settings: str, survivors: list[str], headers: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """A cluster with these settings; afterwards `survivors` names what outlived it.

    Raises:
        FaultsError: it did not start; with its last output.
    """
    # However this process ends, it must not leave a cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder.mkdir(parents=True, exist_ok=True)
    config, errors = folder / "cluster.yaml", folder / "cluster.log"
    config.write_text(settings, encoding="utf-8")
    process = launch(config, errors, environment(folder))
    family = Family(process.pid)
    try:
        ready = ready_line(process, errors)
        target = Target(ready["url"], ready["model"], family, folder, headers)
        family.members()
        yield target
        target.close()
    finally:
        survivors += _stop(process, family)


def launch(
    config: Path, errors: Path, added: Mapping[str, str], *options: str
) -> subprocess.Popen[str]:
    """`kappa serve --json` with this configuration and `added` to the environment, on a free port.

    It writes its log to `errors`; `ready_line` waits until it serves.
    """
    kappa = str(Path(sys.executable).with_name("kappa"))
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, kappa, "serve", "--json", "--port", "0", "--config", str(config),
             *options],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **added},
            # In the background SIGINT is ignored, and so it would be in what we start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


def first_line(process: subprocess.Popen[str], begins: str, timeout_s: float) -> str:
    """The first line of its output that begins so; empty: it ended, or printed none in time."""
    output, found = process.stdout, queue.SimpleQueue[str]()
    assert output is not None
    # On a thread: who waits for the pipe does not see lines that have been read ahead.
    find = partial(next, (line for line in output if line.startswith(begins)), "")
    threading.Thread(target=lambda: found.put(find()), daemon=True).start()
    deadline_s, over = time.monotonic() + timeout_s, False
    while not over:
        over = process.poll() is not None or time.monotonic() > deadline_s
        with suppress(queue.Empty):
            return found.get(timeout=1.0)
    return ""


def ready_line(process: subprocess.Popen[str], errors: Path) -> dict[str, Any]:
    """The first JSON line of `kappa serve --json`, once it serves; `errors`: the file of its log.

    Raises:
        FaultsError: it ended, or did not serve in time; with its last output.
    """
    line = first_line(process, "{", _START_S)
    if line:
        ready: dict[str, Any] = json.loads(line)
        return ready
    last = errors.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise FaultsError(f"the cluster did not start (exit code {process.poll()}):\n{last}")


def _stop(process: subprocess.Popen[str], family: Family) -> list[str]:
    """End a cluster and whatever outlives it; names that."""
    if process.poll() is None:
        family.members()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline_s = time.monotonic() + _LEFT_S
    while time.monotonic() < deadline_s and family.survivors():
        time.sleep(0.2)
    left = family.survivors()
    kill(int(line.split()[0]) for line in left)
    return left
