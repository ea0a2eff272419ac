"""The Envoy of a cluster: a child of the process that started the cluster, on a thread of its own.

The decider is a Ray Serve replica on the same machine; the two meet in a private folder.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from kappa.settings.cluster import ClusterSettings
from kappa_deploy.app.errors import StartError
from kappa_router.cluster.paths import ASKED, own_paths
from kappa_router.gateway.process import EnvoyError, Gateway, spec_of
from kappa_router.gateway.spec import GatewaySpec

_STOP_MARGIN_S = 20.0


def front_door_spec(settings: ClusterSettings, folder: Path) -> GatewaySpec:
    """The front door of a cluster with these settings."""
    models = [one.model for one in settings.by_model()]
    names = [name for model in models for name in (model.id, *model.adapters)]
    spec = spec_of(
        settings.http, settings.access, folder=folder, decided=ASKED, own=own_paths(names),
        max_body_bytes=settings.router.max_body_bytes, foreign=False,
    )  # fmt: skip
    # A first token may take as long as a request; a decider that is silent for longer is lost.
    router = settings.router
    bounds = replace(spec.bounds, silent_s=router.request_timeout_s, lost_s=router.stale_after_s)
    return replace(spec, bounds=bounds)


class FrontDoor:
    """An Envoy that runs from `start` to `stop`."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kappa-serve-")
        self.spec = front_door_spec(settings, Path(self._folder.name))
        self._loop = asyncio.new_event_loop()
        # Envoy ends with the thread that started it.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="envoy")
        self._gateway = Gateway(self.spec)
        self._died: Future[None] | None = None

    def start(self) -> None:
        """Return when it listens; StartError says why it cannot."""
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._gateway.__aenter__(), self._loop)
        try:
            starting.result()
        except EnvoyError as error:
            raise StartError(str(error)) from None
        self._died = asyncio.run_coroutine_threadsafe(self._gateway.died(), self._loop)

    def ended(self) -> str:
        """Why it serves no more; empty while it does."""
        if self._died is None or not self._died.done():
            return ""
        error = self._died.exception()
        return str(error) if error is not None else ""

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, give open ones `drain_s`, then end Envoy; safe to call twice."""
        if self._thread.is_alive():
            ending = asyncio.run_coroutine_threadsafe(self._gateway.stop(drain_s), self._loop)
            try:
                ending.result(drain_s + _STOP_MARGIN_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_STOP_MARGIN_S)
        self._folder.cleanup()
