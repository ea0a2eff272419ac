"""Fetches blocks from another worker's host tier: the room for them, the transfer, and its end.

The router names a peer and the blocks in the request's `kv_transfer_params`. The transfer begins
when the request arrives and fills rows of the host tier, which count as being stored meanwhile: a
look-up of them is put off. Blocks that came are loaded like any block of the tier; the others are
computed. Copies of a peer's blocks are evicted before the tier's own blocks, and never displace
these.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kappa.protocol import PEER_PARAM
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.options import PeerOptions
from kappa_workers.vllm.peer_server import (
    LENGTH,
    BlockQuestion,
    HostRows,
    PeerError,
    receive,
    receive_frame,
    receive_into,
    send_frame,
    transfer_until_s,
)

log = structlog.get_logger(__name__)

_News = dict[str, object]

_MOST_QUEUED = 64
# A peer that failed is left alone for so long.
_RETRY_S = 5.0
_ROOM_EVERY_S = 0.1


class PeerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the router says of a fetch."""

    # The peer's.
    endpoint: str
    # Leading tokens of the prompt that this worker has.
    start: int
    # Leading tokens of the prompt that the peer has.
    stop: int
    # Whether the peer computed them for this request: they may then displace the tier's own blocks,
    # as if they were computed here.
    handed: bool = False


@dataclass(slots=True, eq=False)
class _PeerFetch:
    """A fetch for one request."""

    request: Any
    context: ReqContext
    endpoint: str
    handed: bool
    # Of each block: its number in the prompt, its key, and the slot for it.
    places: list[tuple[int, OffloadKey, int]]
    # How many of the leading blocks came; None: under way.
    came: int | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


class HostTierFetches:
    """The fetches of one engine, on the scheduler's side."""

    def __init__(
        self,
        options: PeerOptions,
        manager: HostTierManager,
        rows: Callable[[], HostRows | None],
        report: Callable[[_News], None],
        record: Callable[[Any, int, OffloadKey], None],
        block_tokens: int,
    ) -> None:
        """record: tells vLLM's event tracker of a request's block that is about to be there."""
        self._options, self._manager, self._rows = options, manager, rows
        self._report, self._record, self._block_tokens = report, record, block_tokens
        self._fetches: dict[str, _PeerFetch] = {}
        # Of requests that ended while theirs was under way.
        self._orphans: list[_PeerFetch] = []
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "kappa-fetch")
        self._news: list[_News] = []
        self._left_alone_until_s: dict[str, float] = {}
        self._room, self._room_s, self._ended = -1, 0.0, False
        manager.before_reset, manager.copying = self.cancel, lambda: self.has_work

    # -- the scheduler's thread ---------------------------------------------------------------

    def begin(self, request: Any, context: ReqContext, keys: list[OffloadKey]) -> None:
        """Fetch what a new request's parameters name; keys: of its prompt's blocks, in order."""
        params = _params(request)
        if params is None or len(self._fetches) >= _MOST_QUEUED:
            return
        rows = self._rows()
        if rows is None:
            return
        size = self._block_tokens
        blocks = range(max(params.start, 0) // size, min(params.stop // size, len(keys)))
        wanted = [i for i in blocks if not self._manager.knows(keys[i])]
        missing = [keys[i] for i in wanted]
        slots = self._manager.reserve(missing, context, displacing=params.handed)
        places = [(i, keys[i], slot) for i, slot in zip(wanted, slots, strict=False)]
        if not places:
            return
        fetch = _PeerFetch(request, context, params.endpoint, params.handed, places)
        self._fetches[request.request_id] = fetch
        self._thread.submit(self._run, fetch, rows)

    def under_way(self, request_id: str) -> bool:
        """Whether a request's blocks are still to come."""
        fetch = self._fetches.get(request_id)
        return fetch is not None and fetch.came is None

    def finished(self, request_id: str) -> None:
        """A request ended, perhaps before its blocks came."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._orphans.append(fetch)

    def take_ended(self) -> bool:
        """Whether any fetch ended since the last call."""
        self.settle()
        ended, self._ended = self._ended, False
        return ended

    def settle(self) -> None:
        """Count the blocks that came as stored, and free the room of the others."""
        ended = [(name, one) for name, one in self._fetches.items() if one.came is not None]
        for name, _ in ended:
            del self._fetches[name]
        gone: list[_PeerFetch] = []
        orphans, self._orphans = self._orphans, []
        for one in orphans:
            # Looked at once: on the fetching thread it may come at any moment.
            (gone if one.came is not None else self._orphans).append(one)
        for fetch in [*(one for _, one in ended), *gone]:
            self._complete(fetch)
            self._ended = True
        with self._changed:
            news, self._news = self._news, []
        for message in news:
            self._report(message)
        self._report_room()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a fetch has ended, at most so long; at once where none is under way."""
        with self._changed:
            under_way = any(one.came is None for one in self._fetches.values())
            if under_way and not any(one.came is not None for one in self._fetches.values()):
                self._changed.wait(timeout_s)

    @property
    def has_work(self) -> bool:
        """Whether room is held for blocks of requests that ended."""
        return bool(self._orphans)

    def cancel(self) -> None:
        """The tier is emptied: give up all fetches, and wait until none writes to it."""
        fetches = [*self._fetches.values(), *self._orphans]
        for fetch in fetches:
            fetch.cancelled.set()
        with self._changed:
            limit_s = self._options.wait_s + 1.0
            self._changed.wait_for(lambda: all(f.came is not None for f in fetches), limit_s)
        self._fetches, self._orphans = {}, []

    def close(self) -> None:
        self.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _complete(self, fetch: _PeerFetch) -> None:
        came = fetch.places[: fetch.came]
        for i, key, _ in came:
            self._record(fetch.request, i, key)
        keys = [key for _, key, _ in fetch.places]
        whole, lost = keys[: len(came)], keys[len(came) :]
        self._manager.copied(whole, lost, fetch.context, displaceable=not fetch.handed)

    def _report_room(self) -> None:
        """Tell how much a peer could send here, when it changed."""
        room, now_s = self._manager.room_blocks, time.monotonic()
        if room != self._room and now_s - self._room_s >= _ROOM_EVERY_S:
            self._room, self._room_s = room, now_s
            self._report({"kind": "room", "blocks": room})

    # -- the fetching thread ------------------------------------------------------------------

    def _run(self, fetch: _PeerFetch, rows: HostRows) -> None:
        came, news = 0, _News()
        try:
            came, news = self._fetch(fetch, rows)
        except (PeerError, OSError, msgspec.MsgspecError) as error:
            self._left_alone_until_s[fetch.endpoint] = time.monotonic() + _RETRY_S
            reason = str(error) or type(error).__name__
            log.warning("peer_fetch_failed", peer=fetch.endpoint.partition("/")[0], reason=reason)
        except Exception:
            # Whatever it was: the request must not wait for ever.
            log.exception("peer_fetch_failed")
        with self._changed:
            fetch.came = came
            if news:
                self._news.append(news)
            if came < len(fetch.places) and not fetch.cancelled.is_set():
                self._news.append({"kind": "tier_failed", "why": "fetch"})
            self._changed.notify_all()

    def _fetch(self, fetch: _PeerFetch, rows: HostRows) -> tuple[int, _News]:
        """Fill the rows of a fetch; returns how many blocks came whole, and the report."""
        if time.monotonic() < self._left_alone_until_s.get(fetch.endpoint, 0.0):
            raise PeerError("it failed a moment ago")
        options, address = self._options, fetch.endpoint.partition("/")
        host, _, port = address[0].rpartition(":")
        if not port.isdigit():
            raise PeerError("its address is none")
        pace_s = options.pace_s(len(fetch.places) * self._block_tokens)
        keys = [bytes(key) for _, key, _ in fetch.places]
        question = BlockQuestion(address[2], keys, pace_s, fetch.handed)
        with socket.create_connection((host.strip("[]"), int(port)), options.wait_s) as connection:
            send_frame(connection, msgspec.msgpack.encode(question))
            # Others' transfers may be ahead of ours.
            until_s = time.monotonic() + options.wait_s * (2 if fetch.handed else 1)
            found, widths = msgspec.msgpack.decode(
                receive_frame(connection, until_s), type=tuple[int, list[int]]
            )
            start_s = time.monotonic()
            if found and widths != rows.widths:
                raise PeerError(f"its blocks have rows of {widths} bytes, ours {rows.widths}")
            found = max(min(found, len(fetch.places)), 0)
            size = found * sum(widths)
            until_s = transfer_until_s(options, size)
            for _, _, slot in fetch.places[:found]:
                for row in rows.of(slot):
                    if fetch.cancelled.is_set():
                        raise PeerError("the tier was emptied")
                    receive_into(connection, row, min(until_s, time.monotonic() + options.wait_s))
            tokens = found * self._block_tokens
            pause_s = start_s + options.pace_s(tokens) - time.monotonic()
            if found and pause_s > 0:
                fetch.cancelled.wait(pause_s)
            connection.settimeout(options.wait_s)
            connection.sendall(b"\x01")
            last = receive(connection, LENGTH.size, time.monotonic() + options.wait_s)
            (whole,) = LENGTH.unpack(last)
        took_s = time.monotonic() - start_s
        news: _News = {"kind": "fetch", "tokens": tokens, "bytes": size, "took_s": took_s}
        return min(whole, found), news if found else {}


def _params(request: Any) -> PeerParams | None:
    """The part of a request's parameters that names a peer; None: there is none."""
    params = getattr(request, "kv_transfer_params", None)
    given = params.get(PEER_PARAM) if isinstance(params, dict) else None
    if given is None:
        return None
    try:
        return msgspec.convert(given, PeerParams)
    except msgspec.ValidationError as error:
        log.warning("peer_params_ignored", request_id=request.request_id, reason=str(error))
        return None
