"""Every setting of a cluster, in one validated schema, with the defaults of the demo cluster.

`load_settings` reads a YAML file; each fault is reported with file, key and reason, all at once.
Environment variables read by the project are listed here and nowhere else:
`KAPPA_HOME` (cache folder, default `~/.cache/kappa-serve`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kappa.hardware import node_profile
from kappa.shapes import model_shape
from kappa.types import ModelShape, NodeProfile

PolicyName = Literal["priced", "threshold", "ttft", "least_backlog"]


class SettingsError(ValueError):
    """A configuration that cannot be used; the message names file, key, reason and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
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


class NodeSettings(_Section):
    """One worker: the hardware that it is, or on a CPU machine the one that it is paced as."""

    name: str = Field(min_length=1)
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


class EngineSettings(_Section):
    """vLLM's limits; the device cache is small so that sessions spill to the host tier."""

    max_context_tokens: int = Field(8192, ge=64)
    block_tokens: int = Field(32, ge=16)
    device_blocks: int = Field(264, ge=8, description="KV blocks in the device cache")
    host_bytes: int = Field(64 << 20, ge=0, description="host tier; zero switches it off")
    max_batch_tokens: int = Field(1024, ge=64, description="token budget of one step")
    max_sequences: int = Field(64, ge=1)
    dtype: str = "float32"
    extra: dict[str, Any] = Field(default_factory=dict, description="more vLLM engine arguments")

    @model_validator(mode="after")
    def _context_fits(self) -> EngineSettings:
        capacity = (self.device_blocks - 1) * self.block_tokens
        if capacity < self.max_context_tokens:
            raise ValueError(
                f"device_blocks * block_tokens holds {capacity} tokens, less than "
                f"max_context_tokens = {self.max_context_tokens}: raise the one or lower the other"
            )
        return self


class RouterSettings(_Section):
    """How requests are routed, and the limits of the ingress."""

    policy: PolicyName = "priced"
    index_blocks: int = Field(1_000_000, ge=1, description="bound of the prefix index")
    max_body_bytes: int = Field(4 << 20, ge=1024)
    max_queue: int = Field(256, ge=1, description="requests in flight before 429")
    stale_after_s: float = Field(10.0, gt=0, description="a silent worker is not chosen after this")
    calibrate: bool = True
    calibrate_requests: int | None = Field(
        None, ge=0, description="learn from so many outcomes, then freeze; none: for ever"
    )
    forecast_workers: int = Field(
        4, ge=0, description="pools up to this size are forecast step by step, larger ones not"
    )
    admission: bool = Field(
        False, description="refuse (503) what is predicted to miss its TTFT objective"
    )
    request_timeout_s: float = Field(600.0, gt=0)
    record: str | None = Field(
        None, description="file for the router's log (JSON lines, holds token ids); none: off"
    )


class HttpSettings(_Section):
    """Where the endpoint listens."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free port")


class ClusterSettings(_Section):
    """A whole cluster. The defaults are the demo: a PCIe node and a C2C node, both paced."""

    model: ModelSettings = ModelSettings()
    nodes: tuple[NodeSettings, ...] = (
        NodeSettings(name="pcie", profile="pcie"),
        NodeSettings(name="c2c", profile="c2c"),
    )
    dilation: float = Field(30.0, ge=1, description="real seconds per emulated one, paced nodes")
    engine: EngineSettings = EngineSettings()
    router: RouterSettings = RouterSettings()
    http: HttpSettings = HttpSettings()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @field_validator("nodes")
    @classmethod
    def _names_differ(cls, value: tuple[NodeSettings, ...]) -> tuple[NodeSettings, ...]:
        names = [node.name for node in value]
        if not names:
            raise ValueError("give at least one node")
        if len(set(names)) < len(names):
            raise ValueError(f"two nodes share a name among {names}: names must differ")
        return value

    def unpaced(self) -> ClusterSettings:
        """The same cluster at the machine's own speed."""
        nodes = tuple(node.model_copy(update={"paced": False}) for node in self.nodes)
        return self.model_copy(update={"nodes": nodes})


def load_settings(path: str | Path | None = None, **overrides: Any) -> ClusterSettings:
    """Read settings from a YAML file (none: the defaults), then apply `overrides` on top level.

    Raises:
        SettingsError: with the file and, for each fault, its key and reason.
    """
    data: Any = {}
    where = "built-in defaults"
    if path is not None:
        where = str(path)
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise SettingsError(f"{where}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{where}: is not UTF-8 text: {error.reason}") from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{where}: is not YAML: {error}") from None
        if not isinstance(data, dict):
            raise SettingsError(
                f"{where}: expected a mapping of settings, found {type(data).__name__}"
            )
    try:
        return ClusterSettings.model_validate({**data, **overrides})
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(str(part) for part in fault['loc']) or '(file)'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise SettingsError(f"{where}: {error.error_count()} fault(s)\n{faults}") from None


def home() -> Path:
    """The folder for made models, cached profiles and sockets."""
    return Path(os.environ.get("KAPPA_HOME", Path.home() / ".cache" / "kappa-serve"))
