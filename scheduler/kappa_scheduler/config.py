"""Settings of the fair rule, and the rates of an engine's link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kappa.checks import check_not_negative
from kappa.cost import transfer_s


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Seconds of a load (`kappa.cost.transfer_s`), by the engine's own clock."""

    token_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, "token_s", "fixed_s")

    def load_s(self, tokens: int) -> float:
        """Seconds that a load of `tokens` occupies the link."""
        return transfer_s(tokens, self.token_s, self.fixed_s)


@dataclass(frozen=True, slots=True)
class FairConfig:
    """Settings of the fair rule; `kappa.settings` bounds those that are set."""

    weights: Mapping[str, float] = field(default_factory=dict)  # share of each tenant
    default_weight: float = 1.0  # of tenants not named
    # A request is starving after more bypasses than this for want of blocks, or this long a wait.
    max_skips: int = 64
    due_after_s: float = 30.0
    window: int = 256  # waiting requests that an iteration looks at
    # Seconds of service by which a tenant may be ahead before others go first.
    slack_s: float = 0.25
    # Seconds of service that a second of waiting is worth, until the request is starving. A tenant
    # ahead by the most credit and the slack gets no blocks while a tenant in turn waits for some.
    credit: float = 0.1
    # Set blocks aside for a starving request; off only to show the effect.
    reserve: bool = True
    expected_output_tokens: int = 128  # of an answer, before any was seen
    # With several tenants: share of slots and blocks that tenants with something running leave to
    # those with nothing.
    headroom: float = 1 / 16
    class_s: float = 10.0  # head start of a class of priority on the next
    step_factor: float = 3.0  # of `kappa.cost.StepLimit`; 0: no bound
