"""The servers of `kappa route` as a decider sees them, and as Envoy reaches them."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import structlog

from kappa.protocol import DECIDED_PATHS, NO_RANK, PASSED_PATHS, TO_RANK_HEADER, Admission
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import SESSION_HEADER
from kappa_router.api.request import objective_of
from kappa_router.decision import Decision, NoWorkerError, RouteRequest
from kappa_router.front.backend import Backend
from kappa_router.front.facts import usage_in
from kappa_router.front.front import Front
from kappa_router.gateway.endpoints import EndpointsFile, Resolver, shared_addresses
from kappa_router.gateway.known import KnownServers
from kappa_router.gateway.process import Gateway
from kappa_router.gateway.scene import Asked, Reading, Used
from kappa_router.gateway.spec import SUBSET_HEADER, ServerEndpoint
from kappa_router.sent_prompts import Sent

log = structlog.get_logger(__name__)

# The most that one sound or image comes to, of which a body that is not JSON is.
_MEDIA_TOKENS = 16_384
_OF_IDS = re.compile(rb'"(?:prompt|input)"\s*:\s*\[[\s\[]*[0-9]')


@dataclass(slots=True)
class Flying:
    """A request at a server."""

    decision: Decision
    backend: Backend
    # Its name, the tenant's in front.
    conversation: str
    # The blocks that it brings there.
    sent: Sent | None = None
    # The present balancer that it is sent to instead, which may choose another server.
    via: str = ""

    def forget(self) -> None:
        """It is not at its server any more."""
        if self.sent is not None and self.backend.sent is not None:
            self.backend.sent.ended(self.sent)


class FrontScene(KnownServers):
    """A `Scene` over a front that runs."""

    def __init__(self, front: Front) -> None:
        super().__init__(front.live, front.changed)
        self.front, self._resolver = front, Resolver()
        self.priced = frozenset(DECIDED_PATHS)
        self.passed = frozenset({*PASSED_PATHS, *front.settings.passed}) - self.priced
        self._workers: dict[str, str] = {}
        self._ranked = any(one.rank is not None for one in front.backends.values())
        self._faults: set[str] = set()
        self._warned = False

    async def read(self, asked: Asked) -> Reading:
        """As `Front.read`. Raises ApiError 404 for a model that no server has, 400 for fields that
        would hide how many tokens an answer has, and for an objective that is none."""
        front, body, tenant = self.front, asked.body, asked.tenant
        priority, ttft_limit_s = objective_of(asked.headers, front.settings.router, tenant)
        wanted = await front.read(asked.path, body, tenant)
        if wanted.merged:
            raise errors.refused_field("stream_interval", "events are counted as tokens")
        if body[:1] == b"{":
            # Ids, of which each may be a digit and a comma.
            ids = body.count(b",") if _OF_IDS.search(body) else 0
            wanted.bound = max(wanted.bound, ids)
        else:
            wanted.bound = min(len(body), _MEDIA_TOKENS)
        wanted.session = asked.headers.get(SESSION_HEADER) or wanted.session
        request = front.request(asked.request_id, wanted, asked.path)
        usable = front.usable()
        await self.first_known(lambda: usable - request.exclude)
        away = frozenset(front.backends) - self.endpoints.keys()
        if (subset := asked.headers.get(SUBSET_HEADER)) is not None:
            addresses = subset.split(",")
            known = self.endpoints.items()
            # All ranks that an address has.
            allowed = {name for name, one in known if one.address in addresses}
            away |= front.backends.keys() - allowed
            if not usable - away:
                why = f"the gateway allows {subset[:200] or 'none'}, of which none can serve"
                raise errors.NO_WORKER(why=why, retry_after_s=self.live.retry_after_s())
        request = replace(request, exclude=request.exclude | away, tenant=tenant.name)
        return Reading(
            replace(request, weight=tenant.weight, priority=priority, ttft_limit_s=ttft_limit_s),
            wanted.max_tokens * wanted.answers,
            wanted.streamed,
            repeatable=asked.path in self.priced or asked.path in PASSED_PATHS,
        )

    def decide(self, request: RouteRequest) -> Flying:
        """Choose a server and reserve it; raises NoWorkerError. `ended` follows."""
        conversation = f"{request.tenant} {request.session or request.request_id}"
        present = self.front.rollout.other(conversation)
        decision = self.live.route(request, present=present)
        flight = Flying(decision, self.front.backends[decision.worker], conversation)
        if present is not None:
            # Where a real balancer is to choose, the server is a guess.
            flight.via = self.front.rollout.balancer
        if not flight.via:
            self._holds(flight)
        return flight

    def _holds(self, flight: Flying) -> None:
        """Its server will hold its blocks, where a history of sent prompts is kept."""
        backend, index = flight.backend, self.live.router.index
        hashes = flight.decision.priced.prefix_hashes
        if backend.sent is not None and index is not None and len(hashes):
            flight.sent = backend.sent.send(index, hashes)

    def refused(self, request: RouteRequest, error: ApiError) -> None:
        """Nothing to forget."""

    def others(self, flight: Flying, request: RouteRequest) -> Sequence[str]:
        """Those that are usable; none if a balancer chooses."""
        if flight.via:
            return ()
        # Ranks have one address, and fail together.
        first = {self.address(flight.decision.worker): ""}
        for one in self.by_price(self.front.usable(), flight.decision, request):
            first.setdefault(self.address(one), one)
        return [one for one in first.values() if one]

    def headers(self, flight: Flying) -> Mapping[str, str]:
        """The rank that it is for, where some server has several; servers know nothing else."""
        if not self._ranked or flight.via:
            return {}
        rank = flight.backend.rank
        return {TO_RANK_HEADER: NO_RANK if rank is None else str(rank)}

    def arrived(self, flight: Flying, request: RouteRequest, at: str) -> None:
        """It is at that server; behind the present balancer at the one that the answer names."""
        worker = self._named(at) if flight.via else self._workers.get(at, "")
        if worker:
            self._moved(flight, request, worker)
        if flight.via:
            self._holds(flight)

    def _named(self, given: str) -> str:
        """The server that an answer through the present balancer names; empty: none."""
        named = given.removeprefix("http://").removeprefix("https://")
        for name, one in self.front.backends.items():
            if named in (name, urlsplit(one.settings.url).netloc):
                return name
        if not self._warned:
            self._warned = True
            log.warning(
                "present_balancer_names_no_server", header=self.front.settings.present_header,
                found=named, remedy="have it name the server's HOST:PORT; until then servers are "
                "guessed and the report is not to be trusted",
            )  # fmt: skip
        return ""

    def _same(self, *names: str) -> bool:
        """Whether these are one server, or ranks of it."""
        backends = self.front.backends
        places = {backends[one].settings.url if one in backends else one for one in names}
        return len(places) == 1

    def _moved(self, flight: Flying, request: RouteRequest, worker: str) -> None:
        """It is at another server than was thought. One that is not known to live is not followed:
        the guess stands."""
        if self._same(worker, flight.decision.worker):
            return  # Which of a server's ranks has it is not told.
        with contextlib.suppress(NoWorkerError):
            flight.decision = self.live.moved(request, worker)
            flight.forget()
            held, flight.sent, flight.backend = flight.sent, None, self.front.backends[worker]
            if held is not None:
                self._holds(flight)

    def used(self, flight: Flying, tail: bytes) -> Used | None:
        """Learn what it holds from an answer's usage."""
        usage = usage_in(tail)
        if usage is None:
            return None
        flight.backend.answered()
        if usage.cached_tokens is not None and usage.prompt_tokens:
            self._correct(flight, usage.cached_tokens / usage.prompt_tokens)
        return Used(usage.prompt_tokens, usage.completion_tokens)

    def _correct(self, flight: Flying, share: float) -> None:
        """The server says what share of its prompt it found in its caches."""
        index, sent, decision = self.live.router.index, flight.sent, flight.decision
        history = flight.backend.sent
        if index is None or sent is None or history is None:
            return
        # Of its prompt in our tokens, which are four bytes of its text.
        cached = int(share * decision.prompt_tokens)
        history.found(index, sent, cached // decision.priced.block_tokens)
        device = min(decision.chosen.counts.device_tokens, cached)
        record = self.live.records.get(decision.request_id)
        if record is not None:
            new = max(decision.prompt_tokens - cached, 1)
            flight.backend.admitted(Admission(record.sent_as, device, cached - device, new))

    def patience_s(self, flight: Flying) -> float:
        """Not known: deadlines are the servers'."""
        return math.inf

    async def lives(self, worker: str) -> bool:
        """As `Backend.lives`."""
        backend = self.front.backends.get(worker)
        return backend is not None and await backend.lives()

    def ended(self, flight: Flying, end: str) -> None:
        """It is over at its server (`LiveRouter.release`)."""
        flight.forget()
        live, decision, journal = self.live, flight.decision, self.front.journal
        reserved = live.router.flights.get(decision.request_id)
        record = live.records.get(decision.request_id)
        live.release(decision.request_id, end)
        # One that another attempt has replaced has a line of its own.
        if journal is None or reserved is None or record is None or not record.end:
            return
        told = {
            **record.to_dict(), "worker": decision.worker, "end_s": time.time(),
            "prompt_tokens": decision.prompt_tokens, "output_tokens": reserved.output_tokens,
        }  # fmt: skip
        journal.ended(told, flight.conversation, decision.priced.prefix_hashes)

    def over(self, flight: Flying, end: str, status: int) -> None:
        """Nothing more than `ended`."""

    # -- for Envoy ------------------------------------------------------------------------------

    async def follow(self, gateway: Gateway | None) -> None:
        """As `keep_known`."""
        file = EndpointsFile(gateway.spec.endpoints_file) if gateway is not None else None
        await self.keep_known(gateway, lambda: file)

    def take(self, endpoints: dict[str, ServerEndpoint]) -> None:
        """Envoy knows these."""
        self._workers = {one.address: name for name, one in reversed(endpoints.items())}
        super().take(endpoints)

    async def _found(self) -> list[ServerEndpoint]:
        """Every server that was there, and is not refused, with an address of its own: one that is
        down may be back before Envoy could be told."""
        wanted = [
            (one.settings.worker, one.settings.url, one.settings.key or "", one.usable)
            for one in self.front.backends.values()
            if one.known is not None and not one.refused
        ]
        if balancer := self.front.rollout.balancer:
            wanted.append((balancer, balancer, "", False))
        found, faults = dict[str, ServerEndpoint](), set[str]()
        for name, url, key, usable in wanted:
            try:
                made = await endpoint_of(name, url, key, self._resolver)
            except OSError as error:
                faults.add(str(error))
                continue
            first = next((one for one in found.values() if one.address == made.address), made)
            if first is made or self._same(first.worker, name):
                found[name] = replace(made, open=usable)
            else:
                faults.update(shared_addresses((first, made)))
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
