"""What a cluster tells of itself: the form of its logs, its traces, and what is counted.

All of it may fail without harm to serving: a collector that is down costs spans, never requests.
Read by the ingress and by every worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kappa.settings.base import Finite, Section

LogFormat = Literal["console", "json"]


class ObservingSettings(Section):
    """Logs, traces and metrics of ingress and workers."""

    log_format: LogFormat = Field(
        "console", description="json: one object per line, with the request's id"
    )
    log_file: str | None = Field(
        None, description="file that every process of a machine appends its lines to, too"
    )
    otlp_endpoint: str | None = Field(
        None, description="collector for OpenTelemetry spans, as http://host:4318; none: no spans"
    )
    otlp_protocol: Literal["http", "grpc"] = "http"
    service_name: str = Field("kappa-serve", min_length=1)
    trace_share: Annotated[Finite, Field(ge=0, le=1)] = Field(
        1.0,
        description="share of requests traced; a client that sends `traceparent` decides itself",
    )
    request_log: bool = Field(True, description="a line at each request's end")
    metrics: bool = Field(
        True, description="false: nothing is counted and /metrics is empty (to measure the cost)"
    )

    @field_validator("log_file")
    @classmethod
    def _from_here(cls, value: str | None) -> str | None:
        # Workers have working folders of their own.
        return None if value is None else str(Path(value).absolute())

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(
                f"otlp_endpoint {value!r} is no address of a collector: give http://HOST:4318 "
                "(OTLP over HTTP) or http://HOST:4317 with otlp_protocol: grpc"
            )
        return value.rstrip("/")
