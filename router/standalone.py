"""Routing with nothing but history: the drop-in for a plain Ray Serve LLM app.

Stock replicas send no events and announce nothing, so prefixes are what was sent where
(`router.history`), forgotten oldest first. All workers are taken as one node of the catalogue; what
differs is what each has seen and holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kappa.hardware import node_profile
from kappa.shapes import model_shape
from router.decision import NoWorkerError, RouteRequest
from router.history import CacheSize, announcement_of, prompt_tokens
from router.index.prefix_hash import secret_from_seed
from router.policy import policy_named
from router.router import Router, RouterConfig

_INDEX_BLOCKS = 200_000
_RESERVED_S = 600.0


class StandaloneRouter:
    """Ranks replicas for Ray's router; safe to call from one thread and read from another.

    Prices are those of the catalogue's `node` and `model`; ValueError names an unknown one.
    """

    def __init__(
        self, node: str = "h100-pcie5", model: str = "llama-3.1-8b", policy: str = "ttft"
    ) -> None:
        shape = model_shape(model)
        self._announcement = announcement_of("", shape.name, node_profile(node), shape, CacheSize())
        self._router = Router(
            RouterConfig(
                policy=policy_named(policy),
                secret=secret_from_seed(f"standalone {id(self)}"),
                index_blocks=_INDEX_BLOCKS,
                stale_after_s=float("inf"),
                calibrate=False,
            )
        )
        # When each request was routed.
        self._routed: dict[str, float] = {}
        self._lock = threading.Lock()

    def workers(self, names: Iterable[str]) -> None:
        """These are the workers now."""
        with self._lock:
            now, known = set(names), set(self._router.workers)
            for worker in sorted(now - known):
                self._router.join(replace(self._announcement, worker=worker), time.time())
            for worker in sorted(known - now):
                self._router.leave(worker)

    def rank(self, names: Sequence[str], args: Sequence[Any], request_id: str) -> list[str]:
        """`names` in order of preference; the first one is reserved until `done`."""
        with self._lock:
            now_s = time.time()
            for old in [r for r, at_s in self._routed.items() if now_s - at_s > _RESERVED_S]:
                del self._routed[old]
                self._router.release(old, now_s, complete=False)
            prompt = prompt_tokens(_body_of(args))
            exclude = frozenset(self._router.workers) - set(names)
            try:
                decision = self._router.route(
                    RouteRequest(request_id, prompt, exclude=exclude), now_s
                )
            except NoWorkerError:
                return list(names)
            self._routed[request_id] = now_s
            if prompt is not None:
                self._remember(decision.worker, prompt)
            priced = sorted(decision.candidates, key=lambda c: c.ttft_s + c.tpot_impact_s)
            # Each once: the chosen one, the others by price, and those that are not known yet.
            order = dict.fromkeys([decision.worker, *(c.worker for c in priced), *names])
            return [worker for worker in order if worker in names]

    def done(self, request_id: str) -> None:
        """A request ended."""
        with self._lock:
            self._routed.pop(request_id, None)
            self._router.release(request_id, time.time())

    def _remember(self, worker: str, prompt: np.ndarray) -> None:
        hasher, index = self._router.hasher, self._router.index
        assert hasher is not None and index is not None
        index.hold(worker, "device", hasher.prefix_hashes(prompt))


def _body_of(args: Sequence[Any]) -> dict[str, Any]:
    """The parsed body that Ray passes, as far as its prompt goes."""
    body = args[0] if args else None
    parts = {name: getattr(body, name, None) for name in ("messages", "tools", "prompt")}
    return {name: _plain(value) for name, value in parts.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [one.model_dump() if hasattr(one, "model_dump") else one for one in value]
    return value
