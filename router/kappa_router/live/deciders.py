"""The common knowledge of all deciders. Ray sends a client to any of them, but decisions and
counters are kept by the one that decided: the one that is asked calls all. One that does not answer
in time costs its share of the answer, not the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from ray import serve

from kappa.metrics import ADDING

log = structlog.get_logger(__name__)

_TIMEOUT_S = 2.0


class Deciders:
    """The deciders of this application."""

    def __init__(self, replicas: int, method: str) -> None:
        """`replicas`: how many there are; `method`: of the decider, which answers the others."""
        self._replicas, self._method = replicas, method
        self._handle: Any = None

    async def call(self, own: Callable[..., Awaitable[Any]], what: str, *args: Any) -> list[Any]:
        """Everybody's answer, this decider's (`own(what, *args)`) among them; its alone if the
        others could not be reached within two seconds."""
        found: list[Any] = []
        if self._replicas > 1:
            try:
                if self._handle is None:
                    context = serve.get_replica_context()
                    self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
                response = self._handle.broadcast(self._method, what, *args)
                answers = await response.results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
                found = [a for a in answers if not isinstance(a, BaseException)]
                lost = [repr(a) for a in answers if isinstance(a, BaseException)]
                if lost or not found:
                    log.warning("deciders_silent", count=len(lost), errors=lost[:1], what=what)
            except Exception as error:
                log.warning("deciders_unreachable", error=repr(error), what=what)
        return found or [await own(what, *args)]


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(expositions: Iterable[bytes]) -> bytes:
    """Prometheus texts as one, in the order in which metrics were first seen. What each decider
    counts of its own requests adds up (`kappa.metrics.ADDING`); of what all receive from the same
    workers the greatest counts: some came later. ValueError: one of them is no such text."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for text in expositions:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                key = family.name, sample.name, tuple(sorted(sample.labels.items()))
                known = values.get(key, sample.value)
                if key in values and family.name in ADDING and not _is_time(sample.name):
                    values[key] = known + sample.value
                else:
                    values[key] = (min if _is_time(sample.name) else max)(known, sample.value)
    for (family_name, sample_name, labels), value in values.items():
        families[family_name].add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families.values()))
    return generate_latest(registry)


def _is_time(sample: str) -> bool:
    return sample.endswith("_created")
