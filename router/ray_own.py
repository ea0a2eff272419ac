"""Ray Serve's own router, untouched in what it decides, that also tells who is there.

Installed in place of `router.ray_router` by `router.mode: ray`, the way back: which replica of a
pool gets a request is then decided by Ray's own code alone. What it adds can only fail to tell
`GET /v1/nodes` something.

Ray pickles this class by value, with the globals that it names: it names modules only.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import ReplicaID, RunningReplica

import router.live.board


class WatchedRayRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray's default router; announcements of its replicas are posted for the ingress."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Ray's; then tell who is there."""
        super().update_replicas(replicas)
        said: dict[str, Any] = {
            r.replica_id.unique_id: (r.routing_stats or {}).get("kappa", {}) for r in replicas
        }
        self._kappa_tell(lambda: router.live.board.BOARD.post(str(self._deployment_id), said))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """As Ray's; then tell it."""
        super().on_replica_actor_died(replica_id)
        self._kappa_tell(
            lambda: router.live.board.BOARD.remove(str(self._deployment_id), replica_id.unique_id)
        )

    def _kappa_tell(self, tell: Any) -> None:
        # This class is for when ours is not trusted: Ray's routing goes on.
        with contextlib.suppress(Exception):
            tell()
