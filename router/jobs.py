"""What a forecast works on: an engine's speed, and the requests that it serves, as jobs.

Made by the router's core from an announcement and a request, changed by `router.shadow` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa.cost import StepModel, transfer_s


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What the forecast needs of a worker: steps, link, budget and room, in real seconds.

    packs: as `kappa.protocol.Announcement`.
    """

    step: StepModel
    load_token_s: float
    load_fixed_s: float
    budget_tokens: int
    capacity_tokens: int
    packs: bool = False

    def load_s(self, tokens: int) -> float:
        """Real seconds of link time for `tokens` tokens; none costs nothing."""
        return transfer_s(tokens, self.load_token_s, self.load_fixed_s)


@dataclass(slots=True)
class Job:
    """One request as the forecast sees it.

    context_tokens: tokens in the cache before the next new one (device and host hits).
    new_tokens: prompt tokens still to compute. output_tokens: what it is expected to decode.
    The rest is the forecast's own: queued_s is when it was admitted, its load put on the link,
    loaded_s when that lands; prefilled_tokens are what it has computed of the prompt.
    """

    request_id: str
    arrival_s: float
    host_tokens: int
    context_tokens: int
    new_tokens: int
    output_tokens: int
    queued_s: float = 0.0
    loaded_s: float | None = None
    admitted: bool = False
    prefilled_tokens: int = 0
    decoded_tokens: int = 0

    @property
    def footprint_tokens(self) -> int:
        """Cache room it holds once admitted."""
        return self.context_tokens + self.new_tokens

    @property
    def decoding(self) -> bool:
        """Whether its prompt is done."""
        return self.new_tokens <= 0
