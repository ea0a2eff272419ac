"""The order of a pass's copies and computation, as a device that does both at once needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kappa.plans.load_plan import layout
from kappa_engine.forward import Forward
from kappa_engine.step import prompt_row
from kappa_engine.transfer import Copies, CpuMover, Direction, Event, TransferFailed
from tests.engine.rig import Rig, prompt, rig


class Noting(CpuMover):
    """Numbers each computation, and notes what each copy to the device was told to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Event] = []
        self.waited: list[int] = []

    def mark(self) -> Event:
        self.marks.append(super().mark())
        return self.marks[-1]

    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event:
        if direction == "h2d":
            found = [i for i, mark in enumerate(self.marks) if mark is after]
            self.waited.append(found[0] if found else -1)
        return super()._start(direction, copies, after)


@contextmanager
def noting() -> Iterator[tuple[Rig, Noting]]:
    with rig("llama") as r:
        mover = Noting()
        r.forward = Forward(r.forward.weights, r.arena, mover)
        try:
            yield r, mover
        finally:
            mover.stop(20)


def test_load_waits_for_its_buffer_after_a_pass_without_loads() -> None:
    with noting() as (r, mover):
        tokens = prompt(29)
        pages = r.stored(tokens, 24)
        # Computes in the same buffers, loads nothing, stores nothing.
        r.forward.compute([prompt_row(prompt(60, 1), r.pages(60, ("kv", "device")))])
        used = len(mover.marks) - 1
        mover.waited.clear()
        got = r.forward.compute([prompt_row(tokens, pages, layout(24, activations=8))])
        assert r.agrees(got, r.expected(tokens)[-1:])
        assert len(mover.waited) == 2 * r.forward.config.layers
        # Behind the last layer but one at least, which used the first buffer.
        assert mover.waited[0] >= used - 1
        # And what comes after it on the link is behind it.
        assert all(number >= used - 1 for number in mover.waited[2:])


def test_what_a_stuck_copy_may_still_write_to_is_not_used_again(monkeypatch) -> None:
    with noting() as (r, mover):
        tokens = prompt(29)
        pages = r.stored(tokens, 24)
        row = prompt_row(tokens, pages, layout(24))
        whole, used = mover._copy, set()

        def late(direction, copies):
            used.update(buffer.rows.data_ptr() for buffer in r.forward._buffers)
            raise OSError("the link is down")

        def never(timeout_s=0.0):
            raise TransferFailed("copies still under way")

        monkeypatch.setattr(mover, "_copy", late)
        monkeypatch.setattr(mover, "drain", never)
        with pytest.raises(TransferFailed, match="still under way"):
            r.forward.compute([row])
        monkeypatch.setattr(mover, "_copy", whole)
        got = r.forward.compute([row])
        assert r.agrees(got, r.expected(tokens)[-1:])
        # Of those that the failed pass used: smaller ones before it were given back and may return.
        assert used and not used & {buffer.rows.data_ptr() for buffer in r.forward._buffers}
