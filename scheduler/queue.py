"""One tenant's waiting requests, first come, first served; any may leave from the middle."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import merge

from scheduler.work import Work


def _by_seq(work: Work) -> int:
    return work.seq


class TenantQueue:
    """In order of arrival; those that ran before and wait again stand in front."""

    __slots__ = ("_again", "_back", "_first")

    def __init__(self) -> None:
        self._again: list[Work] = []
        self._back: list[Work] = []
        self._first: dict[Work, None] = {}

    def __len__(self) -> int:
        return len(self._again) + len(self._back) + len(self._first)

    def __iter__(self) -> Iterator[Work]:
        yield from self._again
        if self._back:
            yield from merge(self._back, self._first, key=_by_seq)
        else:
            yield from self._first

    def append(self, work: Work) -> None:
        """The newest."""
        self._first[work] = None

    def restore(self, work: Work) -> None:
        """It ran and waits again: in front of all that never did, oldest first."""
        insort(self._again, work, key=_by_seq)

    def put_back(self, work: Work) -> None:
        """It was to be admitted and was not: where it was, among those that never ran."""
        insort(self._back, work, key=_by_seq)

    def remove(self, work: Work) -> None:
        """It waits no more.

        Raises:
            KeyError: it did not wait here.
        """
        if work in self._first:
            del self._first[work]
        elif work in self._again:
            self._again.remove(work)
        elif work in self._back:
            self._back.remove(work)
        else:
            raise KeyError(work)
