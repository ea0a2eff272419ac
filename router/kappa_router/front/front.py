"""The live router of `kappa route`, over servers that others run.

A request's body is read as far as routing needs it and never changed. The decision is the same
core's as in a cluster; what a server holds is known from what was sent to it and from what its
answers say of their prompts (`router.sent_prompts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import structlog

from kappa.protocol import DECIDED_PATHS, Announcement
from kappa.settings.front import BackendSettings, FrontSettings
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.fair_queue import FairTurns
from kappa_router.api.metadata import CONVERSATION_KEYS
from kappa_router.api.reading import read
from kappa_router.api.request_body import prompts_in
from kappa_router.api.start import DeciderSettings, member_rule, router_config
from kappa_router.api.tenants import EVERYBODY, Tenant
from kappa_router.decision import RouteRequest
from kappa_router.front.backend import TOKENIZED_FIELDS, Backend
from kappa_router.front.conversations import Conversations, opening_of
from kappa_router.front.journal import Journal
from kappa_router.front.peers import Peers
from kappa_router.index.prefix_hash import salt_of
from kappa_router.live.kv_subscriber import StreamListener
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import Follower
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_router.live.supervised import supervised
from kappa_router.rollout import Rollout
from kappa_router.rollout_journal import CacheBlocks
from kappa_router.sent_prompts import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    PROMPT_FIELDS,
    prompt_tokens,
)

log = structlog.get_logger(__name__)

# The fields that are read of any body, and of one with a prompt.
_COMMON = frozenset({
    "model", "cache_salt", "stream", "max_tokens", "max_completion_tokens", "n", "best_of",
    "stream_interval", *CONVERSATION_KEYS,
})  # fmt: skip
_DECIDED = _COMMON.union(PROMPT_FIELDS, TOKENIZED_FIELDS)
_DEPLOYMENT = "front"
_KEEPALIVE_S = 4.0
_LEFT = "it left the pool"
# Prompts that servers tokenize for us.
_TOKENIZED_AT_ONCE = 8


@dataclass(slots=True)
class Wanted:
    """A request's body as far as routing reads it."""

    # Empty if it names none.
    model: str = ""
    streamed: bool = False
    # The prompt (`router.sent_prompts`); None where none can be read.
    tokens: np.ndarray | None = None
    # Tokens that the prompt has at most.
    bound: int = 0
    max_tokens: int = 0
    # Answers to all of its prompts together.
    answers: int = 1
    # Several tokens may come in one event.
    merged: bool = False
    salt: str = ""
    # Its conversation, by the client's own name for it, else by how it begins.
    session: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Wanted:
        """The body of a request, as far as routing reads it."""
        model, salt = data.get("model"), data.get("cache_salt")
        counts = (data.get(name) for name in ("n", "best_of"))
        answers = max((one for one in counts if type(one) is int and 0 < one < 1 << 20), default=1)
        limit = data.get("max_completion_tokens") or data.get("max_tokens")
        return cls(
            model if isinstance(model, str) else "",
            data.get("stream") is True,
            max_tokens=limit if type(limit) is int and 0 < limit < 1 << 31 else 0,
            answers=answers * max(len(prompts_in(data)), 1),
            merged=data.get("stream_interval") not in (None, 1),
            salt=salt if isinstance(salt, str) else "",
        )


class Front:
    """Servers by name, and the live router that chooses among them; `async with` runs it."""

    live: LiveRouter

    def __init__(self, settings: FrontSettings) -> None:
        self.settings = settings
        self.rollout = Rollout.parse(settings.router.mode, settings.present)
        self.journal: Journal | None = None
        self.backends: dict[str, Backend] = {}
        self._registry = ReplicaRegistry()
        self._conversations, self._turns = Conversations(), FairTurns(_TOKENIZED_AT_ONCE)
        # Events are about token ids; without them text will do.
        pool = settings.epp.pool if settings.epp is not None else None
        self._by_ids = any(one.events for one in settings.backends) or bool(
            pool is not None and pool.events_port
        )
        self._block_tokens = settings.block_tokens if self._by_ids else BLOCK_TOKENS
        # By server.
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        # Set whenever a server may be used that was not to be, or the other way round.
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Front:
        settings = self.settings
        decider = DeciderSettings(
            models=(), secret=secrets.token_hex(16), router=settings.router,
            observing=settings.observing,
        )  # fmt: skip
        rule = replace(member_rule(decider), follow=self._follow)
        # Routers that tell each other of their requests break ties differently.
        first = secrets.randbelow(1 << 16) / (1 << 16) if settings.peers.urls else 0.0
        self.live = LiveRouter(
            replace(router_config(decider), first=first), None, rule, registry=self._registry,
            counting=settings.observing.metrics, request_log=settings.observing.request_log,
        )  # fmt: skip
        if settings.journal is not None:
            self.journal = Journal(settings.journal, settings, self.live, self._caches)
        connect_s = settings.probe.connect_timeout_s
        self._http = aiohttp.ClientSession(
            # uvicorn, and so vLLM, closes idle connections after 5 s.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.peers = Peers(settings, self.live, self._http)
        self.have([each for backend in settings.backends for each in backend.ranks()])
        return self

    def meet(self) -> None:
        """Follow other routers from now on: this one can be asked, too."""
        if self.settings.peers.urls:
            self.run("peers", "", self.peers.follow)

    def run(self, name: str, worker: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task of a server, or of all with an empty name, again if it fails."""
        running = supervised(name, task, self.live.task_restarted, worker)
        self._tasks.setdefault(worker, []).append(asyncio.create_task(running))

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for one in self._tasks.values() for task in one]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.journal is not None:
            self.journal.close()
        await self.live.close()
        await self._http.close()

    # -- servers ------------------------------------------------------------------------------

    def have(self, servers: Sequence[tuple[BackendSettings, int | None]]) -> None:
        """The servers from now on, and of each that is a data-parallel rank its number. One that is
        not among them any more gets no request, and is forgotten when it has none."""
        wanted = {one.worker: (one, rank) for one, rank in servers}
        for name in self.backends.keys() - wanted.keys():
            backend = self.backends[name]
            for task in self._tasks.pop(name, ()):
                task.cancel()
            if backend.refused != _LEFT:
                backend.lost(_LEFT)
                backend.refused = _LEFT
                self._publish()
            elif name not in self.live.router.workers:
                del self.backends[name]
        for name, (one, rank) in wanted.items():
            if name in self._tasks:
                continue
            backend = self.backends.get(name) or Backend(
                one, self.settings.probe, self._http, self._changed, self._block_tokens,
                self.changed.set,
            )  # fmt: skip
            backend.rank = rank
            self.backends[name] = backend
            self.run("probe", name, backend.watch)
            for endpoint in one.events:
                self.run("feed", name, partial(backend.receive, endpoint))
        self.changed.set()

    def _follow(self, announced: Announcement, listener: StreamListener) -> Follower:
        return self.backends[announced.worker].follow(listener)

    def _changed(self, backend: Backend) -> str:
        """A server announced itself, or something else than before; why it cannot be used."""
        why = self._unlike(backend)
        backend.refused = why
        self._publish()
        return why

    def _publish(self) -> None:
        usable: dict[str, Mapping[str, Any]] = {
            name: one.known.to_dict()
            for name, one in self.backends.items()
            if one.known is not None and not one.refused
        }
        self._registry.publish(_DEPLOYMENT, usable)

    def _unlike(self, backend: Backend) -> str:
        """The contradiction to the settings, or to other servers; empty if there is none."""
        wanted, names = backend.settings.model, [model.name for model in backend.models]
        if wanted is not None and wanted not in names:
            return (
                f"serves {', '.join(names[:5])} and not {wanted}: start it with "
                f"--served-model-name {wanted}, or change its model in the settings"
            )
        if wanted is not None:
            return ""
        for other in self.backends.values():
            if other is backend or other.known is None or other.refused:
                continue
            theirs = {model.name: model.root for model in other.models}
            for model in backend.models:
                root = theirs.get(model.name)
                if root and model.root and _stem(root) != _stem(model.root):
                    return (
                        f"serves {model.root} as {model.name}, by which name "
                        f"{other.settings.url} serves {root}: give one of them another "
                        "--served-model-name, or, if they are the same, name `model` for both"
                    )
        return ""

    def usable(self) -> set[str]:
        """Servers that may get requests."""
        return {name for name, one in self.backends.items() if one.usable}

    def serving(self, model: str, path: str = DECIDED_PATHS[0]) -> frozenset[str]:
        """Servers for the path that list the model; of no model, all of them."""
        return frozenset(
            one.worker
            for one in self._for(path)
            if not model or any(model == known.name for known in one.models)
        )

    def _for(self, path: str) -> list[Backend]:
        every = self.backends.values()
        return [one for one in every if not one.settings.serves or path in one.settings.serves]

    # -- requests -----------------------------------------------------------------------------

    async def read(
        self, path: str, body: bytes, tenant: Tenant = EVERYBODY, *, strict: bool = False
    ) -> Wanted:
        """A body as far as routing reads it; nothing of one that is no JSON object, since the
        server will say why. Raises ApiError 400 for a body that exceeds a bound; if `strict`, for
        one that is no JSON object, too.

        Where servers publish events, its prompt is tokenized by one of them that has least to do,
        in turn with other tenants'; it is only bounded if that does not succeed soon.
        """
        is_decided = path in DECIDED_PATHS
        parse = partial(_parsed, _DECIDED if is_decided else _COMMON, strict, not self._by_ids)
        data, wanted, opening = await read(body, parse)
        wanted.session = self._conversations.of(opening)
        wanted.bound = len(body) // BYTES_PER_TOKEN if data else 0
        if not is_decided or not data:
            return wanted
        if not self._by_ids or isinstance(data.get("prompt"), list):
            return wanted
        serving = self.serving(wanted.model, path)
        able = [
            one
            for name, one in self.backends.items()
            if name in serving and one.settings.events and one.connected
        ]
        if able:
            chosen = min(able, key=lambda one: self.live.router.in_flight_on(one.worker))
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(self.settings.probe.timeout_s),
                    self._turns.turn(tenant, len(body)),
                ):
                    wanted.tokens = await chosen.tokens(data)
        return wanted

    def request(
        self, request_id: str, wanted: Wanted, path: str = DECIDED_PATHS[0]
    ) -> RouteRequest:
        """The router's part of a request; raises ApiError 404 for a model that no server has, or a
        path that none is for."""
        serving = self.serving(wanted.model, path)
        able = self._for(path)
        if self.backends and not able:
            raise errors.PATH_OF_NO_SERVER(path=path)
        if not serving and able and all(backend.known for backend in able):
            names = sorted({m.name for one in able for m in one.models})
            raise errors.UNKNOWN_MODEL(model=wanted.model[:200], served=", ".join(names))
        adapter = any(m.parent for one in able for m in one.models if m.name == wanted.model)
        return RouteRequest(
            request_id, wanted.tokens, wanted.max_tokens,
            salt_of(wanted.salt, wanted.model if adapter else None),
            exclude=frozenset(self.backends) - serving, prompt_tokens=wanted.bound,
            session=wanted.session,
        )  # fmt: skip

    def _caches(self) -> dict[str, CacheBlocks]:
        return {
            name: {f"{tier}_blocks": int(blocks) for tier, blocks in one.sent.size.items()}
            for name, one in self.backends.items()
            if one.sent is not None
        }

    def models(self) -> list[Mapping[str, Any]]:
        """A card of every model that somebody serves."""
        cards: dict[str, Mapping[str, Any]] = {}
        for backend in self.backends.values():
            for model in backend.models if backend.usable else ():
                card = {"id": model.name, "object": "model", "created": 0, "owned_by": "kappa"}
                more = {"root": model.root, "parent": model.parent}
                card |= {key: value for key, value in more.items() if value}
                if model.max_tokens:
                    card["max_model_len"] = model.max_tokens
                cards.setdefault(model.name, card)
        return list(cards.values())

    def rows(self) -> list[dict[str, Any]]:
        """Every server: its url, whether it answers, and its fault if it has one."""
        return [
            {
                "worker": name, "url": one.settings.url, "profile": one.settings.profile,
                "up": one.usable, "why": one.refused or one.down or None,
                "models": [model.name for model in one.models],
            }
            for name, one in self.backends.items()
        ]  # fmt: skip


def _parsed(
    fields: frozenset[str], strict: bool, by_text: bool, body: bytes
) -> tuple[dict[str, Any], Wanted, str | list[int]]:
    """All of a body that needs nothing but the body: its fields, what it asks for, and its
    `opening_of`. by_text: whether a text is taken in tokens of its bytes."""
    try:
        data = errors.json_object(body, fields)
    except ApiError as error:
        if strict or error.code == errors.BODY_TOO_COMPLEX.code:
            raise
        data = {}
    wanted = Wanted.of(data)
    if "prompt" in fields and (by_text or isinstance(data.get("prompt"), list)):
        wanted.tokens = prompt_tokens(data)
    return data, wanted, opening_of(data)


def _stem(root: str) -> str:
    """The part of a model's path or hub id that names the model."""
    return root.rstrip("/").rsplit("/", 1)[-1].lower()
