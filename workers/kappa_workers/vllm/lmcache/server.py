"""An LMCache server in a process of its own, and in an environment of its own, since its packages
contradict the engines': made once by `kappa lmcache setup` under `KAPPA_HOME`. Engines import its
client alone. A server that a worker starts ends with that worker's process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kappa.host import die_with_parent, free_ports

VERSION = "0.5.6"
STAMP = "complete"
_END_S = 5.0
_HOST = "127.0.0.1"
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


class LmcacheMissingError(RuntimeError):
    """LMCache is not installed; the message says how to."""


@dataclass(frozen=True, slots=True)
class LmcacheInstall:
    """Where LMCache is: the server's command, and a folder for the engines' module path that holds
    its client and nothing more; none where the engines have LMCache in their own environment."""

    executable: Path
    client: Path | None

    @classmethod
    def at(cls, root: Path) -> LmcacheInstall:
        """The one that `kappa lmcache setup` makes in `root`."""
        return cls(root / "venv" / "bin" / "lmcache", root / "client")

    @classmethod
    def find(cls, cache_dir: str | Path) -> LmcacheInstall:
        """Under this `KAPPA_HOME`, or in this environment, as on machines with a GPU.

        Raises:
            LmcacheMissingError: in neither.
        """
        root = install_root(cache_dir)
        if (root / STAMP).exists():
            return cls.at(root)
        if importlib.util.find_spec("lmcache") is not None:
            return cls(Path(sys.prefix) / "bin" / "lmcache", None)
        raise LmcacheMissingError(
            f"LMCache is installed neither in {root} nor beside vLLM: run 'kappa lmcache setup'"
        )


def install_root(cache_dir: str | Path) -> Path:
    """Where `kappa lmcache setup` installs it."""
    return Path(cache_dir) / f"lmcache-{VERSION}"


def server_command(
    install: LmcacheInstall,
    port: int,
    http_port: int,
    chunk_tokens: int,
    size_bytes: int,
    host: str = _HOST,
) -> list[str]:
    """The command line of a server on this machine. `engine_driven` has the engine copy, which is
    what works without a GPU: the server's default would hang such an engine. `auto` offers GPU
    engines the other way too."""
    return [
        str(install.executable), "server", "--host", host, "--port", str(port),
        "--http-host", _HOST, "--http-port", str(http_port),
        "--chunk-size", str(chunk_tokens), "--l1-size-gb", f"{size_bytes / 2**30:.6f}",
        "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip


class LmcacheServer:
    """A server process; `url` is what connectors need. It may take ten seconds to answer."""

    def __init__(
        self,
        install: LmcacheInstall,
        chunk_tokens: int,
        size_bytes: int,
        log: Path | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        """Start it on `ports` of this machine (its own, and of its metrics; none: free ones)."""
        port, http_port = ports or free_ports(_HOST, 2)
        self.url, self.http_url = f"tcp://{_HOST}:{port}", f"http://{_HOST}:{http_port}"
        with open(log or os.devnull, "ab") as output:
            self.process = subprocess.Popen(
                server_command(install, port, http_port, chunk_tokens, size_bytes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_QUIET, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
                preexec_fn=die_with_parent,
            )

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.process.kill()
        self.process.wait()


def prepare_lmcache(
    cache_dir: str | Path, server: str, chunk_tokens: int, size_bytes: int, log: Path
) -> LmcacheServer | None:
    """Have this process and the engine's find LMCache's client; start a server unless one is named.

    Raises:
        LmcacheMissingError: it is not installed.
    """
    install = LmcacheInstall.find(cache_dir)
    if install.client is not None:
        # For this process and those that it starts; behind everything else.
        folder, known = str(install.client), os.environ.get("PYTHONPATH", "")
        if folder not in sys.path:
            sys.path.append(folder)
        if folder not in known.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, folder)))
    # It warns of every attempt to reach its server; ours is one warning a minute.
    for name, value in {**_QUIET, "LMCACHE_LOG_LEVEL": "CRITICAL"}.items():
        os.environ.setdefault(name, value)
    if server:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    return LmcacheServer(install, chunk_tokens, size_bytes, log)
