"""What every section of the settings shares: strict, frozen, and the types of its values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
TenantName = Annotated[str, Field(pattern=TENANT_NAME)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SettingsError(ValueError):
    """A configuration that cannot be used; the message names file, key, reason and remedy."""


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
