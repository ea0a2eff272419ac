"""An environment of its own for each real peer that runs beside us.

The peers' wheels stay out of our lock: each gets a venv under the user's cache directory, made the
first time a bench wants it, with uv where there is one and with pip otherwise. A file in the venv
says what it was made of, and is written last, so that one half made is made again. One bench at a
time makes one; every wait is bounded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.routing.peers.process import bounded_run

_READY = "kappa-peer"
_INSTALL_S = 600.0
_LOCK_S = 900.0
_POLL_S = 0.5
_REMEDY = (
    "name an index that can be reached (UV_INDEX_URL, PIP_INDEX_URL), or a folder of wheels "
    "(UV_FIND_LINKS, PIP_FIND_LINKS)"
)

Progress = Callable[[str], None]


class PeerError(Exception):
    """A peer cannot be run here; says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's wheel, and what our script beside it needs besides."""

    name: str
    version: str
    beside: tuple[str, ...] = ()

    @property
    def requirements(self) -> tuple[str, ...]:
        """What to install."""
        return (f"{self.name}=={self.version}", *self.beside)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


DYNAMO = Peer("ai-dynamo-runtime", "1.6.1", ("pyzmq==27.3.0", "msgpack==1.2.4"))
SGLANG_ROUTER = Peer("sglang-router", "0.3.2")


def peers_dir() -> Path:
    """Where the environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "kappa-serve" / "peers"


def peer_python(peer: Peer, progress: Progress | None = None) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there.

    Raises:
        PeerError: it cannot be made; names the remedy.
    """
    venv = peers_dir() / f"{peer.name}-{peer.version}"
    python = venv / "bin" / "python"
    if _is_ready(venv, peer):
        return python
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with _alone(venv.with_name(f"{venv.name}.lock")):
            if not _is_ready(venv, peer):
                _make(venv, peer, progress or _say)
    except OSError as error:
        raise PeerError(
            f"the environment of {peer} cannot be kept in {venv}: {error}; point XDG_CACHE_HOME "
            "to a directory that can be written"
        ) from error
    return python


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _is_ready(venv: Path, peer: Peer) -> bool:
    try:
        made_of = (venv / _READY).read_text().split()
    except OSError:
        return False
    return made_of == list(peer.requirements) and (venv / "bin" / "python").exists()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold `lock`, which ends with the process that holds it."""
    deadline_s = time.monotonic() + _LOCK_S
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise PeerError(
                        f"another process has held {lock} for {_LOCK_S:g} s: end it, or wait for it"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _make(venv: Path, peer: Peer, progress: Progress) -> None:
    progress(f"making an environment for {peer} in {venv} (once)")
    failures = []
    for tool, commands in _ways(venv, peer):
        shutil.rmtree(venv, ignore_errors=True)
        failure = next(filter(None, map(_failure, commands)), "")
        if not failure:
            (venv / _READY).write_text("\n".join(peer.requirements) + "\n")
            return
        failures.append(f"{tool}: {failure}")
    shutil.rmtree(venv, ignore_errors=True)
    raise PeerError(
        f"{peer} could not be installed into {venv} ({'; '.join(failures)}). Remedy: {_REMEDY}"
    )


def _ways(venv: Path, peer: Peer) -> Iterator[tuple[str, list[list[str]]]]:
    """Commands that make the environment, the quickest tool first."""
    python, wanted = str(venv / "bin" / "python"), list(peer.requirements)
    beside_us = Path(sys.executable).with_name("uv")
    uv = str(beside_us) if beside_us.exists() else shutil.which("uv")
    if uv:
        install = [uv, "pip", "install", "--quiet", "--python", python, *wanted]
        yield "uv", [[uv, "venv", "--quiet", "--python", sys.executable, str(venv)], install]
    # Our own pip, told of the other interpreter: a pip of its own would cost seconds to unpack.
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--retries", "1", *wanted]
    yield "pip", [[sys.executable, "-m", "venv", "--without-pip", str(venv)], install]


def _failure(command: list[str]) -> str:
    """Runs a command; why it failed, or nothing."""
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_PROGRESS": "1", "UV_HTTP_TIMEOUT": "30"}
    try:
        done = bounded_run(command, timeout_s=_INSTALL_S, environment=quiet)
    except TimeoutError as error:
        return str(error)
    if done.code == 0:
        return ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.lower().startswith(("error", "×", "╰", "caused"))]
    return " ".join((errors or said or [f"exit code {done.code}"])[-3:])
