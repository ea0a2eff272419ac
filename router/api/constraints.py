"""What a request is held to: its tenant's cache, its deadline, and the workers that can serve it.

What can never be served is refused before it is queued: a scheduler that packs by VRAM promises
that every request is served only for those that fit. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kappa.protocol import Announcement
from router.api.auth import Tenant
from router.api.errors import (
    ApiError,
    context_too_long,
    deadline_passed,
    deadline_unmeetable,
    footprint_too_large,
)
from router.decision import Estimates

DEADLINE_HEADER = "x-kappa-deadline-ms"
APPROX_HEADER = "x-kappa-approx"
_LONGEST_DEADLINE_MS = 24 * 3600 * 1000
_APPROX_VALUES = {"ok": True, "no": False, "": None}


def cache_salt(tenant: Tenant, own: str | None) -> str | None:
    """The salt of a request of `tenant` that asked for the salt `own`; None: there is none.

    An engine that reuses another tenant's prefix answers sooner, and by that tells what the other
    asked. So the tenant's name goes into the salt of every prefix hash, the engine's and the
    router's alike; a client's own salt divides its tenant's cache further and can never leave it.
    The salt is the same at every start and every ingress, so that caches which outlive them stay of
    use. Whoever knows it gains nothing: what a client sends is hashed in, never taken for the
    result.
    """
    if not tenant.own_cache:
        return own or None
    name, given = tenant.name.encode(), (own or "").encode(errors="surrogatepass")
    # The length keeps apart tenant and salt, wherever one ends and the other begins.
    data = len(name).to_bytes(4, "little") + name + given
    return hashlib.blake2b(data, digest_size=16, person=b"kappa-tenant").hexdigest()


# -- deadlines --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadline:
    """By when an answer must have begun: the first token of a streamed one, all of another.

    In seconds of the clock that `arrived_s` was read from. What is predicted to miss it is refused
    at once; what has missed it while it waited, here or in an engine's queue, is dropped.
    """

    arrived_s: float
    allowed_s: float

    @property
    def at_s(self) -> float:
        return self.arrived_s + self.allowed_s

    def check(self, now_s: float) -> None:
        """Raises ApiError 504 once it has passed."""
        if now_s >= self.at_s:
            raise deadline_passed(self.allowed_s)


def deadline_of(header: str, arrived_s: float) -> Deadline | None:
    """The deadline that a request's header asks for; None without one.

    Raises:
        ApiError: 400, it is no whole number of milliseconds above 0, or more than a day.
    """
    text = header.strip()
    if not text:
        return None
    readable = text.isascii() and text.isdigit() and len(text) < 12
    if not readable or not 1 <= int(text) <= _LONGEST_DEADLINE_MS:
        raise ApiError(
            400, f"{DEADLINE_HEADER}: give whole milliseconds from 1 to {_LONGEST_DEADLINE_MS}.",
            code="invalid_value", param=DEADLINE_HEADER,
        )  # fmt: skip
    return Deadline(arrived_s, int(text) / 1000)


def late_workers(
    deadline: Deadline, estimates: Estimates, now_s: float, *, streamed: bool
) -> frozenset[str]:
    """The workers that would answer too late, none if all make it.

    An answer that is not streamed is there with its last token: as many as are expected, at the
    worker's predicted pace.

    Raises:
        ApiError: 429 with the seconds that the soonest one lacks, if that is all of them.
    """
    needed_s = estimates.ttft_s
    if not streamed:
        needed_s = needed_s + estimates.expected_output_tokens * estimates.tpot_s
    late = needed_s > deadline.at_s - now_s
    if late.all():
        soonest_s = float(needed_s.min())
        raise deadline_unmeetable(deadline.allowed_s, soonest_s, now_s + soonest_s - deadline.at_s)
    return frozenset(estimates.workers[i] for i in np.flatnonzero(late))


# -- context and KV cache ---------------------------------------------------------------------


def unfit_workers(
    workers: Iterable[Announcement], prompt_tokens: int, max_tokens: int
) -> frozenset[str]:
    """Workers that could never hold the prompt and `max_tokens` more (at least one).

    Raises:
        ApiError: 400 with what it needs and what there is, if that is all of them.
    """
    known, generated = list(workers), max(max_tokens, 1)
    needed = prompt_tokens + generated
    unfit = frozenset(
        one.worker
        for one in known
        if needed > one.max_context_tokens or _blocks(one, needed) > _usable_blocks(one)
    )
    if not known or len(unfit) < len(known):
        return unfit
    context = max(one.max_context_tokens for one in known)
    if needed > context:
        raise context_too_long(prompt_tokens, max(max_tokens, 0), context)
    largest = max(known, key=lambda one: _usable_blocks(one) * one.block_tokens)
    raise footprint_too_large(
        prompt_tokens, max(max_tokens, 0), _blocks(largest, needed), _usable_blocks(largest)
    )


def _blocks(worker: Announcement, tokens: int) -> int:
    return -(-tokens // worker.block_tokens)


def _usable_blocks(worker: Announcement) -> int:
    # vLLM keeps one block that it never gives away.
    return worker.device_blocks - 1


# -- approximate answers ----------------------------------------------------------------------


def approx_allowed(header: str | None, field: object) -> bool | None:
    """Whether a client takes an approximate answer; None: it does not say.

    Args:
        header: of `x-kappa-approx`, which wins; None without one.
        field: "approx" of the body; None without one.

    Raises:
        ApiError: 400, it is neither ok nor no.
    """
    given = field if header is None else header
    value = "" if given is None else str(given).strip().lower()
    if value not in _APPROX_VALUES:
        raise ApiError(
            400, f"{APPROX_HEADER}: give 'ok' where the answer may be approximate, or 'no'.",
            code="invalid_value", param=APPROX_HEADER,
        )  # fmt: skip
    return _APPROX_VALUES[value]


def is_approximate(worker: Announcement, allowed: bool | None) -> bool:
    """Whether this worker is to answer a request approximately."""
    policy = worker.load_plan.get("approx", "never")
    return allowed is not False and (policy == "always" or (policy == "ask" and allowed is True))


def exact_workers(workers: Iterable[Announcement], allowed: bool | None) -> frozenset[str]:
    """Workers that a request which asks for an approximate answer is kept from.

    Raises:
        ApiError: 400, it asks and no worker may: rather than be answered exactly, at a cost that it
            did not ask for.
    """
    if not allowed:
        return frozenset()
    known = list(workers)
    exact = frozenset(one.worker for one in known if not is_approximate(one, allowed))
    if known and len(exact) == len(known):
        raise ApiError(
            400, f"{APPROX_HEADER}: no worker here gives approximate answers; leave it out, or "
            "serve with 'engine: {kind: torch, approx: ask}'.", code="approx_not_allowed",
            param=APPROX_HEADER,
        )  # fmt: skip
    return exact
