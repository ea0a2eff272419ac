"""Whether a prompt is better computed by a prefill worker, and handed over. Pure.

A memory-bound prompt stays where its KV is: what would be computed elsewhere is little, and all of
its cached prefix would have to cross a network. A compute-bound one may go to a prefill worker if
its first token then comes sooner, the transfer of its KV included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kappa.protocol import Announcement
from router.decision import Candidate

PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between prefill and decode workers, as the settings say; seconds are emulated ones
    on paced workers."""

    bytes_per_s: float
    fixed_s: float
    min_new_tokens: int

    def seconds(self, tokens: int, to: Announcement) -> float:
        """Real seconds to hand over so many tokens' KV to that worker."""
        bytes_s = tokens * to.kv_bytes_per_token / self.bytes_per_s
        return to.node.dilation * (self.fixed_s + bytes_s)


def prefill_only(workers: Iterable[Announcement]) -> frozenset[str]:
    """Workers that compute prompts for others and never decode."""
    return frozenset(said.worker for said in workers if said.role == PREFILL)


def hands_over(here: Candidate, there: Candidate, transfer_s: float, network: Network) -> bool:
    """Whether `there` should compute the prompt and hand it to `here`.

    Args:
        here: the best worker that decodes, as if it computed the prompt itself.
        there: the best prefill worker.
        transfer_s: seconds to hand the prompt's KV over.
    """
    if here.bound != "compute" or here.counts.new_tokens < network.min_new_tokens:
        return False
    return there.ttft_s + transfer_s < here.ttft_s
