"""The interface of a decoder that answers approximately, in slots beside the engine's blocks.

A request that allows it (`EngineRequest.approx`) is computed in a slot, from its start or from its
second token on (`Sequence.slot`). `kappa_engine.sparse` has such a decoder; the caller that builds
an engine plugs it in. An engine without one computes every request exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kappa_engine.block_manager import BlockManager
from kappa_engine.host_store import HostStore
from kappa_engine.sequence import Sequence
from kappa_scheduler.work import Memory


@dataclass(slots=True)
class SlotPass:
    """Results of one iteration's chunks of requests in slots."""

    # Of each request's last token.
    logits: dict[Sequence, Tensor] = field(default_factory=dict)
    # Requests that cannot go on in their slot; some have logits all the same.
    lost: list[Sequence] = field(default_factory=list)
    # By request that got its prefix with this pass: seconds of the link.
    begun: dict[Sequence, float] = field(default_factory=dict)


class ApproximateDecoder(Memory, Protocol):
    """Computes the requests that have one of its slots, and says which get one.

    It is the memory that the engine's scheduler sees: the engine's blocks, or for some requests a
    slot instead.
    """

    @property
    def planner(self) -> str:
        """The name of the plan by which a request asks to begin in a slot."""

    def compute(self, chunks: Mapping[Sequence, tuple[int, int]]) -> SlotPass:
        """Compute positions [start, stop) of each request."""

    def promote(self, sequence: Sequence) -> bool:
        """Move a request that decodes on the device into a slot, if it gains by that."""

    def expel(self, sequence: Sequence) -> None:
        """Take a request's slot for good: it is computed exactly from now on."""

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a request that is over, or begins again; it may have none."""


MakeDecoder = Callable[[BlockManager, HostStore], ApproximateDecoder]
"""A decoder over the blocks of one engine."""
