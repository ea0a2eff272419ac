"""One server behind `kappa route`: probed for ever, followed like a worker, and sent requests.

A probe asks whether it lives, what it has to do, and now and then which models it serves. What it
answers becomes an announcement and reports, so that the live router treats it as any worker. A
server that is not there is probed on; when it answers again it is taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np
import structlog
from yarl import URL

from kappa.hardware import node_profile
from kappa.keys import bearer
from kappa.protocol import Admission, Announcement, LoadSample, WorkerReport
from kappa.settings.front import BackendSettings, ProbeSettings
from kappa.shapes import SHAPES, model_shape
from kappa_router.front.facts import LoadFacts, ModelFacts, load_in, models_in
from kappa_router.index.kv_event_types import (
    BlocksStored,
    CacheGroups,
    KVEvent,
    StreamCursor,
    WorkerReset,
)
from kappa_router.live.event_feed import EventFeed, FloodError
from kappa_router.live.kv_subscriber import StreamListener
from kappa_router.sent_prompts import (
    BLOCK_TOKENS,
    UNKNOWN_BLOCKS,
    CacheSize,
    SentBlocks,
    announcement_of,
)

log = structlog.get_logger(__name__)

_DEFAULT_SHAPE = "llama-3.1-8b"
_MODELS_EVERY = 10
_MOST_BYTES = 8 << 20
# Of a server's answer that is not as it is read.
_FAULTS = aiohttp.ClientError, TimeoutError, OSError, LookupError, ValueError, TypeError
# Answers without an event from a server that is to publish them.
_UNANNOUNCED = 5
# What of a body makes its prompt.
TOKENIZED_FIELDS = (
    "model", "messages", "prompt", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template_kwargs",
)  # fmt: skip


class Backend:
    """A server. known: what it announced, None before it first answered; models: what it serves;
    sent: what it holds as far as what was sent there tells, None once its events tell it; down: why
    it is not reached; refused: why it is not used although it answers; empty if all is well."""

    def __init__(
        self,
        settings: BackendSettings,
        probe: ProbeSettings,
        http: aiohttp.ClientSession,
        changed: Callable[[Backend], str],
        block_tokens: int = BLOCK_TOKENS,
        turned: Callable[[], None] = lambda: None,
    ) -> None:
        """changed: called when its announcement is another; says why it cannot be used, if so.
        block_tokens: of all servers that the router knows. turned: called when it becomes usable,
        or ceases to be."""
        # Of its data-parallel ranks this one alone.
        self.rank: int | None = None
        self.settings, self._probe, self._http, self._changed = settings, probe, http, changed
        self._block_tokens, self._turned = block_tokens, turned
        self.worker = settings.worker
        self.known: Announcement | None = None
        self.models: tuple[ModelFacts, ...] = ()
        self._judged: tuple[ModelFacts, ...] = ()
        self.sent: SentBlocks | None = None
        self.down, self.refused = "not reached yet", ""
        self.load = LoadFacts()
        # As a follower of the live router's membership.
        self.synced, self.connected, self.alive = False, False, True
        self.events, self._groups = Counter[str](), CacheGroups()
        self._listener: StreamListener | None = None
        self._failures = self._probes = self._unannounced = 0
        self._has_metrics = True
        self._report = WorkerReport(self.worker, 0.0)

    @property
    def usable(self) -> bool:
        """Whether it answers, and may be used."""
        return self.connected and not self.refused

    # -- as a follower ------------------------------------------------------------------------

    def follow(self, listener: StreamListener) -> Backend:
        """Tell `listener` of this server from now on."""
        self._listener, self.synced = listener, True
        # Its cache groups stay what they are.
        for what in [what for what in self.events if not what.startswith("priced_")]:
            del self.events[what]
        asyncio.get_running_loop().call_soon(self._tell)
        return self

    async def close(self) -> None:
        """Tell no listener any more; probes go on."""
        self._listener, self.synced = None, False

    def admitted(self, admission: Admission) -> None:
        """An answer said how much of its prompt was found."""
        if self._listener is not None:
            self._listener.reported(msgspec.structs.replace(self._report, admitted=(admission,)))

    def _tell(self, loads: tuple[LoadSample, ...] = ()) -> None:
        load = self.load
        self._report = WorkerReport(
            self.worker, time.time(), steps_total=load.steps, step_tokens_total=load.tokens,
            load_bytes_total=int(load.load_bytes), load_seconds_total=load.load_s,
            running=load.running, waiting=load.waiting,
        )  # fmt: skip
        if self._listener is not None and self.connected:
            self._listener.connection(self.worker, True)
            self._listener.reported(msgspec.structs.replace(self._report, loads=loads))

    # -- probes -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe it until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._probe.timeout_s):
                    await self._ask()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                self._failed(error)
            await asyncio.sleep(self._probe.every_s)

    async def _ask(self) -> None:
        """One probe; raises the server's fault."""
        status, _ = await self._get("/health")
        if status >= 500:
            raise ValueError(f"/health answered {status}")
        fresh = self.known is None or not self.connected
        self._probes += 1
        if fresh or self._probes % _MODELS_EVERY == 0:
            status, body = await self._get("/v1/models")
            if status != 200:
                key = "; it wants a key: give key_env" if status in (401, 403) else ""
                raise ValueError(f"/v1/models answered {status}{key}")
            self.models = models_in(body)
            self._has_metrics = True
        before = self.load
        if self._has_metrics:
            # Not every server has them; one that cannot tell them may serve well.
            with contextlib.suppress(aiohttp.ClientError, ValueError):
                status, body = await self._get("/metrics")
                self._has_metrics = status == 200
                if status == 200:
                    self.load = load_in(body.decode(errors="replace"), self.rank)
        was = self.usable
        self._failures, self.connected = 0, True
        self._announce()
        if self.usable != was:
            self._turned()
        loads = None if fresh or self.known is None else self.load.loads_since(before)
        if loads is None or self.known is None:
            self._tell()
        else:
            self._tell((LoadSample(loads[0] / self.known.kv_bytes_per_token, loads[1]),))

    async def lives(self) -> bool:
        """Whether it answers, found out now, after it failed a request; it is lost if not."""
        try:
            async with asyncio.timeout(self._probe.timeout_s):
                status, _ = await self._get("/health")
            why = f"/health answered {status}" if status >= 500 else ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            why = _why(error)
        if why:
            self.lost(why)
        return not why

    async def tokens(self, body: Mapping[str, Any]) -> np.ndarray | None:
        """A prompt's token ids as its `/tokenize` makes them (vLLM); None if it does not."""
        prompt = {name: body[name] for name in TOKENIZED_FIELDS if name in body}
        with contextlib.suppress(*_FAULTS):
            return np.array((await self._told("/tokenize", prompt))["tokens"], dtype=np.int64)
        return None

    async def _told(self, path: str, body: Any = None) -> Any:
        """What it answers in JSON; raises one of `_FAULTS`."""
        async with asyncio.timeout(self._probe.timeout_s):
            status, answer = await self._get(path, body)
        if status != 200:
            raise ValueError(f"{path} answered {status}")
        return msgspec.json.decode(answer)

    async def _get(self, path: str, body: Any = None) -> tuple[int, bytes]:
        key = self.settings.key
        headers = {"accept-encoding": "identity", **bearer(key)}
        url, method = URL(self.settings.url + path, encoded=True), "GET" if body is None else "POST"
        async with self._http.request(
            method, url, json=body, headers=headers, allow_redirects=False
        ) as answer:
            # Until there is no more, or too much.
            read = bytearray()
            while part := await answer.content.read(1 << 16):
                read += part
                if len(read) > _MOST_BYTES:
                    raise ValueError(f"{path} answered more than {_MOST_BYTES} bytes")
            return answer.status, bytes(read)

    async def receive(self, endpoint: str) -> None:
        """Follow its KV events, as vLLM publishes them, until cancelled.

        What was published before, or lost on the way, is not known: after a gap all is forgotten,
        of that data-parallel rank: each numbers its own batches.
        """
        feed = EventFeed(self.worker, endpoint, self._groups)
        feed.connect()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed.watch(lambda up: None))
                await self._follow(feed)
        finally:
            feed.close()

    async def _follow(self, feed: EventFeed) -> None:
        cursors = defaultdict[int, StreamCursor](StreamCursor)
        while True:
            try:
                frames = await feed.receive()
                if len(frames) != 3:
                    await self._unreadable(f"{len(frames)} frames, not topic, number, payload")
                    continue
                _, number, payload = frames
                seq = int.from_bytes(number, "big")
                try:
                    rank, events = await feed.batch(payload, self.events)
                except ValueError as error:
                    # What it said is not known, and so is what it holds.
                    self._heard([WorkerReset(self.worker)])
                    await self._unreadable(str(error))
                    continue
                if self.rank not in (None, rank):
                    self._heard_of(rank)
                    continue
                names = [name for name in self.events if ":" in name]
                if names and not self.events["unreadable"]:
                    await self._unreadable(f"events of unknown kinds: {', '.join(names[:5])}")
                cursor = cursors[rank]
                if seq != cursor.expected:
                    self._heard([WorkerReset(self.worker, rank)])
                    cursor.resume(seq)
                cursor.advance(seq)
                await feed.hand_over(events, self._heard)
            except FloodError:
                self._heard([WorkerReset(self.worker, rank) for rank in cursors])
                if self._listener is not None:
                    self._listener.stream_flood(self.worker)
                await feed.pause()

    def _heard(self, events: list[KVEvent]) -> None:
        """Events of the server, as far as their blocks are of the router's size."""
        if self._listener is None:
            return
        fit = [
            one for one in events
            if not isinstance(one, BlocksStored) or one.group
            or one.block_tokens == self._block_tokens
        ]  # fmt: skip
        if len(fit) < len(events) and not self.events["other_size"]:
            log.error("backend_events_unused", url=self.settings.url, why=self._other_size())
        self.events["other_size"] += len(events) - len(fit)
        if self.sent is not None and any(isinstance(one, BlocksStored) for one in fit):
            # From now on it says itself what it holds, which is better known than guessed.
            self.sent = None
            self._listener.blocks([WorkerReset(self.worker)])
        self._listener.blocks(fit)

    def _heard_of(self, rank: int) -> None:
        """Events of another rank than this are left out."""
        if not self.events["other_rank"]:
            log.error(
                "backend_events_of_another_rank", url=self.settings.url, rank=self.rank, came=rank,
                events=self.settings.events, remedy="list endpoints in the order of ranks",
            )  # fmt: skip
        self.events["other_rank"] += 1

    def answered(self) -> None:
        """It answered a prompt: a server that publishes events has announced some by now."""
        self._unannounced += bool(self.settings.events) and self.sent is not None
        if self._unannounced == _UNANNOUNCED:
            log.error(
                "backend_events_missing", url=self.settings.url, events=self.settings.events,
                why="nothing usable came; what it holds is guessed from what was sent there",
                remedy="have it publish: vLLM listens only at an endpoint with a *, tcp://*:PORT",
            )  # fmt: skip

    async def _unreadable(self, why: str) -> None:
        """Some events are in no form that is known; said once."""
        self.events["unreadable"] += 1
        if self.events["unreadable"] == 1:
            log.error(
                "backend_events_unreadable", url=self.settings.url, why=why[:500],
                server=await self._version(),
                remedy="what it holds is known in part, or guessed from what was sent there: "
                "docs/route.md lists the versions that are read; else leave out its events",
            )  # fmt: skip

    async def _version(self) -> str:
        """What it says of its version (vLLM, SGLang); else that it does not."""
        for path in ("/version", "/server_info"):
            with contextlib.suppress(*_FAULTS):
                return f"version {(await self._told(path))['version']:.40}"
        return "of a version that it does not tell"

    def _other_size(self) -> str:
        return (
            f"its blocks are not of {self._block_tokens} tokens: set block_tokens to its "
            "--block-size, which is one for all servers with events"
        )

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        # A refused connection is no doubt; silence may be a busy machine.
        sure = isinstance(error, aiohttp.ClientConnectorError | ValueError)
        if sure or self._failures >= self._probe.failures:
            self.lost(_why(error))

    def lost(self, why: str) -> None:
        """It does not answer as a server should: nothing goes there before it does."""
        if self.down != why:
            log.warning("backend_down", url=self.settings.url, why=why)
        self.down = why
        was, self.connected = self.connected, False
        if was:
            self._turned()
        if was and self.sent is not None:
            self.sent.clear()
        if was and self._listener is not None:
            self._listener.connection(self.worker, False)

    def _announce(self) -> None:
        made, before = self._announcement(), self.refused
        if made != self.known or self.models[:1] != self._judged[:1]:
            if self.known is not None and self._listener is not None:
                # What it held was in blocks, or of a model, that are no more.
                self._listener.blocks([WorkerReset(self.worker)])
            size = CacheSize(made.block_tokens, made.device_blocks, made.host_blocks)
            self.sent = SentBlocks(self.worker, size)
            self.known = made
        elif not self.down and not self.refused and self.models == self._judged:
            return
        was_down, self.down, self._judged = self.down, "", self.models
        self.refused = self._changed(self)
        if self.refused and self.refused != before:
            log.error("backend_refused", url=self.settings.url, why=self.refused)
        elif was_down and not self.refused:
            log.info("backend_up", url=self.settings.url, models=[m.name for m in self.models])

    def _announcement(self) -> Announcement:
        """The server's announcement, by its profile, its model and its metrics."""
        given, load = self.settings, self.load
        name = given.shape or next(
            (n for m in self.models for n in (m.root, m.name) if _is_shape(n)), ""
        )
        if not name and self.known is None:
            log.warning(
                "backend_of_unknown_shape", url=given.url, models=[m.name for m in self.models],
                remedy=f"priced as {_DEFAULT_SHAPE} until its first tokens tell better; give shape",
            )  # fmt: skip
        block = self._block_tokens
        tokens = load.device_tokens or given.device_tokens or UNKNOWN_BLOCKS * block
        longest = max((m.max_tokens for m in self.models), default=0) or 1 << 30
        size = CacheSize(block, max(tokens // block, 2), given.host_tokens // block, longest)
        node, shape = node_profile(given.profile), model_shape(name or _DEFAULT_SHAPE)
        # Which server serves which name, `Front.serving` knows, and excludes the others.
        return announcement_of(self.worker, "", node, shape, size)


def _why(error: Exception) -> str:
    """The part of an error that names the fault."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error.os_error}"
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))


def _is_shape(name: str) -> bool:
    return name.rsplit("/", 1)[-1].lower().removesuffix("-instruct") in SHAPES
