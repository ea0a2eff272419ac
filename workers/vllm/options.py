"""What an engine is told of its scheduler: `additional_config["kappa_scheduler"]`, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.config import FairConfig, LinkRates
from scheduler.work import Rule

CONFIG_KEY = "kappa_scheduler"
# The engine's own order, measured like any rule.
STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Options:
    """rule: its name, or `STOCK`; config: the fields of a `FairConfig`; link: token_s and fixed_s
    of a load, if known; stats: endpoint of the stats channel; log: file for JSON lines;
    tenant_required: an ingress of ours names every request's tenant, so one without is refused."""

    rule: str = "fair"
    config: Mapping[str, Any] = field(default_factory=dict)
    link: Mapping[str, float] | None = None
    stats: str = ""
    log: str | None = None
    tenant_required: bool = False

    @classmethod
    def read(cls, additional_config: Mapping[str, Any] | None, policy: str) -> Options:
        """Check what an engine was given.

        Raises:
            ValueError: an unknown key, a wrong value, or a policy that would undo the rule's order.
        """
        data = dict((additional_config or {}).get(CONFIG_KEY) or {})
        unknown = sorted(set(data) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"{CONFIG_KEY}: unknown keys {unknown}; known are {list(cls.__dataclass_fields__)}"
            )
        if policy != "fcfs":
            raise ValueError(
                f"the engine's scheduling_policy is {policy!r}, which would undo the rule's order: "
                "leave it at 'fcfs' and choose the rule 'priority' instead"
            )
        options = cls(**data)
        options.make_rule()
        return options

    def make_rule(self) -> Rule | None:
        """A new rule; None for the engine's own order."""
        if self.rule == STOCK:
            return None
        from scheduler.catalogue import rule_named

        try:
            config = FairConfig(**self.config)
            link = LinkRates(**self.link) if self.link else None
        except TypeError as error:
            raise ValueError(f"{CONFIG_KEY}: {error}") from None
        return rule_named(self.rule, config, link)
