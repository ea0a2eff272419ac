"""What passes between client, ingress and engine: headers, marks, packets. Plain translation."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from fastapi import Request
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from kappa.protocol import (
    APPROX_KEY,
    CHARGES_KEY,
    DEVICE_TOKENS_KEY,
    GPU_S_KEY,
    HOST_TOKENS_KEY,
    LINK_S_KEY,
    PLAN_KEY,
    PROMPT_KEY,
    PROMPT_TOKENS_KEY,
    REQUEST_ID_KEY,
    TENANT_KEY,
    WEIGHT_KEY,
    Charge,
)
from router.access.tenants import Tenant
from router.decision import Decision
from router.errors import ApiError, unreadable_body, validation_error
from router.index.prefix_hash import salt_of
from router.ingress.approx import HEADER as APPROX_HEADER
from router.ingress.approx import approx_asked
from router.ingress.fields import checked_chat, checked_completion, choices_in
from router.ray_router import PIN_HEADER

PLAN_HEADER = "x-kappa-plan"
SESSION_HEADER = "x-session-id"
POOL_HEADER = "x-kappa-pool"

_CONVERSATION_KEYS = ("prompt_cache_key", "user")

# For the ingress alone: no worker needs a client's key, or may log one.
_KEY_HEADERS = (b"authorization", b"x-api-key")


ChatBody = Annotated[ChatCompletionRequest, BeforeValidator(checked_chat)]
"""A chat's body, of which only what may go on reaches the schema; ApiError 400."""
CompletionBody = Annotated[CompletionRequest, BeforeValidator(checked_completion)]
"""A completion's body, likewise."""
_CHAT, _COMPLETION = TypeAdapter(ChatBody), TypeAdapter(CompletionBody)


async def parse_body(request: Request) -> Any:
    """A chat or completion body by its own look; ApiError 400 if it is neither."""
    try:
        data = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"The request body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    if not isinstance(data, dict):
        raise ApiError(400, "The request body is not a JSON object.", code="invalid_value")
    schema: Any = _CHAT if "messages" in data else _COMPLETION
    try:
        return schema.validate_python(data)
    except ApiError:
        raise
    except ValidationError as error:
        raise validation_error(list(error.errors())) from None
    except Exception as error:
        raise unreadable_body(error) from None


def decision_headers(decision: Decision) -> dict[str, str]:
    """What a response says of its routing; Ray Serve adds `x-request-id` itself."""
    chosen = decision.chosen
    planned = {PLAN_HEADER: chosen.plan} if chosen.plan else {}
    return {
        **planned,
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
                "harm_s": c.tpot_impact_s,
                "in_flight": c.in_flight,
                "plan": c.plan or None,
            }
            for c in decision.candidates
        ],
    }


def max_tokens_of(body: Any) -> int:
    """The client's bound on generated tokens, 0 if it gave none."""
    fields = vars(body)
    return int(fields.get("max_completion_tokens") or fields.get("max_tokens") or 0)


def choices_of(body: Any) -> int:
    """How many answers a body asks for, each of up to its `max_tokens`: `n` for every prompt."""
    return choices_in(vars(body))


def salt_of_body(body: Any) -> int:
    """The isolation salt of a body, 0 without one."""
    return salt_of(vars(body).get("cache_salt"))


def conversation_of(body: Any, request: Request) -> str:
    """What the client calls the conversation that a request belongs to; empty if it does not say.

    A header `x-session-id`, else OpenAI's `prompt_cache_key` or `user`.
    """
    told = request.headers.get(SESSION_HEADER, "")
    named = (value for key in _CONVERSATION_KEYS if (value := getattr(body, key, None)))
    return str(told or next(named, ""))


def engine_marks(
    sent_as: str, decision: Decision, tenant: Tenant, elsewhere: Mapping[str, Charge]
) -> dict[str, str | int | float]:
    """What the engine's scheduler is told of a request: its id there, whose it is, what of its
    prompt the chosen worker should hold, and what others than that worker charged, to the
    millisecond."""
    marks: dict[str, str | int | float] = {
        REQUEST_ID_KEY: sent_as,
        TENANT_KEY: tenant.name,
        WEIGHT_KEY: tenant.weight,
    }
    if decision.informed:
        counts = decision.chosen.counts
        marks[PROMPT_TOKENS_KEY] = decision.prompt_tokens
        marks[DEVICE_TOKENS_KEY] = int(counts.device_tokens)
        marks[HOST_TOKENS_KEY] = int(counts.cached_tokens - decision.chosen.recomputed_tokens)
    marks[LINK_S_KEY] = round(decision.chosen.load_s, 6)
    marks[GPU_S_KEY] = round(decision.chosen.compute_s, 6)
    if elsewhere:
        rounded = {name: [round(s, 3) for s in charge] for name, charge in elsewhere.items()}
        marks[CHARGES_KEY] = json.dumps(rounded, separators=(",", ":"))
    return marks


def plain_marks(sent_as: str, tenant: Tenant) -> dict[str, str | int | float]:
    """What the engine's scheduler is told of a request that nothing was decided about."""
    return {REQUEST_ID_KEY: sent_as, TENANT_KEY: tenant.name, WEIGHT_KEY: tenant.weight}


def prompt_marks(tokens: np.ndarray | None, plan: str) -> dict[str, str]:
    """What an engine that does not tokenize is told: the prompt, and its load plan if one is asked.

    Raises:
        ApiError: 400, the prompt could not be rendered here.
    """
    if tokens is None:
        raise ApiError(
            400, "The prompt cannot be rendered: this engine takes text chats, one text prompt, or "
            "token ids.", code="unsupported_prompt", param="messages",
        )  # fmt: skip
    packed = base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()
    return {PROMPT_KEY: packed, **({PLAN_KEY: plan} if plan else {})}


def plan_asked(request: Request) -> str:
    """The load plan that a client asks for by `x-kappa-plan`; empty without one."""
    return str(request.headers.get(PLAN_HEADER, "")).strip()


def approx_asked_by(request: Request, body: Any) -> bool | None:
    """Whether a client takes an approximate answer: by header, or "approx" in its body.

    Raises:
        ApiError: 400, it says neither ok nor no.
    """
    fields = getattr(body, "model_extra", None) or {}
    return approx_asked(request.headers.get(APPROX_HEADER), fields.get("approx"))


def approx_headers(body: Any) -> dict[str, str]:
    """What a response says where its answer may be approximate."""
    allowed = (getattr(body, "vllm_xargs", None) or {}).get(APPROX_KEY)
    return {APPROX_HEADER: "ok"} if allowed else {}


def mark(body: Any, marks: Mapping[str, str | int | float]) -> None:
    """Put our words, and no others, where the engine's processes find them."""
    body.vllm_xargs = dict(marks)


def pinned(request: Request, worker: str, pool: str | None = None) -> Request:
    """The request with the router's pin, instead of any that the client sent, and no key; with the
    pool alone where Ray's router is to choose the worker."""
    dropped = (PIN_HEADER.encode(), POOL_HEADER.encode(), *_KEY_HEADERS)
    headers = [(k, v) for k, v in request.scope["headers"] if k.lower() not in dropped]
    where = (PIN_HEADER, worker) if pool is None else (POOL_HEADER, pool)
    headers.append((where[0].encode(), where[1].encode()))
    return Request({**request.scope, "headers": headers})


def headers_without_keys(request: Request) -> dict[str, str]:
    """The request's headers by their names in lower case, none that holds a key."""
    pairs = ((name.lower(), value) for name, value in request.scope["headers"])
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in pairs if k not in _KEY_HEADERS}


def as_events(item: Any) -> str:
    """One or several stream items as server-sent events."""
    items = item if isinstance(item, list) else [item]
    return "".join(i if isinstance(i, str) else f"data: {i.model_dump_json()}\n\n" for i in items)


def tokens_in(packet: str) -> int:
    """Output tokens in a packet: its events, less the role, the usage and the end marker."""
    events = packet.count("data: {")
    return max(events - packet.count('"role":"assistant"') - packet.count('"choices":[]'), 0)
