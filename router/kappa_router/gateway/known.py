"""The servers that Envoy knows: one that went is named no more, one that came once it is known."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection

from kappa_router.decision import Decision, RouteRequest
from kappa_router.gateway.endpoints import EndpointsFile
from kappa_router.gateway.process import Gateway, known_of
from kappa_router.gateway.spec import ServerEndpoint
from kappa_router.live.live_router import LiveRouter

# Envoy knows of a server soon after it was found.
_KNOWN_S = 2.0
_LOOK_S, _LOOK_AGAIN_S = 10.0, 1.0


class KnownServers:
    """For a `Scene`. endpoints: of the servers that Envoy knows, by name."""

    def __init__(self) -> None:
        self.endpoints: dict[str, ServerEndpoint] = {}
        self._known = asyncio.Event()

    def address(self, name: str) -> str:
        """Of a server that Envoy knows; else empty."""
        endpoint = self.endpoints.get(name)
        return endpoint.address if endpoint is not None else ""

    def by_price(
        self, able: Collection[str], live: LiveRouter, decision: Decision, request: RouteRequest
    ) -> list[str]:
        """Which of the servers `able` may serve a request instead of its own, by their price; those
        that seem to fail come last, behind those without a price."""
        blocked, priced = live.members.blocked(), decision.priced
        ttfts_s = dict(zip(priced.workers, priced.ttft_s.tolist(), strict=True))

        def order(worker: str) -> tuple[bool, float, int]:
            ttft_s = ttfts_s.get(worker, math.inf)
            return worker in blocked.failing, ttft_s, live.router.in_flight_on(worker)

        known = self.endpoints.keys() & set(able)
        return sorted(known - request.exclude - blocked.gone, key=order)

    async def first_known(self, able: Callable[[], Collection[str]]) -> None:
        """Wait a little if there are servers `able` to serve, of which Envoy knows none yet."""

        def unknown() -> bool:
            return bool(names := able()) and self.endpoints.keys().isdisjoint(names)

        if unknown():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_S):
                    while unknown():
                        self._known.clear()
                        await self._known.wait()

    async def keep_known(
        self,
        find: Callable[[], Awaitable[list[ServerEndpoint]]],
        changed: asyncio.Event,
        envoy: Gateway,
        writer: Callable[[], EndpointsFile | None],
    ) -> None:
        """Have Envoy know the servers as they come and go, until cancelled. find: gives those that
        are there; changed: set when they may be others; writer: None where another decider writes
        them down."""
        while True:
            changed.clear()
            found = {one.worker: one for one in await find()}
            addresses = {name: one.address for name, one in found.items()}
            self.take(
                {n: one for n, one in self.endpoints.items() if addresses.get(n) == one.address}
            )
            file = writer()
            if file is not None:
                file.write(found.values())
            known = await known_of(envoy, frozenset(addresses.values()))
            self.take({name: one for name, one in found.items() if one.address in known})
            with contextlib.suppress(TimeoutError):
                missing = found.keys() - self.endpoints.keys()
                async with asyncio.timeout(_LOOK_AGAIN_S if missing else _LOOK_S):
                    await changed.wait()

    def take(self, endpoints: dict[str, ServerEndpoint]) -> None:
        """Envoy knows these."""
        self.endpoints = endpoints
        self._known.set()
