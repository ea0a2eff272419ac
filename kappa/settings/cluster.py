"""A whole cluster: every section with its defaults, and the reader of its YAML file.

`load_settings` reports each fault with file, key and reason, all at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from kappa.settings.access import HttpSettings, TenantSettings
from kappa.settings.base import Section, SettingsError
from kappa.settings.engine import EngineSettings
from kappa.settings.model import ModelSettings, NodeSettings
from kappa.settings.routing import RouterSettings
from kappa.settings.scheduling import SchedulerSettings


class ClusterSettings(Section):
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
