"""Start and stop of the live router in an ingress replica.

It must be made on the event loop that it lives on, which is the one of the first health check or
request. Until Ray has made the router of a handle nobody posts announcements, so it is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from router.admission import Admission
from router.core import RouterConfig
from router.ingress_settings import IngressSettings
from router.live import LiveRouter
from router.policies import policy_named
from router.prefix_hash import secret_from_seed


def router_config(settings: IngressSettings) -> RouterConfig:
    """The pure router's part of the ingress' settings."""
    return RouterConfig(
        policy=policy_named(settings.policy),
        secret=secret_from_seed(settings.secret),
        index_blocks=settings.index_blocks,
        stale_after_s=settings.stale_after_s,
        calibrate=settings.calibrate,
        calibrate_requests=settings.calibrate_requests,
        forecast_workers=settings.forecast_workers,
        admission=Admission() if settings.admission else None,
    )


class LiveStart:
    """The live router, made when first asked for."""

    def __init__(self, settings: IngressSettings, wake: Callable[[], Awaitable[None]]) -> None:
        """`wake`: makes Ray tell of the workers; runs once, beside everything else."""
        self._settings, self._wake = settings, wake
        self._live: LiveRouter | None = None
        self._waking: asyncio.Future[None] | None = None

    def __call__(self) -> LiveRouter:
        """The live router; the first call makes it, on the running event loop."""
        if self._live is None:
            self._live = LiveRouter(router_config(self._settings), record=self._settings.record)
            self._waking = asyncio.ensure_future(self._wake())
        return self._live

    async def close(self) -> None:
        """Stop following workers; returns when nothing of the live router runs any more."""
        live, waking = self._live, self._waking
        self._live = self._waking = None
        if waking is not None:
            waking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waking
        if live is not None:
            await live.close()
