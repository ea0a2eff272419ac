"""One `/metrics` from those of several ingresses.

What each ingress counts of its own requests adds up. What all hear from the same workers is the
same in each, but for one that came later: there the greatest counts. `kappa.metrics.ADDING` says
which is which.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from kappa.metrics import ADDING

_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Merged(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """What was merged."""
        return self._families


def merged(expositions: Iterable[bytes]) -> bytes:
    """Prometheus texts as one, in the order in which metrics were first seen.

    Raises:
        ValueError: one of them is no such text.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, float]] = {}
    for text in expositions:
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            _take(values.setdefault(known.name, {}), family, adds=family.name in ADDING)
    for name, family in families.items():
        family.samples = [
            Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()
        ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(list(families.values())))
    return generate_latest(registry)


def _take(into: dict[_Key, float], family: Metric, *, adds: bool) -> None:
    for sample in family.samples:
        key = sample.name, tuple(sorted(sample.labels.items()))
        if key not in into:
            into[key] = sample.value
        elif sample.name.endswith("_created"):
            into[key] = min(into[key], sample.value)
        elif adds:
            into[key] += sample.value
        else:
            into[key] = max(into[key], sample.value)
