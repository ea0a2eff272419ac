"""Which host tier an engine of vLLM has, as the `kv_transfer_config` that says so. Pure.

Ours (`workers.vllm.host_tier`), an LMCache server, or vLLM's own copies, which need a GPU. All
three go through a connector of ours, so that admissions are reported and a tail may be computed. A
load that fails is computed anew: vLLM's default would fail the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.vllm.lmcache.link import connector_config
from workers.vllm.tail_recompute import CONFIG_KEY as PLAN_KEY
from workers.vllm.tail_recompute import LOAD_ALL

OWN, LMCACHE, NATIVE = "own", "lmcache", "native"
AHEAD, BY_LAYER = "ahead", "layers"
# What is announced of a server is bounded by what it can hold, or, of a shared one, by this.
_SHARED_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class TierChoice:
    """What the settings say of the host tier.

    kind: one of the above. planner: "tail" or "kv". load: "ahead" of the prompt, or by "layers"
    beside it (ours only). server: of LMCache, tcp://host:port; empty: the worker starts its own.
    The seconds are as in `kappa.settings.engine.LmcacheSettings`.
    """

    kind: str = OWN
    planner: str = LOAD_ALL
    load: str = AHEAD
    server: str = ""
    timeout_s: float = 1.0
    heartbeat_s: float = 1.0
    retry_s: float = 5.0

    @property
    def shared(self) -> bool:
        """Whether several workers load from one server."""
        return self.kind == LMCACHE and bool(self.server)


@dataclass(frozen=True, slots=True)
class TierNeeds:
    """What a tier must know of its engine: bytes, endpoint for reports, how the link is shared, the
    pace (none: unpaced), and the rates to plan by (none: load all)."""

    host_bytes: int
    stats_endpoint: str
    link: Mapping[str, Any] = field(default_factory=dict)
    pace: Mapping[str, float] | None = None
    rates: Mapping[str, Any] | None = None
    host_blocks: int = 0


def transfer_config(choice: TierChoice, needs: TierNeeds, server: str = "") -> dict[str, Any]:
    """The `kv_transfer_config` of an engine.

    Args:
        choice: what the settings say.
        needs: of the engine.
        server: of LMCache, where `choice` leaves it to the worker.

    Raises:
        ValueError: a kind that there is not, or no server to name.
    """
    extra: dict[str, Any] = {"kappa_stats": needs.stats_endpoint}
    if needs.rates is not None:
        extra[PLAN_KEY] = {"planner": choice.planner, "rates": dict(needs.rates)}
    if choice.kind == LMCACHE:
        url = choice.server or server
        if not url:
            raise ValueError("host tier lmcache: no server is named, and none was started")
        extra |= connector_config(url, choice.timeout_s, choice.heartbeat_s, choice.retry_s)
        extra["kappa_most_blocks"] = _SHARED_BLOCKS if choice.shared else needs.host_blocks
        if needs.pace is not None:
            extra["kappa_pace"] = dict(needs.pace)
        return _named("LmcacheConnector", "workers.vllm.lmcache.connector", extra)
    extra |= {
        "cpu_bytes_to_use": needs.host_bytes,
        "self_describing_kv_events": True,
        "offload_prompt_only": False,
    }
    if choice.kind == OWN:
        extra |= {
            "kappa_link": dict(needs.link),
            "kappa_load": choice.load,
            "spec_name": "HostTierSpec",
            "spec_module_path": "workers.vllm.host_tier",
        }
        if needs.pace is not None:
            extra["kappa_pace"] = dict(needs.pace)
    elif choice.kind != NATIVE:
        raise ValueError(f"host tier {choice.kind!r}: choose {OWN}, {LMCACHE} or {NATIVE}")
    return _named("HostTierConnector", "workers.vllm.connector", extra)


def _named(connector: str, module: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
