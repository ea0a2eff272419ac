"""What an engine gives and tells: outputs to whoever asked, events to whoever observes.

`Output` is what a request got in one iteration; an `Observer` is told of admissions and iterations
on the engine's thread (`workers.torch_engine.reports` is one). Made by `engine.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.sequence import Account, FinishReason, Sequence

if TYPE_CHECKING:
    # The loop makes what is told here.
    from engine.loop import Engine


class Output(NamedTuple):
    """What a request got in an iteration: at most one token; if it ended, why, and its account."""

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    account: Account | None = None


class Observer(Protocol):
    """Told what the engine does, on its thread; must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks; its account says what was found, its `load` what comes."""
        ...

    def iterated(
        self, engine: Engine, seconds: float, tokens: int, prefilled: Run[Sequence]
    ) -> None:
        """An iteration of so many tokens ended, and with it the prompts of `prefilled`."""
        ...
