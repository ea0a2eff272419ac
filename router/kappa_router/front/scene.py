"""The servers of `kappa route` as a decider sees them, and as Envoy reaches them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import structlog

from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import SESSION_HEADER
from kappa_router.decision import RouteRequest
from kappa_router.front.facts import usage_in
from kappa_router.front.front import DECIDED_PATHS, Flying, Front
from kappa_router.gateway.endpoints import EndpointsFile, Resolver, shared_addresses
from kappa_router.gateway.known import KnownServers
from kappa_router.gateway.process import Gateway
from kappa_router.gateway.scene import Asked, Reading, Used
from kappa_router.gateway.spec import ServerEndpoint
from kappa_router.live.live_router import LiveRouter

log = structlog.get_logger(__name__)

PASSED_PATHS = (
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank",
    "/v1/score", "/score", "/pooling", "/classify", "/tokenize", "/detokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
)  # fmt: skip
"""Inference that is not priced, and may be done twice."""
# The most that one sound or image comes to, of which a body that is not JSON is.
_MEDIA_TOKENS = 16_384
_OF_IDS = re.compile(rb'"(?:prompt|input)"\s*:\s*\[[\s\[]*[0-9]')


class FrontScene(KnownServers):
    """A `Scene` over a front that runs."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.front = front
        self.priced = frozenset(DECIDED_PATHS)
        self.passed = frozenset({*PASSED_PATHS, *front.settings.passed}) - self.priced
        self._workers: dict[str, str] = {}
        self._faults: set[str] = set()

    @property
    def live(self) -> LiveRouter:
        """The front's."""
        return self.front.live

    async def read(self, asked: Asked) -> Reading:
        """As `Front.read`. Raises ApiError 404 for a model that no server has, 400 for fields that
        would hide how many tokens an answer has."""
        front, body = self.front, asked.body
        wanted = await front.read(asked.path, body, asked.tenant)
        if wanted.merged:
            raise errors.refused_field("stream_interval", "events are counted as tokens")
        if body[:1] == b"{":
            # Ids, of which each may be a digit and a comma.
            ids = body.count(b",") if _OF_IDS.search(body) else 0
            wanted.bound = max(wanted.bound, ids)
        else:
            wanted.bound = min(len(body), _MEDIA_TOKENS)
        wanted.session = asked.headers.get(SESSION_HEADER) or wanted.session
        request = front.request(asked.request_id, wanted)
        usable = front.usable()
        await self.first_known(lambda: usable - request.exclude)
        away = frozenset(front.backends) - self.endpoints.keys()
        return Reading(
            replace(request, exclude=request.exclude | away),
            wanted.max_tokens * wanted.answers, wanted.streamed,
            repeatable=asked.path in self.priced or asked.path in PASSED_PATHS,
        )  # fmt: skip

    def decide(self, request: RouteRequest, tenant: str) -> Flying:
        """As `Front.decide`."""
        return self.front.decide(request, tenant)

    def refused(self, request: RouteRequest, error: ApiError) -> None:
        """Nothing to forget."""

    def others(self, flight: Flying, request: RouteRequest) -> Sequence[str]:
        """Those that are usable; none if a balancer chooses."""
        if flight.via:
            return ()
        return self.by_price(self.front.usable(), self.live, flight.decision, request)

    def headers(self, flight: Flying) -> Mapping[str, str]:
        """None: servers know nothing of us."""
        return {}

    def arrived(self, flight: Flying, request: RouteRequest, at: str) -> None:
        """As `Front.moved`, or as `Front.answered` behind the present balancer."""
        if flight.via:
            self.front.answered(flight, request, at)
        elif (worker := self._workers.get(at)) is not None:
            self.front.moved(flight, request, worker)

    def used(self, flight: Flying, tail: bytes) -> Used | None:
        """Learn what it holds from an answer's usage."""
        usage = usage_in(tail)
        if usage is None:
            return None
        self.front.used(flight, usage)
        return Used(usage.prompt_tokens, usage.completion_tokens)

    def patience_s(self, flight: Flying) -> float:
        """Not known: deadlines are the servers'."""
        return math.inf

    async def lives(self, worker: str) -> bool:
        """As `Backend.lives`."""
        return await self.front.backends[worker].lives()

    def ended(self, flight: Flying, end: str) -> None:
        """As `Front.ended`."""
        self.front.ended(flight, end)

    def over(self, flight: Flying, end: str, status: int) -> None:
        """Nothing more than `ended`."""

    # -- for Envoy ------------------------------------------------------------------------------

    async def follow(self, gateway: Gateway) -> None:
        """Have Envoy know the servers as they come and go, until cancelled."""
        file, resolver = EndpointsFile(gateway.spec.endpoints_file), Resolver()
        await self.keep_known(
            partial(self._found, resolver), self.front.changed, gateway, lambda: file
        )

    def take(self, endpoints: dict[str, ServerEndpoint]) -> None:
        """Envoy knows these."""
        self._workers = {one.address: name for name, one in endpoints.items()}
        super().take(endpoints)

    async def _found(self, resolver: Resolver) -> list[ServerEndpoint]:
        """Every server that was there, and is not refused, with an address of its own: one that is
        down may be back before Envoy could be told of it."""
        wanted = [
            (one.settings.worker, one.settings.url, one.settings.key or "", one.usable)
            for one in self.front.backends.values() if one.known is not None and not one.refused
        ]  # fmt: skip
        if balancer := self.front.rollout.balancer:
            wanted.append((balancer, balancer, "", False))
        found, faults = dict[str, ServerEndpoint](), set[str]()
        for name, url, key, usable in wanted:
            try:
                made = await endpoint_of(name, url, key, resolver)
            except OSError as error:
                faults.add(str(error))
                continue
            faults.update(shared_addresses([*found.values(), made]))
            found.setdefault(made.address, replace(made, open=usable))
        for fault in sorted(faults - self._faults):
            log.error("backend_not_used", why=fault)
        self._faults = faults
        return list(found.values())


async def endpoint_of(name: str, url: str, key: str, resolver: Resolver) -> ServerEndpoint:
    """A server as Envoy reaches it; raises OSError if its name has no address."""
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    address = await resolver.address(host, port)
    # Its name in a certificate has no port.
    named = host if tls else parts.netloc
    return ServerEndpoint(name, address, port, named, tls, prefix=parts.path, key=key)
