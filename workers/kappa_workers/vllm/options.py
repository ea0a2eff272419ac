"""Our options in vLLM's `additional_config` and `kv_connector_extra_config`: keys and reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kappa.cost import StepLimit, StepModel
from kappa_scheduler.catalogue import rule_named, step_factor, step_limit
from kappa_scheduler.config import FairConfig, LinkRates
from kappa_scheduler.work import Rule

SCHEDULER_KEY = "kappa_scheduler"
STATS_KEY = "kappa_stats"
PACE_KEY = "kappa_pace"
LINK_KEY = "kappa_link"
TAIL_KEY = "kappa_plan"
LMCACHE_KEY = "kappa_lmcache"
DISK_KEY = "kappa_disk"
PEERS_KEY = "kappa_peers"

# The engine's own order, measured like any rule.
STOCK = "stock"

T = TypeVar("T")
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


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
    """What an engine schedules by."""

    # The rule's name, or `STOCK`.
    rule: str = "fair"
    # The fields of a `FairConfig`.
    config: dict[str, Any] = {}
    # The fields of a `LinkRates`; None: not known, or measured.
    link: dict[str, float] | None = None
    # The fields of a `StepModel`; None: the engine is not paced.
    step: dict[str, float] | None = None
    # Endpoint of the stats channel; empty: nothing is sent.
    stats: str = ""
    # File for JSON lines; None: no lines are written.
    log: str | None = None
    # Whether a decider of ours names every request's tenant: a request without one is refused.
    tenant_required: bool = False
    # File with the engine's measurements, once it was measured: the link's rates and the step's
    # constants; empty: there is none.
    profile: str = ""

    @classmethod
    def read(cls, additional_config: Mapping[str, Any] | None) -> SchedulerOptions:
        """Check what an engine was given.

        Raises:
            ValueError: an unknown key, a wrong value, or a rule that cannot be held here.
        """
        options = read_options(additional_config, SCHEDULER_KEY, cls)
        if hasattr(options.make_rule(), "bound"):
            raise ValueError(
                f"the rule {options.rule!r} bounds steps of simulated engines alone: leave it out "
                "and give vLLM its own options (max_num_batched_tokens, ...)"
            )
        return options

    def for_rank(self, rank: int) -> SchedulerOptions:
        """The same with a log of the replica's own."""
        if not self.log:
            return self
        path = Path(self.log)
        own = path.with_name(f"{path.stem}-{rank}{path.suffix}")
        return msgspec.structs.replace(self, log=str(own))

    def make_rule(self) -> Rule | None:
        """A new rule; None for the engine's own order."""
        if self.rule == STOCK:
            return None
        try:
            config = FairConfig(**self.config)
            link = LinkRates(**self.link) if self.link else measured_link(self.profile)
        except TypeError as error:
            raise ValueError(f"{SCHEDULER_KEY}: {error}") from None
        return rule_named(self.rule, config, link)

    @property
    def step_factor(self) -> float:
        return step_factor(self.rule, FairConfig(**self.config))

    def make_limit(self) -> StepLimit | None:
        """The bound of a step besides its token budget; None: there is none, or steps are not
        known."""
        if self.rule == STOCK:
            return None
        step = StepModel.from_dict(self.step) if self.step else measured_step(self.profile)
        return step_limit(self.rule, FairConfig(**self.config), step)


def measured_link(profile: str) -> LinkRates | None:
    """The rates of loads, from the file of an engine's measurements; None if it has none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(Path(profile).read_text(encoding="utf-8"))
        return LinkRates(found["load_token_s"], found["load_fixed_s"])
    return None


def measured_step(profile: str) -> StepModel | None:
    """The model of steps, from the same file; None if it has none that fits."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return fitted_step(json.loads(Path(profile).read_text(encoding="utf-8")))
    return None


MOST_P90 = 0.25
"""A fit that is further off than this in one of ten steps of a kind is not used."""


def worst_kind(found: Mapping[str, Any]) -> tuple[str, float]:
    """The kind of steps that a fit holds worst, and its 90th percentile; 0 where none was noted."""
    errors = {kind: float(p90) for kind, (_, p90) in found.get("errors", {}).items()}
    return max(errors.items(), key=lambda row: row[1], default=("", 0.0))


def fitted_step(measured: Mapping[str, Any]) -> StepModel | None:
    """The constants fitted to the engine's own steps, if they are nearer to these than the prior
    is, and hold nine of ten steps of each kind."""
    found = measured.get("step")
    if not found or not found["error"] < found["prior_error"] or worst_kind(found)[1] > MOST_P90:
        return None
    known = StepModel.__dataclass_fields__
    return StepModel(**{name: value for name, value in found.items() if name in known})


class LinkPace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a paced link takes, in real (dilated) seconds."""

    # Per loaded token; 0: loads are not paced.
    token_s: Seconds = 0.0
    # Per stored token; 0: stores are not paced.
    store_token_s: Seconds = 0.0
    # Per transfer.
    fixed_s: Seconds = 0.0
    # Real seconds per second of the node that it is paced as.
    dilation: Seconds = 1.0

    def load_s(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.token_s if self.token_s else 0.0

    def store_s(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.store_token_s if self.store_token_s else 0.0


class PeerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine serves its host tier to its peers."""

    host: str
    port: int
    # What a reader must know.
    token: str
    # File with the places of the tier's rows, until the engine's other process has read it.
    layout: str
    # The longest silence of a peer.
    wait_s: float = 5.0
    # The least seconds per KV token of a paced transfer, in real (dilated) seconds.
    token_s: float = 0.0
    # The least seconds of a paced transfer besides.
    fixed_s: float = 0.0

    @property
    def endpoint(self) -> str:
        """The address that only the router gives to peers."""
        return f"{self.host}:{self.port}/{self.token}"

    def pace_s(self, tokens: int) -> float:
        """The least seconds from sending to receiving these tokens."""
        return self.fixed_s + tokens * self.token_s


class LinkRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the host tier shares its link; seconds are the node's own."""

    # A server per direction, or one for both.
    duplex: Literal["full", "half"] = "full"
    # "fifo" is vLLM's own, and drops nothing.
    order: Literal["loads_first", "fifo"] = "loads_first"
    # New stores are dropped while this many seconds of stores are queued.
    store_backlog_s: Seconds = 10.0
    # How long one call may hold the engine up for stores that still read the blocks it wants to
    # reuse; stores that take longer are dropped.
    late_wait_s: Seconds = 0.01
    # Whether the only request of an engine loads in its prompt's own step, layer by layer.
    by_layer: bool = False

    def dilated(self, dilation: float) -> LinkRules:
        """The same in real seconds."""
        backlog_s, late_s = self.store_backlog_s * dilation, self.late_wait_s * dilation
        return msgspec.structs.replace(self, store_backlog_s=backlog_s, late_wait_s=late_s)
