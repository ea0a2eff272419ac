"""What the ingress is told when it is deployed: plain values, sent with the deployment.

`deploy` makes it from a cluster's settings; the ingress and what it is made of read it. Whole
sections of the settings stand in it as they are, so that a new field of theirs needs no wiring.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kappa.settings.engine import TransferSettings
from kappa.settings.routing import FailoverSettings, ObservingSettings
from router.access.tenants import Tenants


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the ingress is told when it is deployed.

    drain_s: the longest that any pool's worker may take to finish its requests when it is taken
    away; replicas: how many ingresses there are.
    """

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
    failover: FailoverSettings = field(default_factory=FailoverSettings)
    drain_s: float = 60.0
    replicas: int = 1
    transfer: TransferSettings = field(default_factory=TransferSettings)
