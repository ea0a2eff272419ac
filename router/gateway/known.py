"""The servers that Envoy knows: one that went is named no more, one that came once it is known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from router.gateway.endpoints import EndpointsFile
from router.gateway.process import Gateway, known_of
from router.gateway.spec import ServerEndpoint

# Envoy knows of a server soon after it was found.
_KNOWN_S = 2.0


class KnownServers:
    """For a `Scene`. endpoints: of the servers that Envoy knows, by name."""

    def __init__(self) -> None:
        self.endpoints: dict[str, ServerEndpoint] = {}
        self._known = asyncio.Event()

    def address(self, name: str) -> str:
        """Of a server that Envoy knows; else empty."""
        endpoint = self.endpoints.get(name)
        return endpoint.address if endpoint is not None else ""

    async def first_known(self, able: Callable[[], Collection[str]]) -> None:
        """Wait a little if there are servers `able` to serve, of which Envoy knows none yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KNOWN_S):
                while (names := able()) and self.endpoints.keys().isdisjoint(names):
                    self._known.clear()
                    await self._known.wait()

    async def become(
        self, found: dict[str, ServerEndpoint], kept: dict[str, ServerEndpoint],
        envoy: Gateway, file: EndpointsFile | None,
    ) -> None:  # fmt: skip
        """Have Envoy know these servers from now on; kept: those of `endpoints` that stay; file:
        None where another decider writes it."""
        self.take(kept)
        if file is not None:
            file.write(found.values())
        known = await known_of(envoy, frozenset(one.address for one in found.values()))
        self.take({name: one for name, one in found.items() if one.address in known})

    def take(self, endpoints: dict[str, ServerEndpoint]) -> None:
        """Envoy knows these."""
        self.endpoints = endpoints
        self._known.set()
