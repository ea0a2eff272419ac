"""What passes beside a request's body: metadata for its engine, headers for worker and client."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

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
from router.api.auth import Tenant
from router.api.constraints import APPROX_HEADER
from router.api.errors import unsupported_prompt
from router.decision import Decision

PIN_HEADER = "x-kappa-pin"
POOL_HEADER = "x-kappa-pool"
PLAN_HEADER = "x-kappa-plan"

# For the ingress alone: no worker needs a client's key, or may log one.
_KEY_HEADERS = ("authorization", "x-api-key")

Metadata = dict[str, str | int | float]


def tenant_metadata(sent_as: str, tenant: Tenant) -> Metadata:
    """What the engine's scheduler is sent with every request: its id there, and whose it is."""
    return {REQUEST_ID_KEY: sent_as, TENANT_KEY: tenant.name, WEIGHT_KEY: tenant.weight}


def routed_metadata(decision: Decision, elsewhere: Mapping[str, Charge]) -> Metadata:
    """What it is sent of a decision: what of the prompt the chosen worker should hold, and what
    tenants were charged elsewhere than there, to the millisecond."""
    chosen, sent = decision.chosen, Metadata()
    if decision.informed:
        sent[PROMPT_TOKENS_KEY] = decision.prompt_tokens
        sent[DEVICE_TOKENS_KEY] = int(chosen.counts.device_tokens)
        sent[HOST_TOKENS_KEY] = int(chosen.counts.cached_tokens - chosen.recomputed_tokens)
    sent[LINK_S_KEY] = round(chosen.load_s, 6)
    sent[GPU_S_KEY] = round(chosen.compute_s, 6)
    if elsewhere:
        rounded = {name: [round(s, 3) for s in charge] for name, charge in elsewhere.items()}
        sent[CHARGES_KEY] = json.dumps(rounded, separators=(",", ":"))
    return sent


def prompt_metadata(tokens: np.ndarray | None, plan: str) -> Metadata:
    """What an engine that does not tokenize is sent: the prompt, and its load plan if one is asked.

    Raises:
        ApiError: 400, the prompt could not be rendered here.
    """
    if tokens is None:
        raise unsupported_prompt()
    packed = base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()
    return {PROMPT_KEY: packed, **({PLAN_KEY: plan} if plan else {})}


def worker_headers(headers: Mapping[str, str], worker: str, pool: str | None) -> dict[str, str]:
    """A request's headers with the router's pin instead of any that the client sent, and no key;
    with the pool alone where Ray's router is to choose the worker."""
    dropped = (PIN_HEADER, POOL_HEADER, *_KEY_HEADERS)
    kept = {name: value for name, value in headers.items() if name not in dropped}
    return kept | ({PIN_HEADER: worker} if pool is None else {POOL_HEADER: pool})


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


def approx_headers(body: Any) -> dict[str, str]:
    """What a response says where its answer may be approximate."""
    return {APPROX_HEADER: "ok"} if (body.vllm_xargs or {}).get(APPROX_KEY) else {}
