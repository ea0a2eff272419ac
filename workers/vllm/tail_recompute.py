"""How much of a hit in the host tier an engine of vLLM loads: the front; the back is computed.

vLLM's connectors answer one question, how many tokens beyond the device's a request may load. A
shorter answer, at a block's end, has the rest computed with the new tokens, and that is exact. The
planner is the router's own (`kappa.plans.planners`, "tail"), with the rates that the worker
announced, so that both foresee the same. Pure; asked by the connectors for every admission.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import as_measured, rates_from_law, rates_from_measured
from workers.vllm.options import TAIL_KEY, read_options

TAIL, LOAD_ALL = "tail", "kv"
# Loading ahead: none of a request's own load hides behind its own prompt.
OVERLAP = 0.0
# A request that waits is asked about again and again, with the same numbers.
_MAX_REMEMBERED = 4096
_LOAD_AT_MOST = "load="
# More digits than any count has: Python refuses to read thousands of them.
_MAX_DIGITS = 18


def tail_rates(shape: ModelShape, node: NodeProfile) -> dict[str, Any]:
    """The rates that worker and router plan by, as `rates_from_measured` reads them.

    Args:
        shape: the model that runs, or that a paced node acts as.
        node: its bandwidth and FLOP/s, measured or to be paced by. Seconds are the node's own.
    """
    return as_measured(rates_from_law(shape, node, overlap=OVERLAP), shape.name, node.name)


class TailOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """planner: "tail", or "kv" to load all; rates: as `tail_rates` gives them."""

    planner: str = TAIL
    rates: dict[str, Any] | None = None


class TailRecompute:
    """The planner of one engine.

    Args:
        planner: "tail", or "kv" to load all, always.
        rates: as `tail_rates` gives them; none: all is loaded.
        block_tokens: of the host tier; every answer is a multiple, if the hits are.

    Raises:
        ValueError: rates that cannot be read, or a planner that is neither; says why.
    """

    def __init__(self, planner: str, rates: Mapping[str, Any] | None, block_tokens: int) -> None:
        if planner not in (TAIL, LOAD_ALL):
            raise ValueError(
                f"{TAIL_KEY}: planner is {planner!r}; an engine of vLLM has {TAIL} and {LOAD_ALL}"
            )
        self._plan, self._block_tokens = None, block_tokens
        if planner == TAIL and rates is not None:
            planning = Planning(block_tokens, rates_from_measured(rates), activations=False)
            self._plan = planning.named(TAIL)
        self._answers: OrderedDict[Cached, int] = OrderedDict()

    @classmethod
    def from_config(cls, extra: Mapping[str, Any], block_tokens: int) -> TailRecompute:
        """From a connector's extra configuration; without an entry there all is loaded."""
        options = read_options(extra, TAIL_KEY, TailOptions)
        return cls(options.planner, options.rates, block_tokens)

    def loaded_tokens(self, device: int, hit: int, new: int, asked_for: str = "") -> int:
        """Of `hit` tokens that could be loaded behind `device` ones, how many to load.

        `new` are behind them, to be computed in any case. asked_for: what the request itself asks
        (`kappa.protocol.PLAN_KEY`), for experiments: "kv" loads all, "load=640" so many at most.
        """
        if hit <= 0 or asked_for == LOAD_ALL:
            return hit
        if asked_for.startswith(_LOAD_AT_MOST):
            tokens = asked_for.removeprefix(_LOAD_AT_MOST)
            most = int(tokens) if tokens.isdecimal() and len(tokens) <= _MAX_DIGITS else hit
            return min(hit, most // self._block_tokens * self._block_tokens)
        if self._plan is None:
            return hit
        cached = Cached(hit, max(new, 1), device)
        loaded = self._answers.get(cached)
        if loaded is None:
            loaded = self._answers[cached] = self._plan(cached).crossing_tokens
            if len(self._answers) > _MAX_REMEMBERED:
                self._answers.popitem(last=False)
        return loaded
