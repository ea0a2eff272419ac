"""What the router is asked and what it answers: a request, a decision, and why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kappa.hardware import NodeProfile
from router.index.prefix_hash import UInt64s
from router.offers import Candidate, Offers
from router.policy import Fetch


class NoWorkerError(Exception):
    """No worker can take the request now."""


class OverloadedError(NoWorkerError):
    """The request would miss its objective; `retry_after_s` is when to come again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MismatchError(ValueError):
    """A worker announced another model, block size or fingerprint than the pool's."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router sees it.

    token_ids: the prompt (None when it could not be tokenized: routing then fails open);
    salt: isolation of the tenant's cache; exclude: workers that must not be chosen. retry: it was
    let in before, and its worker failed it.
    prefix_hashes, prompt_tokens: instead of token_ids, from callers that have hashes already;
    prompt_tokens alone is the most that a prompt which could not be tokenized comes to.
    session: what the client calls its conversation, for policies that stick to it.
    handed_tokens: of the prompt, computed already and on their way to whichever worker is chosen.
    """

    request_id: str
    token_ids: np.ndarray | None = None
    max_tokens: int = 0
    salt: int = 0
    exclude: frozenset[str] = frozenset()
    prefix_hashes: UInt64s | None = None
    prompt_tokens: int = 0
    session: str = ""
    retry: bool = False
    handed_tokens: int = 0

    @property
    def informed(self) -> bool:
        """Whether anything is known of the prompt."""
        return self.token_ids is not None or self.prefix_hashes is not None

    @property
    def sized(self) -> bool:
        """Whether the length of the prompt is known or bounded, so that it can be priced."""
        return self.informed or self.prompt_tokens > 0

    @property
    def tokens(self) -> int:
        """Length of the prompt; an engine computes at least one token."""
        if self.token_ids is not None:
            return max(len(self.token_ids), 1)
        return max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, why, and what is expected of it; seconds are real ones.

    offers: what all workers were priced at (None in logs); fetch: what to bring there first.
    """

    request_id: str
    chosen: Candidate
    reason: str
    policy: str
    prompt_tokens: int
    informed: bool
    offers: Offers | None = field(default=None, compare=False, repr=False)
    profiles: tuple[NodeProfile, ...] = field(default=(), compare=False, repr=False)
    fetch: Fetch | None = None

    @property
    def worker(self) -> str:
        """The chosen worker."""
        return self.chosen.worker

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every worker that could have been chosen, priced; none in a log."""
        if self.offers is None:
            return ()
        return tuple(self.offers.candidate(i, profile) for i, profile in enumerate(self.profiles))

    @property
    def kind(self) -> str:
        """What the predicted TTFT is mostly made of: queue, load, compute or device."""
        chosen = self.chosen
        if chosen.queue_s > max(chosen.load_s, chosen.compute_s):
            return "queue"
        if chosen.counts.cached_tokens and chosen.load_s > chosen.compute_s:
            return "load"
        if chosen.counts.device_tokens > chosen.counts.new_tokens:
            return "device"
        return "compute"


def without_candidates(decision: Decision) -> Decision:
    """A copy that keeps only the choice, for logs."""
    return replace(decision, offers=None, profiles=())
