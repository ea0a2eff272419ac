"""What all ingresses know together: each is called through Ray Serve, and their metrics are merged.

Ray sends a client to any ingress, but decisions and counters are kept by the one that decided. So
whoever is asked for them calls all. One that does not answer in time costs its share of the answer,
not the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from ray import serve

from kappa.metrics import ADDING

log = structlog.get_logger(__name__)

_TIMEOUT_S = 2.0

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Ingresses:
    """The ingresses of this application."""

    def __init__(self, replicas: int, method: str) -> None:
        """`replicas`: how many there are; `method`: of the ingress, which answers the others."""
        self._replicas, self._method = replicas, method
        self._handle: Any = None

    async def call(self, own: Callable[..., Awaitable[Any]], what: str, *args: Any) -> list[Any]:
        """Everybody's answer, this ingress' among them; `own(what, *args)` answers for it alone.

        Only its own if the others could not be reached within two seconds.
        """
        if self._replicas > 1:
            try:
                return await self._call_all(what, *args)
            except Exception as error:
                log.warning("ingresses_unreachable", error=repr(error), what=what)
        return [await own(what, *args)]

    async def _call_all(self, what: str, *args: Any) -> list[Any]:
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        response = self._handle.broadcast(self._method, what, *args)
        answers = await response.results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
        lost = [answer for answer in answers if isinstance(answer, BaseException)]
        if lost:
            log.warning("ingresses_silent", count=len(lost), error=repr(lost[0]), what=what)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not found:
            raise RuntimeError("no ingress answered")
        return found


class _Merged(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(expositions: Iterable[bytes]) -> bytes:
    """Prometheus texts as one, in the order in which metrics were first seen.

    What each ingress counts of its own requests adds up (`kappa.metrics.ADDING`). What all receive
    from the same workers is the same in each, but for one that came later: there the greatest
    counts.

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
            _merge(values.setdefault(known.name, {}), family, adds=family.name in ADDING)
    for name, family in families.items():
        family.samples = [
            Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()
        ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(list(families.values())))
    return generate_latest(registry)


def _merge(into: dict[_Key, float], family: Metric, *, adds: bool) -> None:
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
