"""Envoys that tests share: to start one costs more than most tests that ask it.

A test that needs a front door borrows an Envoy with its configuration, in a folder and on a port
of the Envoy's own, and gives it back when the test is over. The next test makes new deciders,
sockets and servers. A test that breaks Envoy, or looks at its whole life, starts one for itself
(`kappa_router.gateway.process.Gateway`).
"""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kappa.host import free_port
from kappa_router.gateway.process import Gateway
from kappa_router.gateway.spec import GatewaySpec

_MOST_IDLE = 4
# Envoy has told by then of all that the test before asked.
_REST_S = 0.1


class _Envoys:
    """The Envoys of this process, on an event loop in a thread of its own, with which they end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._idle: list[tuple[float, Gateway]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kappa-envoys-")
        self._count, self._lock = 0, threading.Lock()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def take(self, spec: GatewaySpec) -> Gateway:
        """One that runs as the spec says, but for its folder and port."""
        with self._lock:
            for at, (since_s, made) in enumerate(self._idle):
                if _but_for_its_place(made.spec) == _but_for_its_place(spec):
                    del self._idle[at]
                    time.sleep(max(0.0, since_s + _REST_S - time.monotonic()))
                    return made
            self._count += 1
            folder = Path(self._folder.name) / str(self._count)
        folder.mkdir(mode=0o700)
        made = Gateway(replace(spec, folder=folder, port=free_port(spec.host)), threads=1)
        self._do(made.__aenter__())
        return made

    def give_back(self, gateway: Gateway) -> None:
        """Keep it for the next, unless it died or there are enough."""
        with self._lock:
            if gateway.pid is not None and not gateway.restarts:
                self._idle.append((time.monotonic(), gateway))
            over = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        for ended in {gateway, over} - {made for _, made in self._idle} - {None}:
            self._do(ended.stop())

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _but_for_its_place(spec: GatewaySpec) -> GatewaySpec:
    return replace(spec, folder=Path(), port=0)


@cache
def _envoys() -> _Envoys:
    return _Envoys()


@contextlib.contextmanager
def lent(spec: GatewaySpec) -> Iterator[Gateway]:
    """An Envoy with that configuration and one decider; its own spec says where it is."""
    assert spec.deciders == 1, "it would still leave out a decider that had gone"
    gateway = _envoys().take(spec)
    try:
        yield gateway
    finally:
        _envoys().give_back(gateway)
