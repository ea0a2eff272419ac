"""Scheduling rules by name: ours, vLLM's, and those that are installed as entry points."""

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
    """A fresh rule; rules other than ours take weights and window of `config`, and no `link`.

    Raises:
        ValueError: there is no such rule; lists those there are.
    """
    config = config or FairConfig()
    if name == FAIR:
        return Fair(config, link)
    rule: Rule = _other(name)(config)
    return rule


def step_factor(name: str, config: FairConfig | None = None) -> float:
    """What bounds a step of an engine with this rule besides its token budget
    (`kappa.cost.StepLimit`); 0: nothing."""
    return (config or FairConfig()).step_factor if name == FAIR else 0.0


def step_limit(name: str, config: FairConfig | None, step: StepModel | None) -> StepLimit | None:
    """The same for an engine of these steps; None: nothing, or what they take is not known."""
    factor = step_factor(name, config)
    return StepLimit(step, factor) if factor and step is not None else None


def packs(name: str) -> bool:
    """Whether a rule goes on past a request that does not fit; False if it is none of ours."""
    return name == FAIR or (name in SCHEDULERS and bool(_other(name).packs))


def _other(name: str) -> Any:
    """The class of a rule that is not ours."""
    if name == Fcfs.name:
        return Fcfs
    if name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return installed(SCHEDULING_RULES)[name].load()
