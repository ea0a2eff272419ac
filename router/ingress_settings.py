"""What the ingress is told when it is deployed: plain values, sent with the deployment.

`deploy` makes it from a cluster's settings; the ingress and what it is made of read it. Whole
sections of the settings stand in it as they are, so that a new field of theirs needs no wiring.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kappa.settings.observing import ObservingSettings
from router.tenants import Tenants


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the ingress is told when it is deployed."""

    tokenizer_source: str
    policy: str
    index_blocks: int
    max_queue: int
    stale_after_s: float
    calibrate: bool
    calibrate_requests: int | None
    request_timeout_s: float
    secret: str
    record: str | None
    forecast_workers: int = 4
    admission: bool = False
    tenants: Tenants = field(default_factory=Tenants)
    mode: str = "on"
    observing: ObservingSettings = field(default_factory=ObservingSettings)
    log_level: str = "WARNING"
