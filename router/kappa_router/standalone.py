"""Routing with nothing but history: the drop-in for a plain Ray Serve LLM app.

Stock replicas send no events, so prefixes are what was sent where (`router.sent_prompts`),
forgotten oldest first. A replica that announces its node (`workers.announcing`) is priced by that,
any other as one node of the catalogue.

Not every request is known to end: behind Ray's direct streaming Ray picks a replica, and hears no
more of the request. Such a one counts until its predicted end. A replica that announces how many
requests it has corrects that: where we counted more, those that should end first are over; where we
counted fewer, others sent the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kappa.hardware import node_profile
from kappa.protocol import ANNOUNCEMENT_KEY, LOAD_KEY, Announcement, Arrival, WorkerReport
from kappa.shapes import model_shape
from kappa_router.config import RouterConfig
from kappa_router.decision import Decision, NoWorkerError, RouteRequest
from kappa_router.index.prefix_hash import secret_from_seed
from kappa_router.policy import policy_named
from kappa_router.router import Router
from kappa_router.sent_prompts import BLOCK_TOKENS, CacheSize, announcement_of, prompt_tokens

_INDEX_BLOCKS = 200_000
# Of a request that Ray will say the end of, if that gets lost.
_LOST_S = 600.0
# Of any other: a multiple of its predicted seconds, within these bounds.
_LATE_FACTOR, _LEAST_S, _MOST_S = 2.0, 1.0, 120.0
# A count that is older says nothing of others any more.
_COUNT_HOLDS_S = 60.0
# The most requests of others that are counted: a replica's statistics may say anything.
_MOST_OTHERS = 1024
_LONGEST_OUTPUT = 1 << 20


@dataclass(slots=True)
class _Sent:
    """A request that is taken to run on `worker` until `end_s`; by the wall clock."""

    worker: str
    sent_s: float
    end_s: float


@dataclass(slots=True)
class _Seen:
    """A replica: its last announcement, when it last counted its requests, and the fault of its
    statistics, if there is one."""

    announced: Mapping[str, Any] = field(default_factory=dict)
    counted_s: float = 0.0
    problem: str = ""


class StandaloneRouter:
    """Ranks replicas for Ray's router; safe to call from one thread and read from another.

    Prices are those of the catalogue's `node` and `model` where a replica does not announce its
    own; ValueError names an unknown one.
    """

    def __init__(
        self, node: str = "h100-pcie5", model: str = "llama-3.1-8b", policy: str = "ttft"
    ) -> None:
        shape = model_shape(model)
        self._unannounced = announcement_of("", shape.name, node_profile(node), shape, CacheSize())
        self._router = Router(
            RouterConfig(
                policy=policy_named(policy),
                secret=secret_from_seed(f"standalone {id(self)}"),
                index_blocks=_INDEX_BLOCKS,
                stale_after_s=float("inf"),
                calibrate=False,
            )
        )
        self._seen: dict[str, _Seen] = {}
        self._sent: dict[str, _Sent] = {}
        # Tokens that a request of ours leaves to compute, on average.
        self._new_tokens = 1.0
        self._lock = threading.Lock()

    def replicas(self, statistics: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """These are the replicas now, with their routing statistics; returns what of these cannot
        be used, and why, once."""
        with self._lock:
            now_s, problems = time.time(), []
            for worker in sorted(set(self._seen) - set(statistics)):
                self._router.leave(worker)
                del self._seen[worker]
            self._sent = {r: sent for r, sent in self._sent.items() if sent.worker in statistics}
            for worker in sorted(statistics):
                if worker not in self._seen:
                    self._seen[worker] = _Seen()
                    self._router.join(replace(self._unannounced, worker=worker), now_s)
                seen, problem = self._seen[worker], ""
                try:
                    self._announced(worker, statistics[worker].get(ANNOUNCEMENT_KEY), now_s)
                    self._count(worker, statistics[worker].get(LOAD_KEY), now_s)
                except (ValueError, TypeError, AttributeError) as error:
                    problem = f"the routing statistics of replica {worker} are of no use: {error}"
                if problem and problem != seen.problem:
                    problems.append(problem)
                seen.problem = problem
            return problems

    def rank(self, names: Sequence[str], args: Sequence[Any], request_id: str) -> list[str]:
        """`names` in order of preference; the request is reserved on the first one until `done`, or
        until it should be over."""
        with self._lock:
            now_s = time.time()
            self._expire(now_s)
            body = _body_of(args)
            exclude = frozenset(self._router.workers) - set(names)
            request = RouteRequest(
                request_id, prompt_tokens(body), _most_tokens(body), exclude=exclude
            )
            try:
                decision = self._router.route(request, now_s)
            except NoWorkerError:
                self._sent.pop(request_id, None)
                return list(names)
            self._sent[request_id] = _Sent(decision.worker, now_s, now_s + _lasts_s(decision))
            self._new_tokens += (decision.chosen.counts.new_tokens - self._new_tokens) / 16
            index = self._router.workers[decision.worker].model.index
            index.hold(decision.worker, "device", decision.priced.prefix_hashes)
            priced = sorted(decision.candidates, key=lambda c: c.ttft_s + c.tpot_impact_s)
            # Each once: the chosen one, the others by price, and those that are not known yet.
            order = dict.fromkeys([decision.worker, *(c.worker for c in priced), *names])
            return [worker for worker in order if worker in names]

    def routed(self, worker: str, args: Sequence[Any], request_id: str) -> None:
        """Ray sent a request to `worker`, which need not be the first one, and will say when it
        ends."""
        sent = self._sent.get(request_id)
        if sent is not None and sent.worker != worker:
            self.rank([worker], args, request_id)
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is not None:
                sent.end_s = sent.sent_s + _LOST_S

    def done(self, worker: str, request_id: str) -> None:
        """A request ended on `worker`; of one that was tried there in vain that says nothing."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is not None and sent.worker == worker:
                self._release(request_id, time.time())

    def _announced(self, worker: str, data: Mapping[str, Any] | None, now_s: float) -> None:
        if not data or data == self._seen[worker].announced:
            return
        said, known = Announcement.from_dict(data), replace(self._unannounced, worker=worker)
        blocks = said.device_blocks * said.block_tokens // BLOCK_TOKENS
        known = replace(
            known, node=said.node, step=said.step, kv_bytes_per_token=said.kv_bytes_per_token,
            device_blocks=blocks or known.device_blocks, max_sequences=said.max_sequences,
            max_batch_tokens=said.max_batch_tokens or known.max_batch_tokens,
        )  # fmt: skip
        self._router.join(known, now_s)
        self._seen[worker].announced = data

    def _count(self, worker: str, load: Mapping[str, Any] | None, now_s: float) -> None:
        """A replica counted its requests. Ours that were sent later are not among them. What goes
        beyond ours was sent by others, and is taken to be like ours."""
        if not load:
            return
        report = WorkerReport.from_dict({**load, "worker": worker})
        seen, count = self._seen[worker], report.running + report.waiting
        if report.time_s <= seen.counted_s:
            return
        seen.counted_s = report.time_s
        ours = sorted(
            (sent.end_s, request_id)
            for request_id, sent in self._sent.items()
            if sent.worker == worker and sent.sent_s <= report.time_s
        )
        for _, request_id in ours[: max(len(ours) - count, 0)]:
            self._release(request_id, now_s)
        self._others(worker, min(max(count - len(ours), 0), _MOST_OTHERS), now_s)

    def _others(self, worker: str, count: int, now_s: float) -> None:
        tokens = max(round(self._new_tokens), 1)
        arrivals = [Arrival(f"{worker} other {i}", new_tokens=tokens) for i in range(count)]
        self._router.report(WorkerReport(worker, now_s, in_flight=tuple(arrivals)), now_s)

    def _expire(self, now_s: float) -> None:
        for old in [r for r, sent in self._sent.items() if now_s > sent.end_s]:
            self._release(old, now_s)
        for worker, seen in self._seen.items():
            if seen.counted_s and now_s - seen.counted_s > _COUNT_HOLDS_S:
                seen.counted_s = 0.0
                self._others(worker, 0, now_s)

    def _release(self, request_id: str, now_s: float) -> None:
        self._sent.pop(request_id, None)
        self._router.release(request_id, now_s, complete=False)


def _lasts_s(decision: Decision) -> float:
    """Seconds for which a request counts unless its end is known."""
    priced = decision.priced
    row = priced.row(decision.index)
    predicted_s = row.ttft_s + row.tpot_s * priced.expected_output_tokens
    return min(max(_LEAST_S, _LATE_FACTOR * predicted_s), _MOST_S)


def _body_of(args: Sequence[Any]) -> dict[str, Any]:
    """The parsed body that Ray passes, as far as its prompt and the length of its answer go."""
    body = args[0] if args else None
    names = ("messages", "tools", "prompt", "max_completion_tokens", "max_tokens")
    parts = {name: getattr(body, name, None) for name in names}
    return {name: _plain(value) for name, value in parts.items() if value is not None}


def _most_tokens(body: Mapping[str, Any]) -> int:
    """The client's bound on the answer; 0: none, or no number."""
    given = body.get("max_completion_tokens", body.get("max_tokens"))
    return min(given, _LONGEST_OUTPUT) if type(given) is int and given > 0 else 0


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [one.model_dump() if hasattr(one, "model_dump") else one for one in value]
    return value
