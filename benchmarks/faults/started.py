"""A cluster of our own for fault injection: `kappa serve` in a process of its own.

Its caches, and the files that say what is to go wrong, lie in one folder. However the
trials end, it is stopped politely, then surely; what outlives it is reported.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.processes import alive, kill
from benchmarks.faults.target import FaultsError, Target, environment

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
router: {max_queue: 800, request_timeout_s: 60}
"""
"""Four emulated workers, two of a kind."""

VLLM = """
engine: {device_blocks: 200, max_context_tokens: 4096}
dilation: 5
router: {max_queue: 200, request_timeout_s: 60}
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
"""Nobody without a key: for what one tenant does to another."""


def key_of(tenant: str) -> dict[str, str]:
    """The header that makes a request one of a tenant of `CLOSED`."""
    return {"authorization": f"Bearer sk-faults-{tenant}-0123456789abcdef"}


@contextmanager
def started(
    folder: Path, settings: str, survivors: list[str], headers: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """A cluster with these settings; afterwards `survivors` names what outlived it.

    `headers`: an operator's, where nobody is served without a key.

    Raises:
        FaultsError: it did not start; with its last output.
    """
    # Whoever ends us must not leave a cluster behind.
    signal.signal(signal.SIGTERM, _interrupted)
    folder.mkdir(parents=True, exist_ok=True)
    config, errors = folder / "cluster.yaml", folder / "cluster.log"
    config.write_text(settings, encoding="utf-8")
    process = launch(config, errors, environment(folder))
    target = None
    try:
        ready = ready_line(process, errors)
        target = Target(ready["url"], ready["model"], process.pid, folder, headers)
        target.family.members()
        yield target
    finally:
        survivors += _stop(process, target)


def launch(config: Path, errors: Path, added: Mapping[str, str]) -> subprocess.Popen[str]:
    """`kappa serve --json` with this configuration and `added` to the environment, on a free port.

    It writes its log to `errors`; `ready_line` waits until it serves.
    """
    kappa = str(Path(sys.executable).with_name("kappa"))
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, kappa, "serve", "--json", "--port", "0", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **added},
            # In the background SIGINT is ignored, and so it would be in what we start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def _interrupted(*_: object) -> None:
    raise SystemExit(143)


def ready_line(process: subprocess.Popen[str], errors: Path) -> dict[str, Any]:
    """What `kappa serve --json` says once it serves; `errors`: where its log goes.

    Raises:
        FaultsError: it ended, or did not serve in time; with its last output.
    """
    assert process.stdout is not None
    deadline_s = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline_s and process.poll() is None:
            if selector.select(timeout=1.0):
                line = process.stdout.readline()
                if line.startswith("{"):
                    ready: dict[str, Any] = json.loads(line)
                    return ready
    last = errors.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise FaultsError(f"the cluster did not start (exit code {process.poll()}):\n{last}")


def _stop(process: subprocess.Popen[str], target: Target | None) -> list[str]:
    family = target.family if target is not None else None
    children = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        if family is not None:
            family.members()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline_s = time.monotonic() + _LEFT_S
    while time.monotonic() < deadline_s and any(alive(child.pid) for child in children):
        time.sleep(0.2)
    left = [child for child in children if alive(child.pid)]
    left_over = family.survivors() if family is not None else [str(child.pid) for child in left]
    kill(child.pid for child in left)
    if target is not None:
        target.close()
    return left_over
