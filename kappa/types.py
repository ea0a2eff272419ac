"""The words of the law as data: a model's shape, a node's speeds, a request's tokens, a plan.

Every other package speaks in these four types. They are frozen, slotted and validated when
built, so arithmetic further in never has to ask whether a bandwidth is positive. Units are part
of each name; seconds are emulated seconds, undilated, unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Attention = Literal["mha", "gqa", "mla"]
ProfileSource = Literal["measured", "catalogue", "paced"]

_ATTENTIONS = ("mha", "gqa", "mla")
_SOURCES = ("measured", "catalogue", "paced")


def _fail(owner: str, field: str, value: object, remedy: str) -> ValueError:
    return ValueError(f"{owner}.{field} is {value!r}: {remedy}")


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value > 0):
            raise _fail(type(owner).__name__, name, value, "give a finite number above zero")


def _check_not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value >= 0):
            raise _fail(type(owner).__name__, name, value, "give a finite number, zero or more")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the law needs to know of a model.

    ``params_active`` counts the parameters one token passes through, ``params_total`` all of them;
    they differ for mixtures of experts. For ``attention="mla"`` the KV entry is a latent of
    ``kv_lora_rank + rope_head_dim`` elements per layer, ``kv_heads`` does not enter its size, and
    ``head_dim`` is the width of one head without its rotary part.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    params_active: float
    params_total: float
    attention: Attention
    kv_dtype_bytes: float = 2.0
    weight_dtype_bytes: float = 2.0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    experts: int = 0
    experts_active: int = 0
    max_context_tokens: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse a shape that no model has.

        Raises:
            ValueError: names the field and what to give instead.
        """
        _check_positive(
            self, "layers", "hidden", "heads", "kv_heads", "head_dim", "params_active",
            "params_total", "kv_dtype_bytes", "weight_dtype_bytes",
        )  # fmt: skip
        _check_not_negative(
            self, "kv_lora_rank", "rope_head_dim", "experts", "experts_active", "max_context_tokens"
        )
        if self.attention not in _ATTENTIONS:
            raise _fail("ModelShape", "attention", self.attention, f"use one of {_ATTENTIONS}")
        if self.attention == "mla" and self.kv_lora_rank == 0:
            raise _fail("ModelShape", "kv_lora_rank", 0, "MLA needs the rank of its KV latent")
        if self.kv_heads > self.heads:
            raise _fail("ModelShape", "kv_heads", self.kv_heads, f"at most heads = {self.heads}")
        if self.params_active > self.params_total:
            raise _fail(
                "ModelShape", "params_active", self.params_active,
                f"at most params_total = {self.params_total}",
            )  # fmt: skip
        if self.experts_active > self.experts:
            raise _fail(
                "ModelShape", "experts_active", self.experts_active,
                f"at most experts = {self.experts}",
            )  # fmt: skip
        if self.experts and not self.experts_active:
            raise _fail("ModelShape", "experts_active", 0, "say how many experts a token uses")


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A worker's hardware, measured, from a catalogue, or paced.

    Rates are per second of the node's own (emulated) time. ``d2h_bytes_per_s`` and
    ``attention_flops_per_s`` of zero mean the same as their counterparts. Nodes that share a
    switch or a NUMA node's link name the same ``link_group``; their backlog is common.
    ``dilation`` above one belongs to a paced node only: every emulated second lasts that many.
    ``cost_per_hour`` of zero means that no price was given.
    """

    name: str
    gpu: str
    link_name: str
    h2d_bytes_per_s: float
    flops_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: float = 0.0
    d2h_bytes_per_s: float = 0.0
    load_fixed_s: float = 0.0
    step_fixed_s: float = 0.0
    attention_flops_per_s: float = 0.0
    link_group: str = ""
    source: ProfileSource = "catalogue"
    dilation: float = 1.0
    cost_per_hour: float = 0.0
    reference: str = ""

    def __post_init__(self) -> None:
        """Refuse rates that would divide by zero later.

        Raises:
            ValueError: names the field and what to give instead.
        """
        for name in _PROFILE_NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _fail("NodeProfile", name, value, "give a number")
        _check_positive(self, "h2d_bytes_per_s", "flops_per_s", "hbm_bytes_per_s")
        _check_not_negative(
            self, "hbm_bytes", "d2h_bytes_per_s", "load_fixed_s", "step_fixed_s",
            "attention_flops_per_s", "cost_per_hour",
        )  # fmt: skip
        if self.source not in _SOURCES:
            raise _fail("NodeProfile", "source", self.source, f"use one of {_SOURCES}")
        if not (math.isfinite(self.dilation) and self.dilation >= 1):
            raise _fail("NodeProfile", "dilation", self.dilation, "give a finite number, 1 or more")
        if self.dilation > 1 and self.source != "paced":
            raise _fail(
                "NodeProfile", "dilation", self.dilation,
                f"only a paced node dilates time; source is {self.source!r}",
            )  # fmt: skip

    @property
    def store_bytes_per_s(self) -> float:
        """Device-to-host bytes/s; the host-to-device figure where none was given."""
        return self.d2h_bytes_per_s or self.h2d_bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeProfile:
        """Build from what ``to_dict`` gave, defaults filled in.

        Raises:
            ValueError: an unknown or missing key, named; or a field out of range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(
                f"NodeProfile has no key {', '.join(map(repr, unknown))}: "
                f"remove it, or use one of {', '.join(sorted(known))}"
            )
        missing = [name for name in _PROFILE_REQUIRED if name not in data]
        if missing:
            raise ValueError(f"NodeProfile lacks {', '.join(missing)}: add it to the profile")
        return cls(**data)


_PROFILE_REQUIRED = (
    "name", "gpu", "link_name", "h2d_bytes_per_s", "flops_per_s", "hbm_bytes_per_s",
)  # fmt: skip
_PROFILE_NUMBERS = tuple(f.name for f in fields(NodeProfile) if f.type == "float")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """A request's prompt on one node: held in VRAM, held in a slower tier, still to compute."""

    device_tokens: int
    cached_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Refuse negative counts.

        Raises:
            ValueError: names the field and what to give instead.
        """
        _check_not_negative(self, "device_tokens", "cached_tokens", "new_tokens")

    @property
    def ratio(self) -> float:
        """κ = cached / new. An engine computes at least the last token, so new is at least 1."""
        return self.cached_tokens / max(1, self.new_tokens)

    @property
    def total_tokens(self) -> int:
        """Length of the prompt."""
        return self.device_tokens + self.cached_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cached prefix is brought back, and what that is predicted to cost.

    Seconds are undilated; ``load_s`` is link time, ``compute_s`` gpu time, and ``ttft_s`` covers
    both under the plan's overlap. ``exact`` is false when the plan changes the model's output.
    """

    kind: str
    ttft_s: float
    load_s: float
    compute_s: float
    load_bytes: float
    exact: bool = True

    def __post_init__(self) -> None:
        """Refuse negative or infinite costs.

        Raises:
            ValueError: names the field and what to give instead.
        """
        _check_not_negative(self, "ttft_s", "load_s", "compute_s", "load_bytes")
