"""All that wait in an engine: a queue for each tenant, and which tenant goes first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import attrgetter

from scheduler.accounts import Accounts
from scheduler.config import FairConfig
from scheduler.work import Work

# Tiers of tenants: first in turn; those that had more; those that had so much more that they get
# nothing while one that is in turn lacks blocks.
IN_TURN, AHEAD, FAR_AHEAD = range(3)
_BY_ARRIVAL = attrgetter("seq")


class TenantQueue:
    """One tenant's requests in order of arrival; those that ran before stand in front."""

    __slots__ = ("_fresh", "_preempted")

    def __init__(self) -> None:
        self._preempted: list[Work] = []
        self._fresh: list[Work] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Work]:
        return chain(self._preempted, self._fresh)

    def append(self, work: Work) -> None:
        """The newest."""
        self._fresh.append(work)

    def restore(self, work: Work) -> None:
        """It ran and waits again."""
        insort(self._preempted, work, key=_BY_ARRIVAL)

    def put_back(self, work: Work) -> None:
        """It was to be admitted and was not: where it was, among those that never ran."""
        insort(self._fresh, work, key=_BY_ARRIVAL)

    def remove(self, work: Work) -> None:
        """It waits no more.

        Raises:
            KeyError: it did not wait here.
        """
        for works in (self._fresh, self._preempted):
            at = bisect_left(works, work.seq, key=_BY_ARRIVAL)
            if at < len(works) and works[at] is work:
                del works[at]
                return
        raise KeyError(work)


class Waiting:
    """Tenants' queues; keeps `accounts` informed of who has something waiting."""

    def __init__(self, config: FairConfig, accounts: Accounts) -> None:
        self._config = config
        self._accounts = accounts
        self._queues: dict[str, TenantQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> int:
        """Tenants that have something waiting."""
        return len(self._queues)

    def append(self, work: Work) -> None:
        """The newest of its tenant."""
        self._enter(work).append(work)

    def restore(self, work: Work) -> None:
        """It ran and waits again."""
        self._enter(work).restore(work)

    def put_back(self, work: Work) -> None:
        """It was to be admitted and was not."""
        self._enter(work).put_back(work)

    def remove(self, work: Work) -> None:
        """It waits no more.

        Raises:
            KeyError: it did not wait.
        """
        queue = self._queues[work.tenant]
        queue.remove(work)
        if not queue:
            del self._queues[work.tenant]
        self._accounts.left(work.tenant)
        self._count -= 1

    def in_turn(self, now_s: float) -> Iterator[tuple[Work, int]]:
        """Waiting requests in turn with their tier, as many as the window holds.

        A tenant's key is its service, less the credit that the first in its queue has earned (until
        that is starving), plus what those before this one in its queue will cost. A tenant is far
        ahead whose key exceeds the least by more than the slack and the most that waiting earns.
        """
        left = self._config.window
        if len(self._queues) == 1:
            for work in next(iter(self._queues.values())):
                if not left:
                    return
                left -= 1
                yield work, IN_TURN
            return
        heads: list[tuple[float, int, str, Work, Iterator[Work]]] = []
        for tenant, queue in self._queues.items():
            waiting = iter(queue)
            work = next(waiting)
            heads.append((self._key(work, now_s), work.seq, tenant, work, waiting))
        heapify(heads)
        limit = heads[0][0] + self._config.slack_s
        far = limit + self._config.credit * self._config.due_after_s
        far_ahead = {tenant for key, _, tenant, _, _ in heads if key > far}
        while heads and left:
            key, _, tenant, work, waiting = heads[0]
            left -= 1
            yield work, FAR_AHEAD if tenant in far_ahead else IN_TURN if key <= limit else AHEAD
            following = next(waiting, None)
            if following is None:
                heappop(heads)
            else:
                key += self._accounts.mean_s(tenant)
                heapreplace(heads, (key, following.seq, tenant, following, waiting))

    def _key(self, work: Work, now_s: float) -> float:
        credit_s = self._config.credit * self._accounts.weight(work.tenant)
        # Bounded, or a tenant that floods the queue would gain by how long its own requests wait.
        waited_s = min(max(now_s - work.arrival_s, 0.0), self._config.due_after_s)
        return self._accounts.service_s(work.tenant) - credit_s * waited_s

    def _enter(self, work: Work) -> TenantQueue:
        self._accounts.came(work.tenant)
        self._count += 1
        queue = self._queues.get(work.tenant)
        if queue is None:
            queue = self._queues[work.tenant] = TenantQueue()
        return queue
