"""The requests that other ingresses sent: reserved here, too, as their workers report them.

Several ingresses decide over the same workers, and each would send the next request to the worker
that looks idle to it. So every worker tells all of them what arrived and what left; what an ingress
did not send itself it reserves as if it had. The worker is the truth: now and then it tells all
that is in flight there, and what is not among that is dropped. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from kappa.protocol import Arrival, WorkerReport

Reserve = Callable[[str, Arrival, float], None]
Finish = Callable[[str, str, float], None]


class OtherRequests:
    """Which requests of others are reserved, and where."""

    def __init__(self, mine: Container[str], reserve: Reserve, finish: Finish) -> None:
        """`mine`: ids of this ingress' own; `reserve(worker, arrival, now_s)` and
        `finish(request_id, worker, now_s)` act on the router's state."""
        self._mine, self._reserve, self._finish = mine, reserve, finish
        self._where: dict[str, str] = {}
        self._by_worker: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def on(self, worker: str) -> int:
        """How many are on one worker."""
        return len(self._by_worker.get(worker, ()))

    def arrived(self, report: WorkerReport, now_s: float) -> None:
        """What the report says came; before its admissions are looked at, which correct it."""
        self._add(report.worker, report.arrived, now_s)

    def left(self, report: WorkerReport, now_s: float) -> None:
        """What the report says went, and who is missing or new where it tells all."""
        for request_id in report.finished:
            if self._where.get(request_id) == report.worker:
                self.drop(request_id, now_s)
        if report.in_flight is None:
            return
        there = {arrival.request_id for arrival in report.in_flight}
        for request_id in self._by_worker.get(report.worker, set()) - there:
            self.drop(request_id, now_s)
        self._add(report.worker, report.in_flight, now_s)

    def void(self, worker: str, now_s: float) -> None:
        """What is known of the worker's requests is void; those still there will be told anew."""
        for request_id in list(self._by_worker.get(worker, ())):
            self.drop(request_id, now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        """A request is no longer another's; one that is not known is let be."""
        worker = self._where.pop(request_id, None)
        if worker is None:
            return
        known = self._by_worker[worker]
        known.discard(request_id)
        if not known:
            del self._by_worker[worker]
        self._finish(request_id, worker, now_s)

    def _add(self, worker: str, arrivals: Iterable[Arrival], now_s: float) -> None:
        for arrival in arrivals:
            # A client may use one id twice; the second is then not seen, and nothing is confused.
            if arrival.request_id not in self._where and arrival.request_id not in self._mine:
                self._where[arrival.request_id] = worker
                self._by_worker.setdefault(worker, set()).add(arrival.request_id)
                self._reserve(worker, arrival, now_s)
