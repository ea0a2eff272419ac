"""Every setting of a cluster, in one validated schema, with the defaults of the demo cluster.

`load_settings` reads a YAML file; each fault is reported with file, key and reason, all at once.
Environment variables read by the project are listed here and nowhere else:
`KAPPA_HOME` (cache folder, default `~/.cache/kappa-serve`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kappa.hardware import node_profile
from kappa.report import MAX_TENANTS
from kappa.shapes import model_shape
from kappa.types import ModelShape, NodeProfile

PolicyName = Literal["priced", "threshold", "ttft", "least_backlog"]
SchedulerName = Literal[
    "fair", "fcfs", "priority", "vtc", "dlpm", "hrrn", "cap1", "greedy", "stock"
]  # fmt: skip

EngineKind = Literal["vllm", "torch"]
PlannerName = Literal["auto", "kv", "kvpr", "hybrid", "recompute"]

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


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
    """Which engine runs, and its limits; the device cache is small so that sessions spill to the
    host tier. `engine: torch` is short for `engine: {kind: torch}`."""

    kind: EngineKind = Field("vllm", description="torch: our own, which executes load plans")
    planner: PlannerName = Field(
        "auto", description="how cached prefixes come back; of kind torch only"
    )
    act_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of stored blocks kept as activations, too; 1 unless hybrid; torch only",
    )
    max_context_tokens: int = Field(8192, ge=64)
    block_tokens: int = Field(32, ge=16)
    device_blocks: int = Field(264, ge=8, description="KV blocks in the device cache")
    host_bytes: int = Field(64 << 20, ge=0, description="host tier; zero switches it off")
    max_batch_tokens: int = Field(1024, ge=64, description="token budget of one step")
    max_sequences: int = Field(64, ge=1)
    dtype: str = "float32"
    metrics: bool = Field(False, description="export vLLM's own metrics through Ray, too")
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


class SchedulerSettings(_Section):
    """How each worker's engine chooses what runs next (`scheduler.config.FairConfig`)."""

    name: SchedulerName = Field("fair", description="the rule; stock: vLLM's own scheduler")
    max_skips: int = Field(64, ge=0, description="a request that others passed so often is due")
    due_after_s: Finite = Field(30.0, ge=0, description="a request that waited so long is due")
    window: int = Field(256, ge=1, le=65_536, description="waiting requests looked at each time")
    slack_s: Finite = Field(0.25, ge=0, description="service a tenant may be ahead of others")
    credit: Finite = Field(0.1, ge=0, description="service that a second of waiting is worth")
    reserve: bool = Field(True, description="set blocks aside for a request that is due")
    log: str | None = Field(None, description="file for JSON lines, one per iteration; none: off")
    store_backlog_s: Finite = Field(
        10.0, ge=0, description="stores to the host tier that would wait longer are dropped"
    )
    duplex: Literal["full", "half"] = Field("full", description="half: loads and stores share")
    link_order: Literal["loads_first", "fifo"] = "loads_first"

    @field_validator("log")
    @classmethod
    def _log_named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty: name a file, or leave it out for no log")
        return value


class TenantSettings(_Section):
    """Who may ask and with what share. Without keys everyone is the default tenant.

    by_key: secret key -> tenant; a tenant may have several. keys_file: the same as a YAML file of
    its own (`key: tenant`, one per line), so that the settings hold no secret. weights: shares.
    """

    by_key: dict[SecretStr, TenantName] = Field(default_factory=dict)
    keys_file: str | None = None
    weights: dict[TenantName, Annotated[Finite, Field(gt=0)]] = Field(default_factory=dict)
    unknown: Literal["default", "refuse"] = Field(
        "default", description="requests without a known key: the default tenant's, or 401"
    )
    default_name: TenantName = "default"

    @model_validator(mode="before")
    @classmethod
    def _with_the_file(cls, data: Any) -> Any:
        path = data.get("keys_file") if isinstance(data, dict) else None
        by_key = data.get("by_key") or {} if path is not None else {}
        if not (isinstance(path, str) and isinstance(by_key, dict)):
            return data
        more = _read_keys(path)
        if any(by_key[key] != more[key] for key in by_key.keys() & more.keys()):
            raise ValueError(f"by_key and {path} give one key to two tenants: drop it from one")
        return {**data, "by_key": {**by_key, **more}}

    @field_validator("by_key")
    @classmethod
    def _keys_can_be_sent(cls, value: dict[SecretStr, str]) -> dict[SecretStr, str]:
        for key, tenant in value.items():
            text = key.get_secret_value()
            if not (text and text.isascii() and text.isprintable() and " " not in text):
                raise ValueError(
                    f"a key of {tenant!r} is empty, or not plain ASCII without spaces: clients "
                    "could not send it as 'Authorization: Bearer KEY'"
                )
        return value

    @model_validator(mode="after")
    def _names_known(self) -> TenantSettings:
        known = {*self.by_key.values(), self.default_name}
        if len(known) > MAX_TENANTS:
            raise ValueError(f"{len(known)} tenants: at most {MAX_TENANTS} are kept apart")
        strangers = sorted(set(self.weights) - known)
        if strangers:
            raise ValueError(
                f"weights names {strangers}, who have no key; known are {sorted(known)[:20]}"
            )
        if self.unknown == "refuse" and not self.by_key:
            raise ValueError("unknown: refuse needs keys: give by_key or keys_file")
        return self

    def weight(self, tenant: str) -> float:
        """A tenant's share, 1 unless told otherwise."""
        return self.weights.get(tenant, 1.0)


def _read_keys(path: str) -> dict[str, Any]:
    """A file of keys; what is wrong with it is told without its text."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"keys_file {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ValueError(f"keys_file {path}: is not YAML; write 'key: tenant' lines") from None
    if not isinstance(data, dict):
        raise ValueError(f"keys_file {path}: is no mapping; write 'key: tenant' lines")
    return data


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
    scheduler: SchedulerSettings = SchedulerSettings()
    tenants: TenantSettings = TenantSettings()
    http: HttpSettings = HttpSettings()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_by_its_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

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
            raise SettingsError(f"{where}: is not YAML: {_without_text(error)}") from None
        if not isinstance(data, dict):
            raise SettingsError(
                f"{where}: expected a mapping of settings, found {type(data).__name__}"
            )
    try:
        return ClusterSettings.model_validate({**data, **overrides})
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(_shown(fault['loc'])) or '(file)'}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise SettingsError(f"{where}: {error.error_count()} fault(s)\n{faults}") from None


def _shown(loc: tuple[int | str, ...]) -> list[str]:
    """Where a fault is, without the secret key that is part of the way there."""
    parts = [str(part) for part in loc]
    return ["(key)" if i and parts[i - 1] == "by_key" else part for i, part in enumerate(parts)]


def _without_text(error: yaml.YAMLError) -> str:
    """Where and why, without the line itself, which may hold a key."""
    mark = getattr(error, "problem_mark", None)
    why = getattr(error, "problem", None) or "unreadable"
    return f"{why}, line {mark.line + 1} column {mark.column + 1}" if mark else str(why)


def home() -> Path:
    """The folder for made models, cached profiles and sockets."""
    return Path(os.environ.get("KAPPA_HOME", Path.home() / ".cache" / "kappa-serve"))
