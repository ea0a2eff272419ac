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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.routing.peers.process import peer_environment

_LINE_BYTES = 1 << 24
_ANSWER_S = 60.0
_END_S = 5.0


class SidecarError(Exception):
    """A helper did not start, answer or stay; says what it said last."""


class Sidecar:
    """One helper process; use `started` to make one and `close` to end it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr: Any) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._process, self._stderr = process, stderr
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def started(
        cls, name: str, command: Sequence[str], hello: dict[str, Any], timeout_s: float
    ) -> Sidecar:
        """Start `command`, give it `hello`, and wait until it is ready.

        Raises:
            SidecarError: it ended, or was not ready in time.
        """
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=peer_environment({"PYTHONUNBUFFERED": "1"}),
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            stderr.close()
            raise SidecarError(f"{name}: {error}") from error
        self = cls(name, process, stderr)
        try:
            self._write(hello)
            self.ready = await asyncio.wait_for(self._first_answer(), timeout_s)
            if "error" in self.ready:
                raise self._failed(str(self.ready["error"]))
        except BaseException as error:
            failure = self._failed(f"it was not ready within {timeout_s:g} s")
            await self.close(grace_s=0.0)
            if isinstance(error, TimeoutError):
                raise failure from None
            raise
        self._reader = asyncio.create_task(self._read())
        return self

    @property
    def pid(self) -> int:
        """The helper's process id."""
        return self._process.pid

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
            SidecarError: it has none, or is gone.
        """
        if self._reader is None or self._reader.done():
            raise self._failed("it has ended")
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            self._write({**message, "id": number})
            answer = await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError:
            raise self._failed(f"no answer within {_ANSWER_S:g} s") from None
        finally:
            self._asked.pop(number, None)
        if "error" in answer:
            raise self._failed(str(answer["error"]))
        return answer

    def tell(self, message: dict[str, Any]) -> None:
        """Say something that wants no answer."""
        self._write(message)

    async def close(self, grace_s: float = _END_S) -> None:
        """End it and all it started, by force after `grace_s`; again is harmless."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._stderr.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _first_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
        raise self._failed("it ended before it was ready")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                with contextlib.suppress(ValueError, AttributeError):
                    message = json.loads(line)
                    future = self._asked.get(message.get("id", -1))
                    if future is not None and not future.done():
                        future.set_result(message)
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_result({"error": "it has ended"})

    def _failed(self, what: str) -> SidecarError:
        said: list[str] = []
        if not self._stderr.closed:
            size = os.fstat(self._stderr.fileno()).st_size
            tail = os.pread(self._stderr.fileno(), 2000, max(size - 2000, 0))
            said = tail.decode(errors="replace").strip().splitlines()[-3:]
        return SidecarError(f"{self.name}: {what}" + (f" ({' | '.join(said)})" if said else ""))


def script_command(python: str | Path, name: str) -> list[str]:
    """How to run one of the scripts with some interpreter."""
    return [str(python), "-I", str(Path(__file__).with_name("scripts") / name)]
