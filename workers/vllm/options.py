"""Our options in vLLM's `additional_config` and `kv_connector_extra_config`: keys and reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from scheduler.catalogue import rule_named
from scheduler.config import FairConfig, LinkRates
from scheduler.work import Rule

SCHEDULER_KEY = "kappa_scheduler"
STATS_KEY = "kappa_stats"
PACE_KEY = "kappa_pace"
LINK_KEY = "kappa_link"
PERSIST_KEY = "kappa_keep"
TAIL_KEY = "kappa_plan"
TRANSFER_KEY = "kappa_transfer"
LMCACHE_KEY = "kappa_lmcache"

# The engine's own order, measured like any rule.
STOCK = "stock"

T = TypeVar("T")


def read_options(config: Mapping[str, Any] | None, key: str, kind: type[T]) -> T:
    """The options under `key`, or their defaults.

    Raises:
        ValueError: an unknown field, or a wrong value; names the key.
    """
    try:
        return msgspec.convert((config or {}).get(key) or {}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{key}: {error}") from None


class SchedulerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """rule: its name, or `STOCK`; config: the fields of a `FairConfig`; link: the fields of a
    `LinkRates`, if known; stats: endpoint of the stats channel; log: file for JSON lines;
    tenant_required: an ingress of ours names every request's tenant, so one without is refused."""

    rule: str = "fair"
    config: dict[str, Any] = {}
    link: dict[str, float] | None = None
    stats: str = ""
    log: str | None = None
    tenant_required: bool = False

    @classmethod
    def read(cls, additional_config: Mapping[str, Any] | None, policy: str) -> SchedulerOptions:
        """Check what an engine was given.

        Raises:
            ValueError: an unknown key, a wrong value, or a policy that would undo the rule's order.
        """
        options = read_options(additional_config, SCHEDULER_KEY, cls)
        if policy != "fcfs":
            raise ValueError(
                f"the engine's scheduling_policy is {policy!r}, which would undo the rule's order: "
                "leave it at 'fcfs' and choose the rule 'priority' instead"
            )
        options.make_rule()
        return options

    def make_rule(self) -> Rule | None:
        """A new rule; None for the engine's own order."""
        if self.rule == STOCK:
            return None
        try:
            config = FairConfig(**self.config)
            link = LinkRates(**self.link) if self.link else None
        except TypeError as error:
            raise ValueError(f"{SCHEDULER_KEY}: {error}") from None
        return rule_named(self.rule, config, link)
