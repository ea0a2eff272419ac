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
from router.policies import policy_named
from router.router import Router, RouterConfig

# About 32 tokens of English; a byte stands for a quarter of a token in the prices.
_BLOCK_BYTES = 128
_BYTES_PER_TOKEN = 4
_INDEX_BLOCKS = 200_000
_RESERVED_S = 600.0


class StandaloneRouter:
    """Ranks replicas for Ray's router; safe to call from one thread and read from another."""

    def __init__(
        self, node: str = "h100-pcie5", model: str = "llama-3.1-8b", policy: str = "ttft"
    ) -> None:
        """Price by the catalogue's `node` and `model`; ValueError names an unknown one."""
        self._node, self._shape = node_profile(node), model_shape(model)
        self._router = Router(
            RouterConfig(
                policy=policy_named(policy),
                secret=secret_from_seed(f"standalone {id(self)}"),
                index_blocks=_INDEX_BLOCKS,
                stale_after_s=float("inf"),
                calibrate=False,
            )
        )
        self._routed: dict[str, float] = {}
        self._lock = threading.Lock()

    def workers(self, names: Iterable[str]) -> None:
        names = set(names)
        with self._lock:
            known = set(self._router.workers)
            for worker in sorted(names - known):
                self._router.join(self._announcement(worker), time.time())
            for worker in sorted(known - names):
                self._router.leave(worker)

    def rank(self, names: Sequence[str], args: Sequence[Any], request_id: str) -> list[str]:
        """`names` in order of preference; the first one is reserved until `done`."""
        with self._lock:
            now_s = time.time()
            self._expire(now_s)
            prompt = _prompt_bytes(args)
            others_known = frozenset(self._router.workers) - set(names)
            request = RouteRequest(request_id, prompt, max_tokens=0, exclude=others_known)
            try:
                decision = self._router.route(request, now_s)
            except NoWorkerError:
                return list(names)
            self._routed[request_id] = now_s
            if prompt is not None:
                self._remember(decision.worker, prompt)
            others = sorted(decision.candidates, key=lambda c: c.ttft_s + c.tpot_impact_s)
            order = [decision.worker, *(c.worker for c in others if c.worker != decision.worker)]
            known = [worker for worker in order if worker in names]
            return known + [worker for worker in names if worker not in known]

    def done(self, request_id: str) -> None:
        with self._lock:
            self._routed.pop(request_id, None)
            self._router.release(request_id, time.time())

    def _expire(self, now_s: float) -> None:
        for request_id in [r for r, at_s in self._routed.items() if now_s - at_s > _RESERVED_S]:
            del self._routed[request_id]
            self._router.release(request_id, now_s, complete=False)

    def _remember(self, worker: str, prompt: np.ndarray) -> None:
        hasher = self._router.hasher
        assert hasher is not None
        hashes = [int(h) for h in hasher.prefix_hashes(prompt)]
        tokens = prompt[: len(hashes) * _BLOCK_BYTES]
        self._router.blocks(
            [BlocksStored(worker, "device", tuple(hashes), None, tokens, _BLOCK_BYTES, 0)]
        )

    def _announcement(self, worker: str) -> Announcement:
        per_byte = 1 / _BYTES_PER_TOKEN
        return Announcement(
            worker=worker,
            model=self._shape.name,
            node=self._node,
            step=step_model(self._shape, self._node).per_unit(per_byte),
            kv_bytes_per_token=kv_bytes_per_token(self._shape) * per_byte,
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


def _prompt_bytes(args: Sequence[Any]) -> np.ndarray | None:
    """The prompt as bytes, from the parsed body that Ray passes; None if there is none."""
    body = args[0] if args else None
    messages = getattr(body, "messages", None)
    if messages is not None:
        plain = [m if isinstance(m, dict) else m.model_dump() for m in messages]
        text = json.dumps(plain, default=str)[:-1]  # an open bracket: more messages extend it
    else:
        prompt = getattr(body, "prompt", None)
        if not isinstance(prompt, str):
            return None
        text = prompt
    return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64)
