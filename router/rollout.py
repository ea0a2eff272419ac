"""How far our routing is trusted with real traffic: not at all, watching, a share, all of it. Pure.

`ray`: Ray Serve's own router decides, ours does not. `shadow`: ours decides and writes down
what it would have done, Ray's steers. `canary:N`: ours steers N percent of the conversations, Ray's
the rest, with ours as a shadow. `on`: ours steers. Consulted by the ingress for every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["ray", "shadow", "canary", "on"]
Arm = Literal["kappa", "ray"]

_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Rollout:
    """A mode, and the percentage of conversations that ours steers."""

    mode: Mode
    percent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Rollout:
        """Read `ray`, `shadow`, `canary:N` (0 < N < 100) or `on`; ValueError for anything else."""
        match text:
            case "ray" | "shadow":
                return cls(text)
            case "on":
                return cls("on", 100.0)
        name, _, share = text.partition(":")
        try:
            percent = float(share) if name == "canary" else -1.0
        except ValueError:
            percent = -1.0
        if not 0 < percent < 100:
            raise ValueError(
                f"mode {text!r}: give ray, shadow, canary:N with 0 < N < 100 (percent), or on"
            )
        return cls("canary", percent)

    @property
    def decides(self) -> bool:
        """Whether our policy decides at all, if only for the log."""
        return self.mode != "ray"

    def arm(self, conversation: str) -> Arm:
        """Who steers; the same for all requests of a conversation, whichever ingress it meets."""
        # A client may name it by half of a surrogate pair, which JSON can hold.
        named = conversation.encode(errors="surrogatepass")
        step = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) % _STEPS
        return "kappa" if step < self.percent / 100 * _STEPS else "ray"


@dataclass(frozen=True, slots=True)
class Unsteered:
    """A request that nobody here decided about: its pool was drawn, Ray's router does the rest."""

    request_id: str
    pool: str
    worker: str = ""


@dataclass(frozen=True, slots=True)
class ShadowDecision:
    """What ours would have done with a request that Ray's router steered; real seconds.

    chosen_node, predicted_ttft_s: ours. ray_node, ray_predicted_ttft_s: what became of it, priced
    by the same forecast at the same moment.
    """

    chosen_worker: str
    chosen_node: str
    reason: str
    predicted_ttft_s: float
    ray_worker: str
    ray_node: str
    ray_predicted_ttft_s: float

    @property
    def agreed(self) -> bool:
        """Whether both chose the same worker."""
        return self.chosen_worker == self.ray_worker

    @property
    def saving_s(self) -> float:
        """Predicted TTFT that ours would have saved."""
        return self.ray_predicted_ttft_s - self.predicted_ttft_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with what follows from it."""
        return {**asdict(self), "agreed": self.agreed, "saving_s": self.saving_s}


def ray_choice(workers: Sequence[str], in_flight: Callable[[str], int], request_id: str) -> str:
    """Where Ray Serve's rule sends a request: of two workers drawn at random, to the one with fewer
    requests in flight.

    Over all workers of all pools, where Ray's own router sees those of one pool. The draw is made
    from the request's id, so that it can be repeated. ValueError without workers.
    """
    if not workers:
        raise ValueError("no workers to draw from")
    digest = hashlib.blake2b(request_id.encode(), digest_size=16, person=b"ray choice").digest()
    first = int.from_bytes(digest[:8]) % len(workers)
    if len(workers) == 1:
        return workers[0]
    second = int.from_bytes(digest[8:]) % (len(workers) - 1)
    second += second >= first
    return min(workers[first], workers[second], key=in_flight)
