"""How a fair scheduler is tuned, and what loads take on its link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kappa.checks import check_not_negative, check_positive
from kappa.cost import transfer_s

_MAX_HEADROOM = 0.5


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What a load takes (`kappa.cost.transfer_s`), in seconds of the engine's own clock."""

    token_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, "token_s", "fixed_s")

    def load_s(self, tokens: int) -> float:
        """Seconds that a load of `tokens` occupies the link."""
        return transfer_s(tokens, self.token_s, self.fixed_s)


@dataclass(frozen=True, slots=True)
class FairConfig:
    """The fair scheduler's rules in numbers.

    weights: share of each tenant; default_weight: of those not named. max_skips, due_after_s: a
    request that others bypassed so often for want of blocks, or that has waited so long, is
    starving. window: how many waiting requests an iteration looks at. slack_s: seconds of service
    by which a tenant may be ahead before others go first. credit: seconds of service that a second
    of waiting is worth, until the request is starving; a tenant ahead by all of that and the slack
    gets no blocks while one in turn waits for some. reserve: set blocks aside for a starving
    request (off only to show what happens then). expected_output_tokens: length of an answer before
    any was seen. headroom: where there are several tenants, the share of slots and blocks that
    those with something running leave to those with nothing. class_s: seconds of head start that
    each class of priority has on the next. step_factor: as `kappa.cost.StepLimit` has it.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    default_weight: float = 1.0
    max_skips: int = 64
    due_after_s: float = 30.0
    window: int = 256
    slack_s: float = 0.25
    credit: float = 0.1
    reserve: bool = True
    expected_output_tokens: int = 128
    headroom: float = 1 / 16
    class_s: float = 10.0
    step_factor: float = 2.5

    def __post_init__(self) -> None:
        waits = "max_skips", "due_after_s", "slack_s", "credit", "class_s"
        check_not_negative(self, *waits, "headroom", "step_factor")
        check_positive(self, "window", "expected_output_tokens", "default_weight")
        if self.headroom > _MAX_HEADROOM:
            raise ValueError(
                f"FairConfig.headroom is {self.headroom}: give at most {_MAX_HEADROOM}, or "
                "tenants with something running could hardly use the engine"
            )
        for tenant, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"FairConfig: the weight of tenant {tenant!r} is {weight}: give a finite "
                    "number above zero"
                )
