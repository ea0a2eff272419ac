"""Ray Serve's own router, untouched in what it decides, that also publishes its replicas.

Installed in place of `router.ray_router` by `router.mode: ray`, the way back: which replica of a
pool gets a request is then decided by Ray's own code alone. What it adds can only fail to show a
worker in `GET /v1/nodes`.

Ray pickles this class by value, with the globals that it names: it names modules only.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import ReplicaID, RunningReplica

import kappa.protocol
import router.live.replica_registry


class WatchedRayRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray's default router; announcements of its replicas are posted for the ingress."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Ray's; then publish which replicas there are."""
        super().update_replicas(replicas)
        announced = {
            r.replica_id.unique_id: (r.routing_stats or {}).get(kappa.protocol.ANNOUNCEMENT_KEY, {})
            for r in replicas
        }
        self._kappa_registry("publish", announced)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """As Ray's; then publish it."""
        super().on_replica_actor_died(replica_id)
        self._kappa_registry("remove", replica_id.unique_id)

    def _kappa_registry(self, change: str, what: Any) -> None:
        # This class is for when ours is not trusted: Ray's routing goes on.
        with contextlib.suppress(Exception):
            registry = router.live.replica_registry.REGISTRY
            getattr(registry, change)(str(self._deployment_id), what)
