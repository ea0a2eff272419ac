"""Processes of the comparison with Dynamo: their environment, and a hop that answers lines.

Dynamo's wheels stay out of our lock: their environment lies under the user's cache directory and is
made the first time a bench wants it, with uv where there is one and with pip otherwise. A process
gets one line to start with and reports when it is ready; it answers each line after that. The bench
alone holds the other end of its standard input: when the bench is gone, the process reads the end
and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kappa_benchmarks.harness import note

DYNAMO_VERSION = "1.6.1"
LINE_BYTES = 1 << 24


_WHEELS = [f"ai-dynamo=={DYNAMO_VERSION}", f"ai-dynamo-runtime=={DYNAMO_VERSION}"]
# Of what the wheels ask for. Mockers and frontend need no transformers, Kubernetes, Redis or
# simulator.
_REQUIREMENTS = [
    "aiohttp==3.14.5", "huggingface_hub==2.4.0", "Jinja2==3.1.6", "msgpack==1.2.4",
    "msgspec==0.22.0", "numpy==2.4.6", "prometheus_client==0.26.0", "pydantic==2.14.3",
    "PyYAML==6.0.3", "pyzmq==27.3.0", "tqdm==4.70.1", "uvloop==0.23.0", "zstandard==0.25.0",
]  # fmt: skip
_READY = "kappa-peer"
_INSTALL_S = 600.0
_START_S = 60.0
_ANSWER_S = 300.0
_END_S = 5.0
OUR_VARIABLES = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
"""Variables that would lead another interpreter into our packages."""

Message = dict[str, Any]
Ask = Callable[[Message], Awaitable[Message]]
"""Sends a process a line and returns its answer, one at a time; PeerError: it has none."""


class PeerError(Exception):
    """A process did not start, answer or stay; names its last words."""


@asynccontextmanager
async def started(name: str, command: Sequence[str], hello: Message) -> AsyncIterator[Ask]:
    """A process that is ready, as what asks it; on the way out it is ended with all it started, by
    force after a few seconds.

    Raises:
        PeerError: it ended, or was not ready in time.
    """
    kept = {key: value for key, value in os.environ.items() if key not in OUR_VARIABLES}
    with tempfile.TemporaryFile() as stderr:

        def failed(what: str) -> PeerError:
            stderr.seek(0)
            last = stderr.read().decode(errors="replace").strip().splitlines()[-3:]
            return PeerError(": ".join([name, what, *([" | ".join(last)] if last else [])]))

        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=stderr, env={**kept, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
                limit=LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{name}: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        given, read, limit_s = process.stdin, process.stdout.readline, _START_S

        async def ask(message: Message) -> Message:
            given.write(json.dumps(message).encode() + b"\n")
            try:
                async with asyncio.timeout(limit_s):
                    while (line := await read()) and not line.startswith(b"{"):
                        pass  # what a library prints
            except TimeoutError:
                raise failed(f"no answer within {limit_s:g} s") from None
            answer: Message = json.loads(line or b'{"error": "it has ended"}')
            if "error" in answer:
                raise failed(str(answer["error"]))
            return answer

        wait_s = 0.0
        try:
            await ask(hello)
            limit_s, wait_s = _ANSWER_S, _END_S
            yield ask
        finally:
            given.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), wait_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def dynamo_python() -> str:
    """The interpreter of Dynamo's environment, which is made if it is not there.

    A file in it, written last, lists its packages, so that one half made is made again.

    Raises:
        PeerError: it cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"ai-dynamo-{DYNAMO_VERSION}"
    venv = cache / "kappa-serve" / "peers" / name
    ready, python = venv / _READY, str(venv / "bin" / "python")
    packages = _WHEELS + _REQUIREMENTS
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with venv.with_name(f"{venv.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists() or ready.read_text().split() != packages:
                note(f"making the environment {name} in {venv} (once)")
                shutil.rmtree(venv, ignore_errors=True)
                _install(venv, python)
                ready.write_text("\n".join(packages) + "\n")
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise PeerError(
            f"{name} could not be installed into {venv} ({output[-500:]}): "
            "name an index that can be reached (UV_INDEX_URL, PIP_INDEX_URL), a folder of wheels "
            "(UV_FIND_LINKS, PIP_FIND_LINKS), or a cache that can be written (XDG_CACHE_HOME)"
        ) from None
    return python


def _install(venv: Path, python: str) -> None:
    ours = sys.executable
    uv = shutil.which("uv", path=f"{Path(ours).parent}{os.pathsep}{os.environ['PATH']}")
    if uv:
        commands = [[uv, "venv", "--quiet", "--python", ours, str(venv)]]
        install = [uv, "pip", "install", "--quiet", "--python", python]
    else:
        commands = [[ours, "-m", "venv", "--without-pip", str(venv)]]
        install = [ours, "-m", "pip", "--python", python, "install", "--quiet", "--retries", "1"]
    for command in [
        *commands,
        [*install, "--no-deps", *_WHEELS],
        [*install, *_REQUIREMENTS],
    ]:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
