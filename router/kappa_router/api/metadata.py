"""Metadata beside a request's body for its engine, and headers for its client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kappa import protocol as p
from kappa.hardware import NodeProfile
from kappa_router.api.tenants import Tenant
from kappa_router.decision import Decision

# What a client calls its conversation: this header, else one of these fields of its body.
SESSION_HEADER = "x-session-id"
# As the Gateway API's Inference Extension names them: a tenant, and an objective of the settings.
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
OBJECTIVE_HEADER = "x-gateway-inference-objective"
# The most milliseconds to a first token, as llm-d and GKE read it.
SLO_TTFT_HEADER = "x-slo-ttft-ms"
DEADLINE_HEADER = "x-kappa-deadline-ms"
CONVERSATION_KEYS = ("prompt_cache_key", "user")
PLAN_HEADER = "x-kappa-plan"

Metadata = dict[str, str | int | float]


def tenant_metadata(sent_as: str, tenant: Tenant) -> Metadata:
    """Metadata of every request for the engine's scheduler: its id there, tenant and weight."""
    return {p.REQUEST_ID_KEY: sent_as, p.TENANT_KEY: tenant.name, p.WEIGHT_KEY: tenant.weight}


def routed_metadata(decision: Decision, elsewhere: Mapping[str, p.Charge]) -> Metadata:
    """A decision as the engine's scheduler is sent it: tokens that the chosen worker should hold,
    and what tenants were charged elsewhere than there, to the millisecond."""
    chosen, sent = decision.chosen, Metadata()
    if decision.informed:
        sent[p.PROMPT_TOKENS_KEY] = decision.prompt_tokens
        sent[p.DEVICE_TOKENS_KEY] = int(chosen.counts.device_tokens)
        sent[p.HOST_TOKENS_KEY] = int(chosen.counts.cached_tokens - chosen.recomputed_tokens)
        if chosen.counts.disk_tokens:
            sent[p.DISK_TOKENS_KEY] = int(chosen.counts.disk_tokens)
    sent[p.LINK_S_KEY] = round(chosen.load_s, 6)
    sent[p.GPU_S_KEY] = round(chosen.compute_s, 6)
    if elsewhere:
        rounded = {name: [round(s, 3) for s in charge] for name, charge in elsewhere.items()}
        sent[p.CHARGES_KEY] = json.dumps(rounded, separators=(",", ":"))
    return sent


def peer_params(decision: Decision, endpoint: str) -> dict[str, Any]:
    """Parameters of the KV that the chosen worker is to take from a peer first."""
    assert decision.fetch is not None
    counts = decision.chosen.counts
    stop = int(counts.device_tokens + counts.cached_tokens)
    start = stop - decision.fetch.tokens
    return {p.PEER_PARAM: {"endpoint": endpoint, "start": start, "stop": stop}}


def _paced(node: NodeProfile) -> str:
    """Whether a node's speed is emulated, and by which table of real GPUs."""
    table = f"; silicon={node.silicon}" if node.silicon else ""
    return f"true{table}" if node.source == "paced" else "false"


def decision_headers(decision: Decision) -> dict[str, str]:
    """Headers by which a response tells of its routing."""
    chosen = decision.chosen
    return {
        **({PLAN_HEADER: chosen.plan} if chosen.plan else {}),
        "x-kappa-node": chosen.node.name,
        "x-kappa-paced": _paced(chosen.node),
        "x-kappa-ratio": f"{chosen.counts.ratio:.2f}",
        "x-kappa-crit": f"{chosen.kappa_crit:.2f}",
        "x-kappa-reason": decision.reason,
        "x-kappa-predicted-ttft-ms": f"{1e3 * chosen.ttft_s:.1f}",
    }
