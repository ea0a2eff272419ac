"""Several `kappa route` before the same servers tell each other what they have in flight.

Each follows the others: an answer of JSON lines, first of all that the other has in flight, then,
up to ten times a second, of those that are new or over. The core gets it as what other deciders
sent (`Pool.others`), so that a request is priced behind everybody's. What a peer told is forgotten
once it has been silent for two seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
import structlog
from aiohttp.http import HttpProcessingError
from yarl import URL

from kappa import metrics as m
from kappa.keys import bearer
from kappa.protocol import Arrival, WorkerReport
from kappa.settings.front import FrontSettings
from kappa_router.gateway.endpoints import Resolver
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.supervised import pause_s

log = structlog.get_logger(__name__)

PEERS_PATH = "/v1/in_flight"
_FORM: Literal[1] = 1
# Seconds: between lines, between those that say nothing, from an answer's first to its last, of
# silence after which a peer is forgotten, between look-ups of names.
_EVERY_S, _BEAT_S, _ANSWER_S, SILENT_S, _LOOK_S = 0.1, 0.5, 5.0, 2.0, 5.0
_MOST_PEERS = 32
_MOST_TOKENS, _LONGEST_ID, _ROW_BYTES = 1 << 31, 256, 512
_LEAST_BYTES = 1 << 16
_REFUSED = "it wants an operator's key: give peers.key_env"
_REMEDIES = {401: _REFUSED, 403: _REFUSED, 404: "run one version in all replicas"}


class Told(msgspec.Struct, frozen=True):
    """One line: requests by server, new or with their prompts computed since, and those over."""

    form: Literal[1]
    # A name that it drew at its start.
    router: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    sent: dict[str, list[Arrival]] = {}
    ended: list[str] = []


class Teller:
    """What one peer is told of the requests of `router`, and has been told."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._known: dict[str, tuple[str, bool]] = {}

    def told(self, sent: Mapping[str, Sequence[Arrival]]) -> Told:
        """The next line, from all that is in flight now, by server."""
        now = {
            row.request_id: (worker, row.prefilled) for worker, rows in sent.items() for row in rows
        }
        fresh = {
            worker: [row for row in rows if self._known.get(row.request_id) != now[row.request_id]]
            for worker, rows in sent.items()
        }
        ended = [request_id for request_id in self._known if request_id not in now]
        self._known = now
        return Told(_FORM, self._router, {w: rows for w, rows in fresh.items() if rows}, ended)


class Heard:
    """What one peer has in flight, at most `most` requests, as it told."""

    def __init__(self, most: int) -> None:
        self._most = most
        # The server of each request; its name has the peer's before it, and so is no client's.
        self.servers: dict[str, str] = {}

    def take(self, told: Told, *, whole: bool) -> list[WorkerReport]:
        """What a line says, for `Pool.others`, in this order; whole: it lists all in flight.
        Raises ValueError for what no router of ours says."""
        rows = {
            f"{told.router}/{row.request_id}": (worker, row)
            for worker, sent in told.sent.items()
            for row in sent
        }
        for worker, row in rows.values():
            tokens = row.device_tokens, row.host_tokens, row.new_tokens, row.max_tokens
            if max(*tokens, row.disk_tokens) > _MOST_TOKENS or len(row.request_id) > _LONGEST_ID:
                raise ValueError(f"it names a request at {worker[:80]} that cannot be one")
        known = self.servers
        gone = [f"{told.router}/{one}" for one in told.ended]
        # Those that are at another server now, too.
        gone += [name for name, (worker, _) in rows.items() if known.get(name, worker) != worker]
        if whole:
            gone += [name for name in known if name not in rows]
        if len((known.keys() - set(gone)) | rows.keys()) > self._most:
            raise ValueError(f"it has more than {self._most} requests in flight (router.max_queue)")
        ended, sent = defaultdict[str, list[str]](list), defaultdict[str, list[Arrival]](list)
        for name in gone:
            if name in known:
                ended[known.pop(name)].append(name)
        for name, (worker, row) in rows.items():
            known[name] = worker
            sent[worker].append(msgspec.structs.replace(row, request_id=name))
        return [
            *(WorkerReport(one, 0.0, finished=tuple(names)) for one, names in ended.items()),
            *(WorkerReport(one, 0.0, arrived=tuple(new)) for one, new in sent.items()),
        ]

    def nothing(self) -> list[WorkerReport]:
        """As `take`, once all that it told is to be forgotten."""
        return self.take(Told(_FORM, "-"), whole=True)


@dataclass(slots=True)
class _Peer:
    """One router that is followed, or ourselves."""

    address: str
    url: URL
    # As the settings name it, which its certificate does, too.
    named: URL
    heard: Heard
    # When it last told something, of the monotonic clock; at first, when it became known.
    heard_s: float = field(default_factory=time.monotonic)
    # Its fault; empty if it is heard.
    why: str = "not heard yet"
    oneself: bool = False


class Peers:
    """The other routers that the settings name."""

    def __init__(
        self, settings: FrontSettings, live: LiveRouter, http: aiohttp.ClientSession
    ) -> None:
        self._settings, self._live, self._http = settings.peers, live, http
        self._most, self._name = settings.router.max_queue, secrets.token_hex(8)
        self._ssl: ssl.SSLContext | bool = True
        if settings.ca is not None:
            self._ssl = ssl.create_default_context(cafile=str(settings.ca))
        self._resolver, self._unresolved = Resolver(), ""
        self._peers: dict[str, _Peer] = {}
        self._named: set[str] = set()
        self._ended = False

    # -- telling ------------------------------------------------------------------------------

    async def told(self) -> AsyncIterator[bytes]:
        """JSON lines of what this router has in flight, for some seconds; then a peer asks again,
        and hears all of that once more."""
        teller, begun_s, told_s = Teller(self._name), time.monotonic(), 0.0
        while not self._ended and (now_s := time.monotonic()) < begun_s + _ANSWER_S:
            line = teller.told(self._live.router.sent())
            if line.sent or line.ended or now_s >= told_s + _BEAT_S:
                told_s = now_s
                yield msgspec.json.encode(line) + b"\n"
            await asyncio.sleep(_EVERY_S)

    def end(self) -> None:
        """End all answers, which the end of their server would wait for."""
        self._ended = True

    # -- hearing ------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Follow all that the names resolve to, as that changes, until cancelled."""
        self._peers.clear()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for peer in await self._look_up():
                    if peer.address not in self._peers and len(self._peers) < _MOST_PEERS:
                        self._peers[peer.address] = peer
                        tasks.create_task(self._follow(peer))
                await asyncio.sleep(_LOOK_S)

    async def _look_up(self) -> list[_Peer]:
        """What the names resolve to; of one that does not resolve, what it last resolved to goes
        on as long as it tells something."""
        found: list[_Peer] = []
        why = ""
        for given in self._settings.urls:
            url = URL(given)
            try:
                hosts = await self._resolver.addresses(url.host or "", url.port or 80)
            except (OSError, UnicodeError) as error:
                why = f"{url.host} has no address: {str(error) or 'no answer in time'}"
                continue
            for host in hosts:
                there = url.with_host(host)
                address = f"{there.host_subcomponent}:{there.port}"
                found.append(_Peer(address, there, url, Heard(self._most)))
        if why and why != self._unresolved:
            log.warning("peers_not_resolved", why=why, remedy="peers.urls names other routers")
        self._unresolved, self._named = why, {peer.address for peer in found}
        return found

    async def _follow(self, peer: _Peer) -> None:
        """Follow one until it is oneself, or named no more and silent."""
        attempt, said = 0, ""
        try:
            while not peer.oneself and (peer.address in self._named or self._is_heard(peer)):
                try:
                    await self._hear(peer)
                    peer.why = ""
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    peer.why = str(error) or f"nothing came within {SILENT_S:g} s"
                if peer.oneself or self._is_heard(peer):
                    # Soon again: longer pauses would outlast the time until it is forgotten.
                    attempt, said = 0, ""
                    await asyncio.sleep(_EVERY_S)
                    continue
                self._tell(peer.heard.nothing())
                if peer.why != said:
                    log.warning("peer_not_heard", peer=peer.address, why=peer.why[:500])
                said = peer.why
                await asyncio.sleep(pause_s(attempt))
                attempt += 1
        finally:
            # Oneself, too, where another was heard at this address before.
            self._tell(peer.heard.nothing())
            self._live.metrics.forget("peer", peer.address)
            if not peer.oneself:
                del self._peers[peer.address]

    def _is_heard(self, peer: _Peer) -> bool:
        return time.monotonic() - peer.heard_s < SILENT_S

    async def _hear(self, peer: _Peer) -> None:
        """One answer of a peer, to its end. Raises its fault."""
        async with asyncio.timeout(SILENT_S) as patience:
            async with self._http.get(
                peer.url / PEERS_PATH[1:],
                headers={"host": peer.named.authority, **bearer(self._settings.key)},
                ssl=self._ssl,
                server_hostname=peer.named.host if peer.named.scheme == "https" else None,
                allow_redirects=False,
                read_bufsize=max(_ROW_BYTES * self._most, _LEAST_BYTES) // 2,
            ) as answer:
                if answer.status != 200:
                    remedy = _REMEDIES.get(answer.status, "is it a kappa route?")
                    raise ValueError(f"{PEERS_PATH} answered {answer.status}: {remedy}")
                whole = True
                while told := await _next(answer.content):
                    if told.router == self._name:
                        peer.oneself = True
                        return
                    self._tell(peer.heard.take(told, whole=whole))
                    whole, peer.why, peer.heard_s = False, "", time.monotonic()
                    patience.reschedule(asyncio.get_running_loop().time() + SILENT_S)
                if whole:
                    raise ValueError(f"{PEERS_PATH} answered nothing")

    def _tell(self, reports: Sequence[WorkerReport]) -> None:
        for report in reports:
            self._live.others(report)

    # -- showing ------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Every other router: where it is, how old its last line is, its requests in flight, and
        why it is not heard; refreshes the gauge of that age."""
        now_s, rows = time.monotonic(), []
        for peer in self._peers.values():
            if not peer.oneself:
                age_s = now_s - peer.heard_s
                self._live.metrics.set(m.PEER_AGE, peer.address, to=age_s)
                rows.append({
                    "peer": peer.address, "age_s": age_s, "in_flight": len(peer.heard.servers),
                    "why": peer.why or None,
                })  # fmt: skip
        return rows


async def _next(content: aiohttp.StreamReader) -> Told | None:
    """The next line; None: there is no more. Raises ValueError with the remedy."""
    try:
        line = await content.readline()
        return msgspec.json.decode(line, type=Told) if line else None
    except (msgspec.MsgspecError, RecursionError, HttpProcessingError, ValueError) as error:
        # The two last ones say that it exceeds the buffer, as aiohttp's release has it.
        raise ValueError(
            f"what it tells cannot be read: {error}: run one version in all replicas"
        ) from None
