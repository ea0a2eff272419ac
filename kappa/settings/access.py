"""Who may ask, with what share and by which key, and where the endpoint listens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, field_validator, model_validator

from kappa.report import MAX_TENANTS
from kappa.settings.base import Finite, Section, TenantName


class TenantSettings(Section):
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


class HttpSettings(Section):
    """Where the endpoint listens."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free port")
