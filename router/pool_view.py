"""What is known of the workers together: who they are, what they hold, what a request costs there.

Joins the prefix index, the fleet, load plans, shared tiers and forecasts. Pure; `router.core` asks
it for offers and decides among them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Announcement, Arrival
from router import pricing
from router.decision import MismatchError, RouteRequest
from router.index.kv_events import KVEvent, WorkerGone, WorkerReset
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.jobs import Job
from router.load_plans import LoadPlans
from router.offers import Offers
from router.policy import least
from router.shared_tier import SharedTiers
from router.state import ClusterState

_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128


class Outputs:
    """Recent output lengths, to guess when a stream ends."""

    __slots__ = ("_latest", "_ordered", "typical")

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        self.typical = _DEFAULT_OUTPUT_TOKENS

    def add(self, tokens: int) -> None:
        """A stream ended after so many."""
        latest, ordered = self._latest, self._ordered
        if len(latest) == _OUTPUTS_KEPT:
            del ordered[bisect_left(ordered, latest.popleft())]
        latest.append(tokens)
        insort(ordered, tokens)
        # The median; here, once per request that ends, not at each guess.
        half = len(ordered) // 2
        self.typical = (ordered[half] + ordered[~half]) // 2

    def guess(self, max_tokens: int) -> int:
        """How many a request for at most `max_tokens` (0: no bound) will generate."""
        return max(1, min(self.typical, max_tokens) if max_tokens > 0 else self.typical)


class PoolView:
    """Workers of one kind of block, as far as they have told.

    forecast_workers: so many are forecast step by step at most (`RouterConfig`).
    """

    def __init__(
        self, secret: int, index_blocks: int, forecast_workers: int, state: ClusterState
    ) -> None:
        self._secret, self._index_blocks = secret, index_blocks
        self._forecast_workers = forecast_workers
        self.state = state
        self.plans = LoadPlans()
        self.shared_tiers = SharedTiers()
        self.index: PrefixIndex | None = None
        self.hasher: PrefixHasher | None = None
        self.outputs = Outputs()
        self.columns: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._fingerprint = ""
        # Compiled now rather than while the first request waits.
        pricing.leading_tokens(np.zeros((2, 0), dtype=np.int64), self.columns, self.columns, 0, 1)

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew.

        Raises:
            MismatchError: its blocks would not mean the same as the pool's.
        """
        if not self.state.workers:
            self._fingerprint = announcement.fingerprint
            if self.hasher is None or self.hasher.block_tokens != announcement.block_tokens:
                self.hasher = PrefixHasher(announcement.block_tokens, self._secret)
                self.index = PrefixIndex(self.hasher, self._index_blocks)
        pool_block_tokens = self.hasher.block_tokens if self.hasher is not None else 0
        if announcement.fingerprint != self._fingerprint:
            raise MismatchError(
                f"worker {announcement.worker} has fingerprint {announcement.fingerprint}, the "
                f"pool {self._fingerprint}: model, dtype, block size or chat template differ"
            )
        if announcement.block_tokens != pool_block_tokens:
            raise MismatchError(
                f"worker {announcement.worker} has blocks of {announcement.block_tokens} tokens, "
                f"the pool of {pool_block_tokens}: give the pool one block size"
            )
        self.plans.join(announcement)
        self.shared_tiers.join(announcement.worker, announcement.shared_tier)
        self.state.join(announcement, now_s)
        self._place(announcement.worker)

    def _place(self, worker: str) -> None:
        """Remember where the index answers for a worker's column of the fleet."""
        assert self.index is not None
        slot = self.state.fleet.slot(worker)
        if slot >= len(self.columns):
            more = np.zeros(slot + 1 - len(self.columns), dtype=np.intp)
            self.columns = np.concatenate([self.columns, more])
        self.columns[slot] = self.index.column(worker)

    def leave(self, worker: str) -> None:
        """A worker is gone, with all that it held."""
        self.state.leave(worker)
        self.plans.leave(worker)
        self.shared_tiers.leave(worker)
        if self.index is not None:
            self.index.handle(WorkerGone(worker))

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; of a worker that is gone, too late to say."""
        if self.index is not None:
            for event in events:
                if event.worker in self.state.workers:
                    self.index.handle(event)

    def void(self, worker: str) -> None:
        """Nothing that a worker told of its blocks is true any more."""
        if self.index is not None and worker in self.state.workers:
            self.index.handle(WorkerReset(worker))

    @property
    def forecasting(self) -> bool:
        """Whether engines are forecast step by step."""
        return len(self.state.workers) <= self._forecast_workers

    def reserve_other(self, worker: str, arrival: Arrival, now_s: float) -> None:
        """Put another ingress' request where it went, priced as if this router had sent it."""
        assert self.hasher is not None
        new = max(arrival.new_tokens, 1)
        offers = self.state.fleet.price(
            np.array([self.state.fleet.slot(worker)], dtype=np.intp),
            now_s,
            prompt_tokens=arrival.device_tokens + arrival.host_tokens + new,
            device_tokens=np.array([float(arrival.device_tokens)]),
            cached_tokens=np.array([float(arrival.host_tokens)]),
            output_tokens=self.outputs.guess(arrival.max_tokens),
            block_tokens=self.hasher.block_tokens,
        )
        if self.plans:
            self.plans.apply(offers)
        self.state.fleet.reserve(arrival.request_id, offers, 0)
        state = self.state.workers[worker]
        if self.forecasting:
            state.shadow.submit(self.job(arrival.request_id, offers, 0), now_s)
        if arrival.prefilled:
            self.state.prefilled(arrival.request_id, state, now_s)

    def offers(
        self, request: RouteRequest, slots: NDArray[np.intp], now_s: float, *, fetches: bool = False
    ) -> Offers:
        """The request priced on `slots`, by what the index says each of them holds.

        fetches: also with the longest prefix brought from its holder first.
        """
        assert self.hasher is not None and self.index is not None
        hashes = request.prefix_hashes
        if request.token_ids is not None:
            hashes = self.hasher.prefix_hashes(request.token_ids, request.salt)
        size, total = self.hasher.block_tokens, request.tokens
        if hashes is None or not len(hashes):
            device, cached = np.zeros(len(slots)), np.zeros(len(slots))
        else:
            # An engine computes at least the last token: a full hit gives its last block back.
            usable = (total - 1) // size
            held = self.index.match_columns(hashes)
            device, cached = pricing.leading_tokens(held, self.columns, slots, usable, size)
            if self.shared_tiers:
                names = [self.state.fleet.workers[slot] for slot in slots]
                self.shared_tiers.widen(names, device, cached)
        if request.handed_tokens:
            handed = float(min(request.handed_tokens, total - 1) // size * size)
            device = np.maximum(device, handed)
            cached = np.minimum(cached, (total - 1) // size * float(size) - device)
        price = partial(
            self.state.fleet.price,
            slots,
            now_s,
            prompt_tokens=total,
            device_tokens=device,
            output_tokens=self.outputs.guess(request.max_tokens),
            block_tokens=size,
            prefix_hashes=hashes,
            session=request.session,
        )
        offers = price(cached_tokens=cached)
        if fetches:
            leading = device + cached
            holder = least(-leading, offers.net_backlog_s)
            if leading[holder]:
                everywhere = leading[holder] - device
                offers.fetching = price(
                    cached_tokens=everywhere,
                    fetch_tokens=everywhere - cached,
                    fetch_from=offers.workers[holder],
                )
        if self.plans:
            self.plans.apply(offers)
        return offers

    def forecast(self, offers: Offers) -> None:
        """Replace the arithmetic of queues by each engine's forecast."""
        now_s = offers.now_s
        for row, worker in enumerate(offers.workers):
            shadow = self.state.workers[worker].shadow
            job = self.job("", offers, row)
            ready_s = shadow.first_token_s(job, now_s) + float(offers.fixed_s[row]) / 2
            plan = offers.plans.get(row)
            offers.ttft_s[row] = ready_s - now_s - (plan.hidden_s if plan else 0.0)
            offers.harm_s[row] = shadow.decode_delay_s(job.new_tokens, job.context_tokens)
            link_s, gpu_s = shadow.backlog_s(now_s)
            offers.link_backlog_s[row], offers.gpu_backlog_s[row] = link_s, gpu_s

    def job(self, request_id: str, offers: Offers, row: int) -> Job:
        """What a request would be to the engine of row `row`."""
        # Half of what a request costs besides the engine is spent before it reaches it.
        arrival_s = offers.now_s + float(offers.fixed_s[row]) / 2
        cached, new = int(offers.cached_tokens[row]), int(offers.new_tokens[row])
        plan = offers.plans.get(row)
        if plan is not None:
            loaded = plan.crossing_tokens
            cached, new = loaded, new + cached - loaded
        return Job(
            request_id=request_id,
            arrival_s=arrival_s,
            host_tokens=cached,
            context_tokens=int(offers.device_tokens[row]) + cached,
            new_tokens=new,
            output_tokens=offers.expected_output_tokens,
        )
