"""Scheduling rules by name: ours and the baselines."""

from __future__ import annotations

from scheduler.baselines import BASELINES
from scheduler.config import FairConfig, LinkRates
from scheduler.work import Rule

FAIR = "fair"
SCHEDULERS = (FAIR, *BASELINES)
# Those that go on past a request that does not fit, as a router's forecast should know.
PACKING = frozenset({FAIR, "greedy", "cap1"})


def rule_named(name: str, config: FairConfig | None = None, link: LinkRates | None = None) -> Rule:
    """A fresh rule.

    Args:
        name: one of `SCHEDULERS`.
        config: weights and settings; baselines use the weights and the window.
        link: what loads take, for the rule that cares.

    Raises:
        ValueError: there is no such rule; lists those there are.
    """
    if name == FAIR:
        from scheduler.core import Fair

        return Fair(config or FairConfig(), link)
    if name not in BASELINES:
        raise ValueError(f"unknown scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return BASELINES[name](config or FairConfig())
