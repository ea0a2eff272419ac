"""The router's metrics in Prometheus form, built from the names in `kappa.metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kappa import metrics as m
from kappa.metrics import Metric
from kappa.protocol import WorkerReport

# So many tenants have labels of their own; all further ones share one.
_TENANT_LABELS = 256

ENGINE_STATES = ("waiting", "loading", "running")
# Workers that left whose totals are remembered: one that comes back must not count twice.
_MAX_GONE = 64


class _Nothing:
    """Counts nothing."""

    def inc(self, by: float = 1.0) -> None:
        pass

    def set(self, to: float) -> None:
        pass

    def observe(self, value: float) -> None:
        pass


_NOTHING = _Nothing()
_CLASSES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class RouterMetrics:
    """One registry with every metric of `kappa.metrics`; totals of others are taken over as is."""

    def __init__(self, counting: bool = True) -> None:
        """Not `counting`: nothing is counted, and the exposition is empty."""
        self._counting = counting
        self._registry = CollectorRegistry()
        self._collectors = {metric.name: self._make(metric) for metric in m.ALL if counting}
        # `labels` of prometheus-client costs several times what counting does.
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._totals: dict[str, dict[tuple[str, tuple[str, ...]], float]] = {}
        self._gone: dict[str, None] = {}
        self._tenants: set[str] = set()

    def inc(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        self._child(metric, labels).inc(by)

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """Set a gauge."""
        self._child(metric, labels).set(to)

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        """Add to a histogram."""
        self._child(metric, labels).observe(value)

    def total(self, metric: Metric, *labels: str, to: float, source: str = "") -> None:
        """Bring a counter up to a total that `source` counts; a fall means that it started anew."""
        key, totals = (metric.name, labels), self._totals.setdefault(source, {})
        known = totals.get(key)
        if known == to:
            return
        totals[key], before = to, known or 0.0
        gained = to - before if to >= before else to
        # Even at zero: a counter that first appears with its first event shows no increase.
        child = self._child(metric, labels)
        if gained:
            child.inc(gained)

    def reported(self, report: WorkerReport, node: str, *, paced: bool) -> None:
        """Take over a worker's totals and gauges."""
        totals: list[tuple[Metric, tuple[str, ...], float]] = [
            (m.STEPS, (node, "true" if paced else "false"), report.steps_total),
            (m.STEP_TOKENS, (node,), report.step_tokens_total),
            (m.OVERRUNS, (node,), report.overruns_total),
            (m.LOAD_BYTES, (node,), report.load_bytes_total),
            (m.STORE_BYTES, (node,), report.store_bytes_total),
            (m.ITERATIONS, (node,), report.iterations_total),
            (m.QUEUED_ITERATIONS, (node,), report.queued_iterations_total),
            (m.FILL, (node, "budget"), report.budget_fill_sum),
            (m.FILL, (node, "vram"), report.vram_fill_sum),
            (m.RULE_ERRORS, (node,), report.rule_errors_total),
            (m.PREEMPTIONS, (node,), report.preemptions_total),
            (m.STORES_DROPPED, (node,), report.stores_dropped_total),
            (m.FAILED_LOADS, (node,), report.failed_loads_total),
            (m.MISUSED_BLOCKS, (node,), report.misused_blocks_total),
            *((m.PASSED, (node, why), count) for why, count in report.passed_total.items()),
            *((m.TIER_FAILURES, (node, w), n) for w, n in report.tier_failures_total.items()),
        ]
        self._gone.pop(report.worker, None)
        for metric, labels, value in totals:
            self.total(metric, *labels, to=value, source=report.worker)
        if report.power_source:
            where = (node, report.power_source)
            self.set(m.POWER, *where, to=report.power_w)
            self.set(m.POWER_CAP, *where, to=report.power_cap_w)
            self.total(m.ENERGY, *where, to=report.energy_j_total, source=report.worker)
        self.set(m.LOAD_BANDWIDTH, node, to=report.h2d_bytes_per_s)
        for state in ENGINE_STATES:
            self.set(m.ENGINE_REQUESTS, node, state, to=getattr(report, state))

    def forget_node(self, node: str) -> None:
        """Drop every gauge of a node that is gone; counters stay, since they must not fall."""
        gauges = {
            metric.name: metric.labels.index("node")
            for metric in m.ALL
            if metric.kind == "gauge" and "node" in metric.labels
        }
        for name, labels in [
            key for key in self._children if key[0] in gauges and key[1][gauges[key[0]]] == node
        ]:
            del self._children[name, labels]
            self._collectors[name].remove(*labels)

    def left(self, source: str) -> None:
        """A source of totals is gone; of the last ones the totals are remembered."""
        self._gone.pop(source, None)
        self._gone[source] = None
        while len(self._gone) > _MAX_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._totals.pop(oldest, None)

    def tenant(self, name: str) -> str:
        """The label of a tenant: its name, or `other` once there are too many."""
        if len(self._tenants) < _TENANT_LABELS:
            self._tenants.add(name)
        return name if name in self._tenants else "other"

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _make(self, metric: Metric) -> Any:
        extra = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _CLASSES[metric.kind](
            metric.name, metric.meaning, metric.labels, registry=self._registry, **extra
        )

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        if not self._counting:
            return _NOTHING
        child = self._children.get((metric.name, labels))
        if child is None:
            collector = self._collectors[metric.name]
            child = collector.labels(*labels) if metric.labels else collector
            self._children[metric.name, labels] = child
        return child
