"""All that wait in an engine: a queue for each tenant, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from scheduler.accounts import Accounts
from scheduler.config import FairConfig
from scheduler.queue import TenantQueue
from scheduler.work import Work

# Tiers: tenants whose turn it is, those who had more, and those who had so much more that they get
# nothing while one whose turn it is lacks blocks.
IN_TURN, AHEAD, FAR_AHEAD = range(3)


class Waiting:
    """Tenants' queues; tells the accounts who has something waiting.

    Args:
        config: of the rule.
        accounts: what each tenant was given.
    """

    def __init__(self, config: FairConfig, accounts: Accounts) -> None:
        self._config = config
        self._accounts = accounts
        self._queues: dict[str, TenantQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        """Requests that wait."""
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
        """Waiting requests in turn, with their tier: whose turn it is, who is ahead, or far ahead.

        A tenant's key is its service, less the credit that the first in its queue has earned (until
        that is due), plus what those before this one in its queue will cost. Far ahead is a tenant
        whose key exceeds the least by more than the slack and the most that waiting can earn.
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
            tier = FAR_AHEAD if tenant in far_ahead else IN_TURN if key <= limit else AHEAD
            yield work, tier
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
