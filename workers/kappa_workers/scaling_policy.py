"""Ray Serve's autoscaling policy of a pool. Runs in Serve's controller, which gets this module by
value, so it names others and holds no state of its own."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from kappa_workers.scaling import ScalingRule, loads_in


class BacklogPolicy(ScalingRule):
    """Enough workers for the predicted seconds of work that arrive and wait; its fields are as in
    `kappa.settings.pools.ScalingSettings`."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number wanted, and no state; while no worker has reported, as many as there are."""
        figures = {
            name: {str(replica): value for replica, value in by_replica.items()}
            for name, by_replica in (context.aggregated_metrics or {}).items()
        }
        loads = loads_in(figures, map(str, context.running_replicas))
        current = context.target_num_replicas
        return self.wanted(loads, current) if loads else current, {}
