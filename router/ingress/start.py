"""Start and stop of the live router in an ingress replica.

It must be made on the event loop that it lives on, which is the one of the first health check or
request. Until Ray has made the router of a handle nobody posts announcements, so it is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from router.admission import Admission
from router.index.prefix_hash import secret_from_seed
from router.ingress.settings import IngressSettings
from router.live.breaker import BreakerRule
from router.live.live_router import LiveRouter
from router.live.members import MemberRule
from router.policies import policy_named
from router.router import RouterConfig

_ASK_AGAIN_S = 0.05
_DRAIN_MARGIN_S = 5.0


def router_config(settings: IngressSettings, rank: int = 0) -> RouterConfig:
    """The pure router's part of the settings, for the ingress of this rank."""
    return RouterConfig(
        policy=policy_named(settings.policy),
        secret=secret_from_seed(settings.secret),
        index_blocks=settings.index_blocks,
        stale_after_s=settings.stale_after_s,
        calibrate=settings.calibrate,
        calibrate_requests=settings.calibrate_requests,
        forecast_workers=settings.forecast_workers,
        admission=Admission() if settings.admission else None,
        first=rank % settings.replicas / settings.replicas,
    )


def member_rule(settings: IngressSettings) -> MemberRule:
    """When a worker counts as gone."""
    failover = settings.failover
    return MemberRule(
        stall_after_s=failover.stall_after_s,
        lost_after_s=max(settings.stale_after_s, failover.stall_after_s),
        # Ray ends it at its own time; a little later it is gone for us, too.
        drain_s=settings.drain_s + _DRAIN_MARGIN_S,
        breaker=BreakerRule(
            failures=failover.failures,
            pause_s=failover.pause_s,
            longest_pause_s=failover.longest_pause_s,
        ),
    )


def record_file(settings: IngressSettings, rank: int) -> str | None:
    """Where the ingress of this rank writes its log: each its own, where there are several."""
    if settings.record is None or settings.replicas == 1:
        return settings.record
    path = Path(settings.record)
    return str(path.with_name(f"{path.stem}-{rank}{path.suffix}"))


class LiveStart:
    """The live router, made when first asked for."""

    def __init__(
        self, settings: IngressSettings, wake: Callable[[], Awaitable[None]], rank: int = 0
    ) -> None:
        """`wake`: makes Ray tell of the workers; runs once, beside everything else. `rank`: which
        of the ingresses this is."""
        self._settings, self._wake, self._rank = settings, wake, rank
        self._live: LiveRouter | None = None
        self._waking: asyncio.Future[None] | None = None

    def __call__(self) -> LiveRouter:
        """The live router; the first call makes it, on the running event loop."""
        if self._live is None:
            seen = self._settings.observing
            self._live = LiveRouter(
                router_config(self._settings, self._rank),
                record=record_file(self._settings, self._rank),
                rule=member_rule(self._settings),
                counting=seen.metrics,
                request_log=seen.request_log,
            )
            self._waking = asyncio.ensure_future(self._wake())
        return self._live

    async def known(self, within_s: float) -> bool:
        """Wait until what the workers hold is known, at most so long; whether it is.

        Nobody should be sent to an ingress that has only just begun to ask.
        """
        live = self()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not live.members.synced:
                    await asyncio.sleep(_ASK_AGAIN_S)
        return live.members.synced

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
