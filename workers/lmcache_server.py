"""An LMCache server in a process of its own: where it is installed, how it is started and ended.

Its packages contradict those of the engines, so it has an environment of its own, made once by
`kappa lmcache setup` under `KAPPA_HOME`. The engines import LMCache's client alone, from a folder
that holds nothing else. A server that a worker starts ends with that worker's process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workers.vllm_plugin import die_with_parent

VERSION = "0.5.6"
_END_S = 5.0


class LmcacheMissingError(RuntimeError):
    """LMCache is not installed; the message says how to."""


@dataclass(frozen=True, slots=True)
class LmcacheInstall:
    """Where LMCache is: `root` holds `venv`, the server's environment, and `client`, a folder with
    a link to its package and nothing more, for the engines' module path."""

    root: Path

    @classmethod
    def under(cls, cache_dir: str | Path) -> LmcacheInstall:
        """The one that belongs to a `KAPPA_HOME`."""
        return cls(Path(cache_dir) / f"lmcache-{VERSION}")

    @property
    def venv(self) -> Path:
        """The server's environment."""
        return self.root / "venv"

    @property
    def client(self) -> Path:
        """What engines put on their module path."""
        return self.root / "client"

    @property
    def executable(self) -> Path:
        """The server's command."""
        return self.venv / "bin" / "lmcache"

    def check(self) -> None:
        """Raise `LmcacheMissingError` unless server and client are there."""
        for path in (self.executable, self.client / "lmcache" / "__init__.py"):
            if not path.exists():
                raise LmcacheMissingError(
                    f"LMCache is not installed ({path} is missing): run 'kappa lmcache setup'"
                )


def server_command(
    install: LmcacheInstall, port: int, http_port: int, chunk_tokens: int, size_bytes: int
) -> list[str]:
    """The command line of a server on this machine.

    `engine_driven` has the engine copy, which is what works without a GPU; the server's default
    would hang such an engine. `auto` offers GPU engines the other way too.
    """
    return [
        str(install.executable), "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port),
        "--chunk-size", str(chunk_tokens), "--l1-size-gb", f"{size_bytes / 2**30:.6f}",
        "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip


class LmcacheServer:
    """A server process; `url` is what connectors are told. It may take ten seconds to answer."""

    def __init__(
        self, install: LmcacheInstall, chunk_tokens: int, size_bytes: int, log: Path | None = None
    ) -> None:
        """Start it on free ports of this machine.

        Raises:
            LmcacheMissingError: it is not installed.
        """
        install.check()
        port, http_port = _free_ports(2)
        self.url = f"tcp://127.0.0.1:{port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        environment = {
            **os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
        }  # fmt: skip
        with open(log or os.devnull, "ab") as output:
            self.process = subprocess.Popen(
                server_command(install, port, http_port, chunk_tokens, size_bytes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    def close(self) -> None:
        """End it: politely, then surely."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _free_ports(count: int) -> list[int]:
    """TCP ports on loopback that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
