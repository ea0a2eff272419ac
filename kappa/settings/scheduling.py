"""How each worker chooses what runs next."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kappa.plugins import SCHEDULING_RULES, installed
from kappa.settings.base import Finite, Section

BUILT_IN = ("fair", "fcfs", "stock")
"""Rules that are always there; entry points of `kappa.scheduling_rules` add others."""


class SchedulerSettings(Section):
    """How each worker's engine chooses what runs next (`scheduler.config.FairConfig`)."""

    name: str = Field("fair", description="the rule; stock: vLLM's own scheduler")
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

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        known = (*BUILT_IN, *installed(SCHEDULING_RULES))
        if value not in known:
            raise ValueError(f"{value!r} is not installed: choose one of {', '.join(known)}")
        return value

    @field_validator("log")
    @classmethod
    def _log_named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty: name a file, or leave it out for no log")
        return value
