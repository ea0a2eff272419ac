"""Processes beside the bench that read JSON lines: they end when it does, however it ends.

A helper gets one line to start with and says when it is ready. Its standard input is a pipe whose
other end only the bench holds: when the bench is gone the helper reads its end and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.routing.peers.wire import LINE_BYTES

SCRIPTS = Path(__file__).with_name("scripts")
_START_S = 60.0
_ANSWER_S = 300.0
_END_S = 5.0
_OURS = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
"""Variables that would lead another interpreter into our packages."""


class HelperError(Exception):
    """A helper did not start, answer or stay; names its last words."""


class Helper:
    """One helper process; `started` makes one."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr: Any) -> None:
        self.name, self.pid = name, process.pid
        self._process, self._stderr = process, stderr
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
            HelperError: it has none, or is gone.
        """
        if self._reader.done():
            raise self._failed("it has ended")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({**message, "id": number})
            return await self._answered(self._waiting[number], _ANSWER_S)
        finally:
            del self._waiting[number]

    def send(self, message: dict[str, Any]) -> None:
        """A message that wants no answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def start(self, hello: dict[str, Any]) -> None:
        self.send(hello)
        await self._answered(self._ready, _START_S)

    async def close(self) -> None:
        """End it and all it started, by force after a few seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S if self._ready.done() else 0.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._stderr.close()

    async def _answered(
        self, future: asyncio.Future[dict[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
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
                    future = self._ready if number is None else self._waiting.get(number)
                    if future is not None and not future.done():
                        future.set_result(message)
        finally:
            for future in (self._ready, *self._waiting.values()):
                if not future.done():
                    future.set_result({"error": "it has ended"})

    def _failed(self, what: str) -> HelperError:
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-3:]
        return HelperError(": ".join([self.name, what, *([" | ".join(last)] if last else [])]))


@asynccontextmanager
async def started(
    name: str, command: Sequence[str], hello: dict[str, Any]
) -> AsyncIterator[Helper]:
    """A helper that is ready; it is ended on the way out.

    Raises:
        HelperError: it ended, or was not ready in time.
    """
    kept = {key: value for key, value in os.environ.items() if key not in _OURS}
    with tempfile.TemporaryFile() as stderr:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=stderr, env={**kept, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
                limit=LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise HelperError(f"{name}: {error}") from error
        helper = Helper(name, process, stderr)
        try:
            await helper.start(hello)
            yield helper
        finally:
            await helper.close()
