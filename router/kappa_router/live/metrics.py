"""The router's metrics in Prometheus form, built from the names in `kappa.metrics`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kappa import metrics as m
from kappa.metrics import Metric
from kappa.protocol import WorkerReport

# Tenants with labels of their own; all further ones share one.
_TENANT_LABELS = 256
# Totals of workers that left are remembered: one that comes back must not count twice.
_MAX_GONE = 64

ENGINE_STATES = ("waiting", "loading", "running")
_CLASSES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
# Fields of a report that are taken over as totals: of the node, and of one more label.
_TOTALS: tuple[tuple[Metric, str, tuple[str, ...]], ...] = (
    (m.STEP_TOKENS, "step_tokens_total", ()),
    (m.OVERRUNS, "overruns_total", ()),
    (m.LOAD_BYTES, "load_bytes_total", ()),
    (m.STORE_BYTES, "store_bytes_total", ()),
    (m.ITERATIONS, "iterations_total", ()),
    (m.QUEUED_ITERATIONS, "queued_iterations_total", ()),
    (m.FILL, "budget_fill_sum", ("budget",)),
    (m.FILL, "vram_fill_sum", ("vram",)),
    (m.RULE_ERRORS, "rule_errors_total", ()),
    (m.PREEMPTIONS, "preemptions_total", ()),
    (m.STORES_DROPPED, "stores_dropped_total", ()),
    (m.FAILED_LOADS, "failed_loads_total", ()),
    (m.MISUSED_BLOCKS, "misused_blocks_total", ()),
)

_Key = tuple[str, tuple[str, ...]]


class RouterMetrics:
    """One registry with every metric of `kappa.metrics`; totals of others are taken over as is."""

    def __init__(self, counting: bool = True) -> None:
        """Not `counting`: nothing is counted, and the exposition is empty."""
        self._counting = counting
        self._registry = CollectorRegistry()
        self._collectors: dict[str, Any] = {}
        for metric in m.ALL if counting else ():
            extra = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            self._collectors[metric.name] = _CLASSES[metric.kind](
                metric.name, metric.meaning, metric.labels, registry=self._registry, **extra
            )
        # `labels` of prometheus-client costs several times what counting does.
        self._children: dict[_Key, Any] = {}
        self._totals: dict[str, dict[_Key, float]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._tenants: set[str] = set()

    def inc(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        if self._counting:
            self._child(metric, labels).inc(by)

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        if self._counting:
            self._child(metric, labels).set(to)

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        if self._counting:
            self._child(metric, labels).observe(value)

    def total(self, metric: Metric, *labels: str, to: float, source: str = "") -> None:
        """Bring a counter up to a total that `source` counts; a fall means that it restarted."""
        key, totals = (metric.name, labels), self._totals.setdefault(source, {})
        known = totals.get(key)
        if self._counting and known != to:
            totals[key], before = to, known or 0.0
            # Even at zero: a counter that first appears with its first event shows no increase.
            self._child(metric, labels).inc(to - before if to >= before else to)

    def reported(self, report: WorkerReport, node: str, *, paced: bool) -> None:
        worker = report.worker
        self._gone.pop(worker, None)
        steps = report.steps_total
        self.total(m.STEPS, node, "true" if paced else "false", to=steps, source=worker)
        for metric, name, labels in _TOTALS:
            self.total(metric, node, *labels, to=getattr(report, name), source=worker)
        for why, count in report.passed_total.items():
            self.total(m.PASSED, node, why, to=count, source=worker)
        for what, count in report.tier_failures_total.items():
            self.total(m.TIER_FAILURES, node, what, to=count, source=worker)
        if report.power_source:
            where = (report.power_source,)
            self.set(m.POWER, node, worker, *where, to=report.power_w)
            self.set(m.POWER_CAP, node, worker, *where, to=report.power_cap_w)
            self.total(m.ENERGY, node, *where, to=report.energy_j_total, source=worker)
        self.set(m.LOAD_BANDWIDTH, node, worker, to=report.h2d_bytes_per_s)
        for state in ENGINE_STATES:
            self.set(m.ENGINE_REQUESTS, node, worker, state, to=getattr(report, state))

    def forget(self, label: str, value: str) -> None:
        """Drop every gauge of a worker or a peer that is gone; counters stay, since they must not
        fall."""
        places = {
            metric.name: metric.labels.index(label)
            for metric in m.ALL
            if metric.kind == "gauge" and label in metric.labels
        }
        for name, labels in list(self._children):
            if name in places and labels[places[name]] == value:
                del self._children[name, labels]
                self._collectors[name].remove(*labels)

    def left(self, source: str) -> None:
        """A source of totals is gone; of the last ones the totals are remembered."""
        self._gone[source] = None
        self._gone.move_to_end(source)
        while len(self._gone) > _MAX_GONE:
            self._totals.pop(self._gone.popitem(last=False)[0], None)

    def tenant(self, name: str) -> str:
        """The label of a tenant: its name, or `other` once there are too many."""
        if len(self._tenants) < _TENANT_LABELS:
            self._tenants.add(name)
        return name if name in self._tenants else "other"

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        child = self._children.get((metric.name, labels))
        if child is None:
            collector = self._collectors[metric.name]
            child = collector.labels(*labels) if metric.labels else collector
            self._children[metric.name, labels] = child
        return child
