"""Scheduling rules by name: ours, vLLM's, and rules installed as entry points."""

from __future__ import annotations

from typing import Any

from kappa.cost import StepLimit, StepModel
from kappa.host import SCHEDULING_RULES, installed
from kappa_scheduler.config import FairConfig, LinkRates
from kappa_scheduler.fair import Fair
from kappa_scheduler.fcfs import Fcfs
from kappa_scheduler.work import Rule

FAIR = Fair.name
SCHEDULERS = (FAIR, Fcfs.name, *installed(SCHEDULING_RULES))


def rule_named(name: str, config: FairConfig | None = None, link: LinkRates | None = None) -> Rule:
    """A new rule; rules other than ours use weights and window of `config`, and no `link`.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    config = config or FairConfig()
    if name == FAIR:
        return Fair(config, link)
    rule: Rule = _other(name)(config)
    return rule


def step_factor(name: str, config: FairConfig | None = None) -> float:
    """The factor of the bound on steps under this rule (`kappa.cost.StepLimit`); 0: no bound."""
    return (config or FairConfig()).step_factor if name == FAIR else 0.0


def step_limit(name: str, config: FairConfig | None, step: StepModel | None) -> StepLimit | None:
    """The bound on steps of an engine; None if there is none, or its steps are not known."""
    factor = step_factor(name, config)
    return StepLimit(step, factor) if factor and step is not None else None


def packs(name: str) -> bool:
    """Whether a rule goes on past a request that does not fit; False for an unknown rule."""
    return name == FAIR or (name in SCHEDULERS and bool(_other(name).packs))


def _other(name: str) -> Any:
    """The class of a rule other than `Fair`."""
    if name == Fcfs.name:
        return Fcfs
    if name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return installed(SCHEDULING_RULES)[name].load()
