"""Ray Serve's autoscaling policy of a pool. Runs in Serve's controller, which gets this module by
value, so it names others and holds no state of its own."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from kappa_workers.scaling import ScalingRule, loads_in


class BacklogPolicy:
    """Enough workers for the predicted seconds of work that arrive and wait."""

    def __init__(self, *, target_backlog_s: float, target_utilisation: float) -> None:
        """As `kappa.settings.pools.ScalingSettings` has them."""
        self._rule = ScalingRule(target_backlog_s, target_utilisation)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number wanted, and no state; while no worker has reported, as many as there are."""
        figures = {
            name: {str(replica): value for replica, value in by_replica.items()}
            for name, by_replica in (context.aggregated_metrics or {}).items()
        }
        loads = loads_in(figures, map(str, context.running_replicas))
        current = context.target_num_replicas
        return self._rule.wanted(loads, current) if loads else current, {}
