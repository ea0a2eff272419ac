"""How much of a hit in the host tier an engine of vLLM loads: the front, to a block's end; the back
is computed with the new tokens, and that is exact. The planner is the router's own
(`kappa.plans.planners`, "tail"), with the rates that the worker announced, so both foresee the
same. The tokens that each request took from where are reported when it is admitted. Used by all our
connectors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import structlog

from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.plans.load_plan import LoadPlan
from kappa.plans.measured import as_measured, rates_from_measured
from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import rates_from_law
from kappa_workers.request_metadata import plan_of, request_id_of
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.options import TAIL_KEY

log = structlog.get_logger(__name__)

TAIL, LOAD_ALL = "tail", "kv"
# A request that waits is asked about again and again, with the same numbers.
_MAX_REMEMBERED = 4096
# More digits than any count has: Python refuses to read thousands of them.
_LOAD_AT_MOST = re.compile(r"load=(\d{1,18})", re.ASCII)


def tail_rates(shape: ModelShape, node: NodeProfile, layers: int = 0) -> dict[str, Any]:
    """The rates that worker and router plan by, as `rates_from_measured` reads them, in the node's
    own seconds. shape: the model that runs, or that a paced node acts as. layers: of the model that
    runs, where a request that is alone loads by them (`engine.load`); 0: loads go ahead of prompts,
    and none of a request's own load hides behind its own prompt."""
    overlap = 1.0 - 1.0 / layers if layers else 0.0
    return as_measured(rates_from_law(shape, node, overlap=overlap), shape.name, node.name)


class TailRecompute:
    """The planner of one engine. rates: as `tail_rates` gives them; None: all is loaded. Every
    answer is a multiple of block_tokens, if the hits are.

    Raises:
        ValueError: rates that cannot be read.
    """

    def __init__(self, rates: Mapping[str, Any] | None, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._plans: list[Callable[[Cached], int]] = []
        if rates is not None:
            announced = rates_from_measured(rates)
            for each in (replace(announced, overlap=0.0), announced):
                plan = Planning(block_tokens, each, activations=False).named(TAIL)
                self._plans.append(lru_cache(_MAX_REMEMBERED)(partial(_crossing, plan)))

    def loaded_tokens(
        self, device: int, hit: int, new: int, asked_for: str = "", *, by_layer: bool = False
    ) -> int:
        """Of `hit` tokens that could be loaded behind `device` ones, how many to load; `new` are to
        be computed in any case. by_layer: each layer hides behind the one before, so that a tail
        pays wherever κ exceeds κ_eff. asked_for: the request's own wish
        (`kappa.protocol.PLAN_KEY`), for experiments: "kv" loads all, "load=640" loads 640 tokens at
        most."""
        if hit <= 0 or asked_for == LOAD_ALL:
            return hit
        if asked_for.startswith("load="):
            count = _LOAD_AT_MOST.fullmatch(asked_for)
            most = int(count[1]) // self._block_tokens * self._block_tokens if count else hit
            return min(hit, most)
        return self._plans[by_layer](Cached(hit, max(new, 1), device)) if self._plans else hit


def _crossing(plan: Callable[[Cached], LoadPlan], cached: Cached) -> int:
    return plan(cached).crossing_tokens


def ignore_malformed_params(request: Any) -> None:
    """Drop a new request's `kv_transfer_params` unless they are a mapping: connectors take them for
    one in the engine's loop, where an exception ends the engine. Without them KV is computed."""
    params = request.kv_transfer_params
    if params is None or isinstance(params, dict):
        return
    log.warning(
        "kv_transfer_params_ignored",
        request_id=request.request_id,
        reason=f"they are of type {type(params).__name__}, not a mapping",
    )
    request.kv_transfer_params = None
    request.sampling_params.extra_args.pop("kv_transfer_params", None)


class AdmissionReports:
    """Says how much of a hit to load, and remembers device hits until their requests are admitted,
    to report each once to `stats`. extra: the connector's options."""

    def __init__(self, stats: StatsSender, extra: Mapping[str, Any], block_tokens: int) -> None:
        self._stats, self._tail = stats, TailRecompute(extra.get(TAIL_KEY), block_tokens)
        self._device_tokens: dict[str, int] = {}

    def loaded_tokens(
        self, request: Any, device_tokens: int, hit: int, *, by_layer: bool = False
    ) -> int:
        """How many of `hit` tokens to load behind the device's; note these for the report."""
        self._device_tokens[request.request_id] = device_tokens
        if not hit:
            return 0
        new = request.num_tokens - device_tokens - hit
        plan = plan_of(request.sampling_params)
        return self._tail.loaded_tokens(device_tokens, hit, new, plan, by_layer=by_layer)

    def admitted(self, request: Any, host_tokens: int, disk_tokens: int = 0) -> int:
        """Blocks are allocated and `host_tokens` will be loaded, `disk_tokens` of them from disk;
        report it once for each look-up. Returns the tokens that were on the device."""
        device_tokens = self._device_tokens.pop(request.request_id, None)
        if device_tokens is None:
            return 0
        self._stats.send(
            {
                "kind": "admit",
                "request_id": request_id_of(request.sampling_params),
                "device_tokens": device_tokens,
                "host_tokens": host_tokens,
                "disk_tokens": disk_tokens,
                "new_tokens": max(request.num_prompt_tokens - device_tokens - host_tokens, 1),
                "t_s": time.time(),
            }
        )
        return device_tokens

    def finished(self, request: Any) -> None:
        """A request ended, perhaps before it was admitted."""
        self._device_tokens.pop(request.request_id, None)
