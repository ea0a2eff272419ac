"""Routing with nothing but history: the drop-in for a plain Ray Serve LLM app.

Stock replicas send no events and announce nothing, so prefixes are what was routed where: the
prompt's text, cut into blocks of bytes, remembered per worker and forgotten oldest first. All
workers are taken as one node of the catalogue; what differs is what each has seen and holds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.model import kv_bytes_per_token
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from router.decision import NoWorkerError, RouteRequest
from router.index.kv_events import BlocksStored
from router.index.prefix_hash import secret_from_seed
from router.policy import policy_named
from router.router import Router, RouterConfig

# About 32 tokens of English; a byte stands for a quarter of a token in the prices.
_BLOCK_BYTES = 128
_BYTES_PER_TOKEN = 4
_INDEX_BLOCKS = 200_000
_RESERVED_S = 600.0


class StandaloneRouter:
    """Ranks replicas for Ray's router; safe to call from one thread and read from another.

    Prices are those of the catalogue's `node` and `model`; ValueError names an unknown one.
    """

    def __init__(
        self, node: str = "h100-pcie5", model: str = "llama-3.1-8b", policy: str = "ttft"
    ) -> None:
        profile, shape, per_byte = node_profile(node), model_shape(model), 1 / _BYTES_PER_TOKEN
        self._announcement = Announcement(
            worker="",
            model=shape.name,
            node=profile,
            step=step_model(shape, profile).per_unit(per_byte),
            kv_bytes_per_token=kv_bytes_per_token(shape) * per_byte,
            emulated_model="",
            fingerprint="standalone",
            block_tokens=_BLOCK_BYTES,
            device_blocks=1 << 20,
            host_blocks=0,
            max_batch_tokens=8192 * _BYTES_PER_TOKEN,
            max_context_tokens=1 << 30,
            events_endpoint="",
            snapshot_endpoint="",
        )
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
            prompt = _prompt_bytes(args)
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
        hasher = self._router.hasher
        assert hasher is not None
        hashes = tuple(hasher.prefix_hashes(prompt).tolist())
        tokens = prompt[: len(hashes) * _BLOCK_BYTES]
        self._router.blocks([BlocksStored(worker, "device", hashes, None, tokens, _BLOCK_BYTES, 0)])


def _prompt_bytes(args: Sequence[Any]) -> np.ndarray | None:
    """The prompt as bytes, from the parsed body that Ray passes; None if there is none."""
    body = args[0] if args else None
    messages = getattr(body, "messages", None)
    if messages is not None:
        plain = [m if isinstance(m, dict) else m.model_dump() for m in messages]
        text: Any = json.dumps(plain, default=str)[:-1]  # an open bracket: more extend it
    else:
        text = getattr(body, "prompt", None)
        if not isinstance(text, str):
            return None
    return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64)
