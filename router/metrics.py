"""The router's metrics in Prometheus form, built from the names in `kappa.metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kappa import metrics as names
from kappa.metrics import Metric

_CLASSES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class RouterMetrics:
    """One registry with every metric of `kappa.metrics`; totals of others are taken over as is."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collectors = {m.name: self._make(m) for m in names.ALL}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

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
        key = (metric.name, (*labels, source))
        before = self._totals.get(key, 0.0)
        self._totals[key] = to
        gained = to - before if to >= before else to
        if gained:
            self._child(metric, labels).inc(gained)

    def forget(self, metric: Metric, *labels: str) -> None:
        """Drop one labelled gauge, of a node that is gone."""
        collector = self._collectors[metric.name]
        if metric.labels and tuple(labels) in collector._metrics:
            collector.remove(*labels)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _make(self, metric: Metric) -> Any:
        extra = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _CLASSES[metric.kind](
            metric.name, metric.meaning, metric.labels, registry=self._registry, **extra
        )

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        collector = self._collectors[metric.name]
        return collector.labels(*labels) if metric.labels else collector
