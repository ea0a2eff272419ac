"""Prometheus and promtool: found on this machine, or fetched from Debian without installing it.

Nothing is installed: the package is unpacked below `KAPPA_HOME`, as any user. A server started
here listens on loopback, keeps its data in a folder of its own, and ends with the process that
started it, even if that is killed. Called by `./dev dashboards`, the tests of the rules and the
live test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import httpx
import yaml

from kappa.host import die_with_parent, free_port
from kappa.settings.cluster import home

Tool = Literal["prometheus", "promtool"]

_PACKAGE = "prometheus"
_FETCH_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_REMEDY = "put prometheus and promtool (2.42 or later) on the PATH"


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
    folder = home() / "tools" / _PACKAGE
    path = folder / "usr" / "bin" / name
    if not path.exists():
        _fetch(folder)
    if not path.exists():
        raise PrometheusError(f"Debian's package {_PACKAGE} holds no {name}; {_REMEDY}")
    return path


def _fetch(folder: Path) -> None:
    """Download Debian's package and unpack it; another process may do the same meanwhile."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise PrometheusError(f"no Prometheus here, and no apt-get to fetch it with; {_REMEDY}")
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
    what = " ".join(command)
    try:
        subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S,
            check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PrometheusError(f"{what} took over {_FETCH_TIMEOUT_S:g} s; {_REMEDY}") from None
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise PrometheusError(f"{what} failed: {why[0]}; {_REMEDY}") from None


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


@contextmanager
def prometheus(
    jobs: Mapping[str, Sequence[str]],
    rules: Sequence[Path] = (),
    interval_s: float = 1.0,
    port: int = 0,
) -> Iterator[str]:
    """A server that runs as long as the block; gives its URL. It ends with the calling thread.

    Raises:
        PrometheusError: it is not here, or did not start.
    """
    program, address = tool("prometheus"), f"127.0.0.1:{port or free_port('127.0.0.1')}"
    url = f"http://{address}"
    with tempfile.TemporaryDirectory(prefix="kappa-prometheus-") as folder:
        file, log = Path(folder) / "prometheus.yml", Path(folder) / "log.txt"
        file.write_text(configuration(jobs, rules, interval_s), encoding="utf-8")
        command = [
            str(program),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]
        with log.open("wb") as output:
            # The kernel ends it with this process, also where this one is killed.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        try:
            until_s = time.monotonic() + _START_TIMEOUT_S
            while not _answers(f"{url}/-/ready"):
                if process.poll() is not None or time.monotonic() > until_s:
                    last = log.read_text(encoding="utf-8").strip().splitlines()[-5:]
                    raise PrometheusError("Prometheus did not start:\n" + "\n".join(last))
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def ray_targets(pid: int, temp_dir: Path = Path("/tmp/ray")) -> list[str]:
    """`host:port` of the metrics of the Ray nodes on this machine that process `pid` started.

    Ray writes the port of each node's metrics agent into the folder of its session.
    """
    files = sorted(temp_dir.glob(f"session_*_{pid}/metrics_export_port_*"))
    return [f"127.0.0.1:{file.read_text(encoding='utf-8').strip()}" for file in files]
