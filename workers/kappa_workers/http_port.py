"""A worker's own HTTP port: its engine's application behind `WorkerGate`, on the replica's loop.

Clients' bytes go from the front's data plane straight to the engine's front end, past Ray's proxy
and handles. Ray still places, supervises and replaces the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from kappa_workers.http_gate import WorkerGate

# Longer than the data plane keeps idle connections, so that it never sends on one that closes.
_KEEP_ALIVE_S = 90
_BACKLOG = 4096
# What the front puts into a body comes in a header.
_HEAD_BYTES = 1088 << 10
_STOP_S = 5.0


class WorkerPort:
    """Serves a gate on a free port of `host`; make and close it on the event loop that serves."""

    def __init__(self, gate: WorkerGate, host: str) -> None:
        self.gate = gate
        self._socket = _listening(host)
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"{shown}:{self._socket.getsockname()[1]}"
        """Where fronts reach it, HOST:PORT."""
        # A `log_config` closes all handlers, Ray's among them, which then recovers no replica.
        config = uvicorn.Config(
            gate,  # type: ignore[arg-type]  # our ASGI types are plain dicts
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        self._server = uvicorn.Server(config)
        # Signals are Ray's worker's.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self, drain_s: float) -> int:
        """Send new requests elsewhere, give open ones `drain_s`, then stop; how many were cut."""
        left = await self.gate.drained(drain_s)
        self._server.should_exit = self._server.force_exit = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._task, _STOP_S)
        # Forced, uvicorn keeps open connections until the process ends.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        self._socket.close()
        return left


def _listening(host: str) -> socket.socket:
    """A TCP socket on a free port; OSError if the address is not this machine's."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    return socket.create_server((bare, 0), family=family)
