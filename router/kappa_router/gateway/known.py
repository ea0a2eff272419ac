"""The servers that Envoy knows: one that went is named no more, one that came once it is known."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection

from kappa_router.decision import Decision, RouteRequest
from kappa_router.gateway.endpoints import EndpointsFile
from kappa_router.gateway.process import Gateway, known_of
from kappa_router.gateway.spec import ServerEndpoint
from kappa_router.live.live_router import LiveRouter

# Envoy knows of a server soon after it was found.
_KNOWN_S = 2.0
_LOOK_S, _LOOK_AGAIN_S = 10.0, 1.0


class KnownServers:
    """The part of a `Scene` that tracks which servers Envoy knows.

    endpoints: of these, by name. changed: set when there may be other servers.
    """

    def __init__(self, live: LiveRouter, changed: asyncio.Event) -> None:
        self.live, self._changed = live, changed
        self.endpoints: dict[str, ServerEndpoint] = {}
        self._known = asyncio.Event()

    async def _found(self) -> list[ServerEndpoint]:
        """The servers that are there."""
        raise NotImplementedError

    def address(self, name: str) -> str:
        """The address of a server; empty if Envoy does not know it."""
        endpoint = self.endpoints.get(name)
        return endpoint.address if endpoint is not None else ""

    def by_price(
        self, able: Collection[str], decision: Decision, request: RouteRequest
    ) -> list[str]:
        """The servers among `able` that may serve a request instead of its own, by their price;
        those that seem to fail come last, behind those without a price."""
        blocked, priced = self.live.members.blocked(), decision.priced
        ttfts_s = dict(zip(priced.workers, priced.ttft_s.tolist(), strict=True))

        def order(worker: str) -> tuple[bool, float, int]:
            ttft_s = ttfts_s.get(worker, math.inf)
            return worker in blocked.failing, ttft_s, self.live.router.in_flight_on(worker)

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
        self, envoy: Gateway | None, writer: Callable[[], EndpointsFile | None]
    ) -> None:
        """Have Envoy know the servers as they come and go, until cancelled; None: a gateway that
        knows them by itself. writer: None where another decider writes them down."""
        while True:
            self._changed.clear()
            found = {one.worker: one for one in await self._found()}
            addresses = {name: one.address for name, one in found.items()}
            self.take(
                {n: one for n, one in self.endpoints.items() if addresses.get(n) == one.address}
            )
            file = writer()
            if file is not None:
                file.write(found.values())
            known = frozenset(addresses.values())
            if envoy is not None:
                known = await known_of(envoy, known)
            self.take({name: one for name, one in found.items() if one.address in known})
            with contextlib.suppress(TimeoutError):
                missing = found.keys() - self.endpoints.keys()
                async with asyncio.timeout(_LOOK_AGAIN_S if missing else _LOOK_S):
                    await self._changed.wait()

    def take(self, endpoints: dict[str, ServerEndpoint]) -> None:
        """Envoy knows these."""
        self.endpoints = endpoints
        self._known.set()
