"""Which model is served, and which hardware a worker is or is paced as."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field, field_validator

from kappa.hardware import node_profile
from kappa.settings.base import Fault, Section
from kappa.settings.pools import Name, value_of
from kappa.shapes import model_shape
from kappa.types import ModelShape, NodeProfile


class ModelSettings(Section):
    """Which model is served. Without a `source` a tiny random one is made from `seed`."""

    id: str = Field("kappa-tiny", min_length=1, description="name that clients use")
    source: str | None = Field(None, description="folder or Hugging Face name; none: made here")
    seed: int = Field(0, ge=0, description="seed of the made model")
    emulate: str = Field("llama-3.1-8b", description="model whose cost a paced node emulates")

    @field_validator("emulate")
    @classmethod
    def _known_shape(cls, value: str) -> str:
        model_shape(value)
        return value

    @property
    def emulated_shape(self) -> ModelShape:
        """The shape that paced nodes price and pace."""
        return model_shape(self.emulate)


class NodeSettings(Section):
    """One worker: the hardware that it is, or on a CPU machine the one that it is paced as."""

    name: Name
    profile: str = Field(description="catalogue name or profile JSON")
    paced: bool = True

    @field_validator("profile")
    @classmethod
    def _known_profile(cls, value: str) -> str:
        node_profile(value)
        return value

    def node(self, dilation: float) -> NodeProfile:
        """The profile to pace by, in dilated time."""
        profile = node_profile(self.profile)
        return replace(profile, name=self.name, source="paced", dilation=dilation)


def node_faults(nodes: Any) -> list[Fault]:
    """What is wrong between nodes, as they stand in the file."""
    if not isinstance(nodes, list | tuple):
        return []
    names = [str(value_of(node, "name")) for node in nodes]
    if len(set(names)) < len(names):
        return [((), f"two nodes share a name among {names}: names must differ")]
    return []
