"""Settings of routing, failover and observation, and the limits of the decider."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from kappa.checks import http_parts, steered_percent
from kappa.settings.base import Finite, LogFile, PriorityClass, Section, TenantName, read_by
from kappa.slo import OBJECTIVE

PolicyName = Literal[
    "priced", "priced_fetch", "threshold", "threshold_literal", "ttft", "least_backlog"
]

FETCHING_POLICY: PolicyName = "priced_fetch"
"""With it workers take KV from each other's host tiers."""


class FailoverSettings(Section):
    """Bounds beyond which a worker counts as failed, and its pauses before a trial
    (`kappa_router.live.circuit_breaker`)."""

    stall_after_s: Finite = Field(
        5.0,
        gt=0,
        description="silence, or work without progress, after which a worker's requests without a "
        "first token go elsewhere; longer where more was to be expected",
    )
    failures: int = Field(5, ge=1, description="failed requests in a row that open the breaker")
    pause_s: Finite = Field(
        1.0, gt=0, description="before an open breaker lets one request through; doubles each time"
    )
    longest_pause_s: Finite = Field(30.0, gt=0)

    @model_validator(mode="after")
    def _pauses_grow(self) -> FailoverSettings:
        if self.longest_pause_s < self.pause_s:
            raise ValueError(
                f"longest_pause_s = {self.longest_pause_s:g} is less than pause_s = "
                f"{self.pause_s:g}: raise the one or lower the other"
            )
        return self


class ObjectiveSettings(Section):
    """Limits on a request's latency (`kappa.slo.ServiceObjective`): admission refuses requests that
    would take longer, and the policy prices by them. Seconds are dilated, as engines' time is."""

    ttft_s: Finite = Field(
        OBJECTIVE.ttft_s, ge=0, description="to the first token; or the next, if that is longer"
    )
    ttft_idle_factor: Finite = Field(
        OBJECTIVE.ttft_idle_factor, ge=0, description="multiple of the idle median node's seconds"
    )
    tpot_s: Finite = Field(
        OBJECTIVE.tpot_s, ge=0, description="per later token; or the next, if that is longer"
    )
    tpot_idle_factor: Finite = Field(OBJECTIVE.tpot_idle_factor, ge=0)

    @model_validator(mode="after")
    def _can_be_met(self) -> ObjectiveSettings:
        for name in ("ttft", "tpot"):
            factor = getattr(self, f"{name}_idle_factor")
            if factor < 1 and not (factor == 0 and getattr(self, f"{name}_s") > 0):
                raise ValueError(
                    f"{name}_idle_factor = {factor:g}: no idle node is that fast; give 1 or more, "
                    f"or 0 and {name}_s above 0 for a limit in seconds alone"
                )
        return self


class NamedObjective(Section):
    """An objective that a request may name by the header `x-gateway-inference-objective`."""

    priority: PriorityClass | None = Field(
        None, description="the class that it asks for, of those that its tenant may; none: no other"
    )
    ttft_s: Finite | None = Field(
        None, gt=0, description="to its first token, in real seconds; none: as router.objective"
    )


class RouterSettings(Section):
    """The policy, and the limits of the decider."""

    policy: PolicyName = "priced"
    mode: Annotated[str, read_by(steered_percent)] = Field(
        "on", description="who steers: shadow (the others, ours watches), canary:N (percent), or on"
    )
    index_blocks: int = Field(1_000_000, ge=1, description="bound of the prefix index")
    max_body_bytes: int = Field(4 << 20, ge=1024)
    max_queue: int = Field(256, ge=1, description="requests in flight before 429")
    stale_after_s: float = Field(10.0, gt=0, description="a silent worker is not chosen after this")
    calibrate: bool = True
    calibrate_requests: int | None = Field(
        None, ge=0, description="outcomes to learn from before freezing; none: for ever"
    )
    forecast_workers: int = Field(
        4, ge=0, description="pools up to this size are forecast step by step, larger ones not"
    )
    admission: bool = Field(
        True, description="refuse (429) requests predicted to miss their objective"
    )
    objective: ObjectiveSettings = ObjectiveSettings()
    objectives: dict[TenantName, NamedObjective] = Field(
        default_factory=dict,
        description="objectives that requests may name; without any, the header is not read",
    )
    longest_ttft_s: Finite = Field(
        60.0, ge=0, description="most that x-slo-ttft-ms may ask for; 0: the header is not read"
    )
    request_timeout_s: float = Field(600.0, gt=0)
    failover: FailoverSettings = FailoverSettings()
    record: str | None = Field(
        None, description="file for the router's log (JSON lines, holds token ids); none: off"
    )


LogFormat = Literal["console", "json"]


class ObservingSettings(Section):
    """Logs, traces and metrics of router and workers."""

    log_format: LogFormat = Field(
        "console", description="json: one object per line, with the request's id"
    )
    log_file: LogFile = Field(
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

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if http_parts(value) is None:
            raise ValueError(
                f"otlp_endpoint {value!r} is no address of a collector: give http://HOST:4318 "
                "(OTLP over HTTP) or http://HOST:4317 with otlp_protocol: grpc"
            )
        return value.rstrip("/")
