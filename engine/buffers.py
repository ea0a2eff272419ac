"""What a pass of `engine.forward` holds: steps under way, landing buffers, copies on their way out.

Two buffers take turns, so that an item's load runs while the one before is computed; what leaves
stays alive until its copy has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine import layers
from engine.step import Step
from engine.transfer import Event


@dataclass(slots=True)
class Running:
    """A step under way: hidden states, and the angles of its new and its projected tokens."""

    step: Step
    hidden: Tensor
    angles: layers.Angles = None
    act_angles: layers.Angles = None


@dataclass(slots=True)
class Buffer:
    """Where an item's rows meet.

    rows: shape (n, kv_width): loaded, projected, new.
    acts: loaded activations, as whole blocks.
    landing: the loaded rows' memory, as whole blocks.
    """

    rows: Tensor
    acts: Tensor
    landing: Tensor
    # The end of the computation that used it last.
    free: Event | None = None
    kv: Event | None = None
    act: Event | None = None


@dataclass(slots=True)
class Outgoing:
    """Copies to host of an item: their sources must stay until the event."""

    sources: list[Tensor] = field(default_factory=list)
    event: Event | None = None
