"""The routers under comparison, each in a process of its own that reads JSON lines.

A process gets one line to start with and reports when it is ready. Its standard input is a pipe
whose other end only the bench holds: when the bench is gone it reads the end and stops. Wheels
of peers stay out of our lock: their environments lie under the user's cache directory and are made
the first time a bench wants them, with uv where there is one and with pip otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import note
from benchmarks.routing.peers.wire import LINE_BYTES

OURS = "kappa"
DYNAMO_VERSION = "1.6.1"
GATEWAY_VERSIONS = {"sglang_router": "0.3.2", "vllm_router": "0.1.17"}


class Environment(NamedTuple):
    """What is installed for peers: wheels, without what they ask for, and what of that they need
    here. Mockers, frontend and SelectionService need no transformers, Kubernetes, Redis or
    simulator."""

    name: str
    wheels: list[str]
    requirements: list[str]


DYNAMO = Environment(
    f"ai-dynamo-{DYNAMO_VERSION}",
    [f"ai-dynamo=={DYNAMO_VERSION}", f"ai-dynamo-runtime=={DYNAMO_VERSION}"],
    [
        "aiohttp==3.14.5", "huggingface_hub==2.4.0", "Jinja2==3.1.6", "msgpack==1.2.4",
        "msgspec==0.22.0", "numpy==2.4.6", "prometheus_client==0.26.0", "pydantic==2.14.3",
        "PyYAML==6.0.3", "pyzmq==27.3.0", "tqdm==4.70.1", "uvloop==0.23.0", "zstandard==0.25.0",
    ],
)  # fmt: skip
GATEWAYS = Environment(
    "gateways-1",
    [f"{name.replace('_', '-')}=={version}" for name, version in GATEWAY_VERSIONS.items()],
    ["aiohttp==3.14.5", "fastapi", "orjson", "requests", "setproctitle", "uvicorn"],
)
_READY = "kappa-peer"
_INSTALL_S = 600.0
_SCRIPTS = Path(__file__).with_name("scripts")
_START_S = 60.0
_ANSWER_S = 300.0
_END_S = 5.0
OUR_VARIABLES = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
"""Variables that would lead another interpreter into our packages."""

Message = dict[str, Any]


class PeerError(Exception):
    """A router's process did not start, answer or stay; names its last words."""


class PeerRouter(NamedTuple):
    """version and what: as the result has them; script: that runs it, without one ours; hello: what
    its first line holds besides the nodes."""

    version: str
    what: str
    script: str
    hello: Message


_IN_PROCESS = "Ray's own class and defaults, no cluster: exact queue lengths, no actor calls"
ROUTERS = {
    OURS: PeerRouter(version("kappa-serve"), "router.core, fed by KV events and reports", "", {}),
    "dynamo": PeerRouter(DYNAMO_VERSION, "SelectionService and its defaults", "dynamo_router.py",
                         {"settings": {}}),
    "dynamo-prefill": PeerRouter(
        DYNAMO_VERSION, "SelectionService, prefill_load_scale 8 instead of 1", "dynamo_router.py",
        {"settings": {"DYN_ROUTER_PREFILL_LOAD_SCALE": "8"}},
    ),
    "ray-prefix": PeerRouter(version("ray"), _IN_PROCESS, "ray_router.py",
                             {"router": "prefix_affinity"}),
    "ray-pow2": PeerRouter(version("ray"), _IN_PROCESS, "ray_router.py", {"router": "pow_2"}),
}  # fmt: skip


def command_of(script: str) -> list[str]:
    """How a router's process is started; without a script, ours.

    Raises:
        PeerError: its environment cannot be made.
    """
    if not script:
        return [sys.executable, "-m", "benchmarks.routing.peers.our_router"]
    made = {"dynamo_router.py": DYNAMO, "gateway_router.py": GATEWAYS}.get(script)
    python = sys.executable if made is None else python_of(made)
    return [python, "-I", str(_SCRIPTS / script)]


class RouterProcess:
    """One router's process; `started` makes one."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr: Any) -> None:
        self.name, self.pid = name, process.pid
        self._process, self._stderr = process, stderr
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self.ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.reader = asyncio.create_task(self._read())

    async def ask(self, message: Message) -> Message:
        """Its answer.

        Raises:
            PeerError: it has none, or is gone.
        """
        if self.reader.done():
            raise self._failed("it has ended")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({**message, "id": number})
            return await self.answered(self._waiting[number], _ANSWER_S)
        finally:
            del self._waiting[number]

    def send(self, message: Message) -> None:
        """A message that wants no answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def answered(self, future: asyncio.Future[Message], timeout_s: float) -> Message:
        try:
            answer = await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except TimeoutError:
            raise self._failed(f"no answer within {timeout_s:g} s") from None
        if "error" in answer:
            raise self._failed(str(answer["error"]))
        return answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                with contextlib.suppress(ValueError, AttributeError):
                    message = json.loads(line)
                    number = message.get("id")
                    future = self.ready if number is None else self._waiting.get(number)
                    if future is not None and not future.done():
                        future.set_result(message)
        finally:
            for future in (self.ready, *self._waiting.values()):
                if not future.done():
                    future.set_result({"error": "it has ended"})

    def _failed(self, what: str) -> PeerError:
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-3:]
        return PeerError(": ".join([self.name, what, *([" | ".join(last)] if last else [])]))


@asynccontextmanager
async def started(
    name: str, command: Sequence[str], hello: Message
) -> AsyncIterator[RouterProcess]:
    """A process that is ready; on the way out it is ended with all it started, by force after a
    few seconds.

    Raises:
        PeerError: it ended, or was not ready in time.
    """
    kept = {key: value for key, value in os.environ.items() if key not in OUR_VARIABLES}
    with tempfile.TemporaryFile() as stderr:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=stderr, env={**kept, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
                limit=LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{name}: {error}") from error
        router = RouterProcess(name, process, stderr)
        assert process.stdin is not None
        try:
            router.send(hello)
            await router.answered(router.ready, _START_S)
            yield router
        finally:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S if router.ready.done() else 0.0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.gather(router.reader, return_exceptions=True)


def python_of(made: Environment) -> str:
    """The interpreter of an environment, which is made if it is not there.

    A file in it, written last, holds what it was made of, so that one half made is made again.

    Raises:
        PeerError: it cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = cache / "kappa-serve" / "peers" / made.name
    ready, python = venv / _READY, str(venv / "bin" / "python")
    made_of = made.wheels + made.requirements
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with venv.with_name(f"{venv.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists() or ready.read_text().split() != made_of:
                note(f"making the environment {made.name} in {venv} (once)")
                shutil.rmtree(venv, ignore_errors=True)
                _install(made, venv, python)
                ready.write_text("\n".join(made_of) + "\n")
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise PeerError(
            f"{made.name} could not be installed into {venv} ({output[-500:]}): "
            "name an index that can be reached (UV_INDEX_URL, PIP_INDEX_URL), a folder of wheels "
            "(UV_FIND_LINKS, PIP_FIND_LINKS), or a cache that can be written (XDG_CACHE_HOME)"
        ) from None
    return python


def _install(made: Environment, venv: Path, python: str) -> None:
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
        [*install, "--no-deps", *made.wheels],
        [*install, *made.requirements],
    ]:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
