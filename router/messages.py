"""What passes between client, ingress and engine: headers, marks, packets. Plain translation."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from kappa.report import REQUEST_ID_KEY
from router.core import Decision
from router.prefix_hash import salt_of
from router.ray_router import PIN_HEADER

# Ours to set; and one of vLLM's that would make an engine announce blocks it never removes.
_RESERVED_XARGS = ("kappa_", "kv_cache_report_mode")


def decision_headers(decision: Decision) -> dict[str, str]:
    """What a response says of its routing; Ray Serve adds `x-request-id` itself."""
    chosen = decision.chosen
    return {
        "x-kappa-node": chosen.node.name,
        "x-kappa-paced": "true" if chosen.node.source == "paced" else "false",
        "x-kappa-ratio": f"{chosen.counts.ratio:.2f}",
        "x-kappa-crit": f"{chosen.kappa_crit:.2f}",
        "x-kappa-reason": decision.reason,
        "x-kappa-predicted-ttft-ms": f"{1e3 * chosen.ttft_s:.1f}",
    }


def explanation(decision: Decision) -> dict[str, Any]:
    """A decision with all its candidates, JSON-ready."""
    return {
        "request_id": decision.request_id,
        "prompt_tokens": decision.prompt_tokens,
        "policy": decision.policy,
        "reason": decision.reason,
        "node": decision.chosen.node.name,
        "informed": decision.informed,
        "candidates": [
            {
                "node": c.node.name,
                "worker": c.worker,
                "paced": c.node.source == "paced",
                "device_tokens": c.counts.device_tokens,
                "cached_tokens": c.counts.cached_tokens,
                "new_tokens": c.counts.new_tokens,
                "ratio": c.counts.ratio,
                "kappa_crit": c.kappa_crit,
                "bound": c.bound,
                "queue_s": c.queue_s,
                "load_s": c.load_s,
                "compute_s": c.compute_s,
                "ttft_s": c.ttft_s,
                "harm_s": c.harm_s,
                "in_flight": c.in_flight,
            }
            for c in decision.candidates
        ],
    }


def max_tokens_of(body: Any) -> int:
    """The client's bound on generated tokens, 0 if it gave none."""
    value = getattr(body, "max_completion_tokens", None) or getattr(body, "max_tokens", None)
    return int(value or 0)


def salt_of_body(body: Any) -> int:
    """The isolation salt of a body, 0 without one."""
    return salt_of(getattr(body, "cache_salt", None))


def mark(body: Any, request_id: str) -> None:
    """Put our id where the engine's processes find it; drop what a client may not set."""
    given = {
        key: value
        for key, value in (body.vllm_xargs or {}).items()
        if not key.startswith(_RESERVED_XARGS)
    }
    body.vllm_xargs = {**given, REQUEST_ID_KEY: request_id}


def pinned(request: Request, worker: str) -> Request:
    """The request with the router's pin, instead of any that the client sent."""
    headers = [(k, v) for k, v in request.scope["headers"] if k.lower() != PIN_HEADER.encode()]
    headers.append((PIN_HEADER.encode(), worker.encode()))
    return Request({**request.scope, "headers": headers})


def as_events(item: Any) -> str:
    """One or several stream items as server-sent events."""
    items = item if isinstance(item, list) else [item]
    return "".join(i if isinstance(i, str) else f"data: {i.model_dump_json()}\n\n" for i in items)


def tokens_in(packet: str) -> int:
    """Output tokens in a packet: its events, less the role, the usage and the end marker."""
    events = packet.count("data: {")
    return max(events - packet.count('"role":"assistant"') - packet.count('"choices":[]'), 0)
