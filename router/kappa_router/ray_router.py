"""Ray Serve's side of routing: publishes a cluster's replicas, and decides alone as a drop-in.

In a cluster of ours no client's request passes Ray; its decider learns here which workers there
are. In a plain Ray Serve LLM app that named `kappa_router.ray_router.KappaRouter` as its
`request_router_class` it uses `router.standalone`, which routes by what it sent where and by what
replicas announce. The only file that knows Ray's router interface; no arithmetic here.

Ray pickles this class by value, with the globals that it names; other modules are named, not
pickled, so the registry stays one per process.
"""

from __future__ import annotations

import logging
from typing import Any

import ray.serve._private.constants
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

import kappa.protocol
import kappa_router.live.replica_registry
import kappa_router.standalone

_LOGGER = "ray.serve"
_NO_BODY = (
    "Ray does not show this router the bodies of requests, so it knows no prompt: requests go to "
    "the replica with the fewest, and cached prefixes count for nothing. Start Ray and the app "
    "with RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1 in the environment of every node."
)
# By this call a decider of ours has Ray make its handles' routers; no client sends it.
_WAKING = "record_routing_stats"


class KappaRouter(RequestRouter):
    """`request_router_kwargs` (all optional): `node`, `model`, `policy` for the drop-in use."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray with the configured keyword arguments; ValueError on an unknown one."""
        self._kappa_alone = kappa_router.standalone.StandaloneRouter(**kwargs)
        self._kappa_warned = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came, went, or announced something: post it for the decider."""
        super().update_replicas(replicas)
        statistics = {r.replica_id.unique_id: r.routing_stats or {} for r in replicas}
        key = kappa.protocol.ANNOUNCEMENT_KEY
        kappa_router.live.replica_registry.REGISTRY.publish(
            str(self._deployment_id), {name: of.get(key, {}) for name, of in statistics.items()}
        )
        for problem in self._kappa_alone.replicas(statistics):
            logging.getLogger(_LOGGER).warning(problem)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica died: the decider must not wait for Ray's next health check to know."""
        super().on_replica_actor_died(replica_id)
        kappa_router.live.replica_registry.REGISTRY.remove(
            str(self._deployment_id), replica_id.unique_id
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, since Ray reorders within a rank by queue length."""
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        waking = pending_request.metadata.call_method == _WAKING
        if not (pending_request.args or waking or self._kappa_warned):
            self._kappa_warned = True
            # With it set Ray itself says which bodies it could not show, and why.
            if not _bodies_are_forwarded():
                logging.getLogger(_LOGGER).warning(_NO_BODY)
        ranked = self._kappa_alone.rank(
            list(by_id), pending_request.args, pending_request.metadata.internal_request_id
        )
        return [[by_id[worker]] for worker in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica took a request: from now on its end is waited for."""
        super().on_request_routed(pending_request, replica_id, result)
        self._kappa_alone.routed(
            replica_id.unique_id,
            pending_request.args,
            pending_request.metadata.internal_request_id,
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request ended: its reservation goes."""
        super().on_request_completed(replica_id, internal_request_id)
        self._kappa_alone.done(replica_id.unique_id, internal_request_id)


def _bodies_are_forwarded() -> bool:
    constants = ray.serve._private.constants
    return bool(constants.RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY)
