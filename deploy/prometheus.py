"""Prometheus and promtool: found on this machine, or fetched from Debian without installing it.

Nothing is installed: the package is unpacked below `KAPPA_HOME`, as any user. A server started
here listens on loopback, keeps its data in a folder of its own, and ends with whoever started it,
however that ends. Called by `./dev dashboards`, the tests of the rules and the live test.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from deploy.app.ports import free_port
from kappa.settings.cluster import home

Tool = Literal["prometheus", "promtool"]

_PACKAGE = "prometheus"
_FETCH_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_REMEDY = "put prometheus and promtool (2.42 or later) on the PATH"


def tethered(python: str = sys.executable) -> list[str]:
    """How to run `deploy/tethered.py`, which ends what it runs when its standard input closes."""
    return [python, "-I", str(Path(__file__).with_name("tethered.py"))]


class PrometheusError(RuntimeError):
    """Prometheus could not be had or did not start; the message says why and what to do."""


def tool(name: Tool) -> Path:
    """Path of the program: on the PATH, unpacked before, or fetched now (19 MB).

    Raises:
        PrometheusError: it is not here and cannot be fetched.
    """
    known = shutil.which(name)
    if known:
        return Path(known)
    path = _folder() / "usr" / "bin" / name
    if not path.exists():
        _fetch()
    if not path.exists():
        raise PrometheusError(f"Debian's package {_PACKAGE} holds no {name}; {_REMEDY}")
    return path


def _folder() -> Path:
    return home() / "tools" / _PACKAGE


def _fetch() -> None:
    """Download Debian's package and unpack it; another process may do the same meanwhile."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise PrometheusError(f"no Prometheus here, and no apt-get to fetch it with; {_REMEDY}")
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        _run(["apt-get", "download", _PACKAGE], work)
        packages = list(Path(work).glob("*.deb"))
        if not packages:
            raise PrometheusError(f"apt-get downloaded no package {_PACKAGE}; {_REMEDY}")
        _run(["dpkg-deb", "-x", str(packages[0]), "unpacked"], work)
        try:
            (Path(work) / "unpacked").rename(folder)
        except OSError:
            # Another process was faster: what it unpacked is the same.
            if not folder.exists():
                raise


def _run(command: Sequence[str], folder: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PrometheusError(
            f"{' '.join(command)} took over {_FETCH_TIMEOUT_S:g} s; {_REMEDY}"
        ) from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise PrometheusError(f"{' '.join(command)} failed: {why[0]}; {_REMEDY}")


def configuration(
    jobs: Mapping[str, Sequence[str]], rules: Sequence[Path] = (), interval_s: float = 1.0
) -> str:
    """Prometheus' configuration file: each job scrapes `/metrics` of its `host:port` targets."""
    every = f"{max(1, round(interval_s * 1e3))}ms"
    data = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path.absolute()) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]}
            for job, targets in jobs.items()
        ],
    }
    return yaml.safe_dump(data, sort_keys=False)


class Prometheus:
    """A running server; use as a context manager. `url` is where it answers."""

    def __init__(
        self,
        jobs: Mapping[str, Sequence[str]],
        rules: Sequence[Path] = (),
        interval_s: float = 1.0,
        port: int = 0,
    ) -> None:
        self._configuration = configuration(jobs, rules, interval_s)
        self._port = port
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.url = ""

    def __enter__(self) -> Prometheus:
        program = tool("prometheus")
        self._folder = tempfile.TemporaryDirectory(prefix="kappa-prometheus-")
        try:
            self._start(program, Path(self._folder.name))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, program: Path, folder: Path) -> None:
        file, log = folder / "prometheus.yml", folder / "log.txt"
        file.write_text(self._configuration, encoding="utf-8")
        host = "127.0.0.1"
        self.url = f"http://{host}:{self._port or free_port(host)}"
        command = [
            str(program),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        # Prometheus would outlive whoever is killed: the tether ends it when our pipe closes.
        with log.open("w", encoding="utf-8") as stderr:
            process = self._process = subprocess.Popen(
                tethered(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        hello = {"command": command, "probe": f"{self.url}/-/ready"}
        process.stdin.write(json.dumps(hello) + "\n")
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        if not answered or '"ready"' not in process.stdout.readline():
            last = log.read_text(encoding="utf-8").strip().splitlines()[-5:]
            raise PrometheusError("Prometheus did not start:\n" + "\n".join(last))

    def stop(self) -> None:
        """End the server and drop its data; safe to call twice."""
        if self._process is not None:
            try:
                # Closes the tether's standard input, and waits.
                self._process.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def ray_targets(pid: int, temp_dir: Path = Path("/tmp/ray")) -> list[str]:
    """`host:port` of the metrics of the Ray nodes on this machine that process `pid` started.

    Ray writes the port of each node's metrics agent into the folder of its session.
    """
    files = sorted(temp_dir.glob(f"session_*_{pid}/metrics_export_port_*"))
    return [f"127.0.0.1:{file.read_text(encoding='utf-8').strip()}" for file in files]
