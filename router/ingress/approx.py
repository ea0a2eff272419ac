"""Approximate answers: who asked for one, and which workers may give one. Pure.

A client says `x-kappa-approx: ok` (or "approx": "ok" in the body) or "no"; a worker announces
whether it gives approximate answers to those who ask, to all, or to nobody. Where no worker may, a
request that asks is refused, rather than answered exactly at a cost that it did not ask for.
"""

from __future__ import annotations

from collections.abc import Iterable

from kappa.protocol import Announcement
from router.errors import ApiError

HEADER = "x-kappa-approx"
_WORDS = {"ok": True, "no": False, "": None}


def approx_asked(header: str | None, field: object) -> bool | None:
    """What a request says: True, approximate is fine; False, it is not; None, nothing.

    Args:
        header: of `x-kappa-approx`, which wins; None without one.
        field: "approx" of the body; None without one.

    Raises:
        ApiError: 400, another word.
    """
    said = field if header is None else header
    word = "" if said is None else str(said).strip().lower()
    if word not in _WORDS:
        raise ApiError(
            400, f"{HEADER}: give 'ok' where the answer may be approximate, or 'no'.",
            code="invalid_value", param=HEADER,
        )  # fmt: skip
    return _WORDS[word]


def is_approximate(said: Announcement, asked: bool | None) -> bool:
    """Whether this worker is to answer a request approximately."""
    policy = said.load_plan.get("approx", "never")
    return asked is not False and (policy == "always" or (policy == "ask" and asked is True))


def exact_workers(workers: Iterable[Announcement], asked: bool | None) -> frozenset[str]:
    """Workers that a request which asks for an approximate answer is kept from.

    Raises:
        ApiError: 400, it asks and no worker may.
    """
    if not asked:
        return frozenset()
    there = list(workers)
    exact = frozenset(one.worker for one in there if not is_approximate(one, asked))
    if there and len(exact) == len(there):
        raise ApiError(
            400, f"{HEADER}: no worker here gives approximate answers; leave it out, or serve with "
            "'engine: {kind: torch, approx: ask}'.", code="approx_not_allowed", param=HEADER,
        )  # fmt: skip
    return exact
