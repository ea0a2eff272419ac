"""How far a load test is, as a line that keeps itself up to date; nothing where nobody looks.

Called by `kappa replay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from loadtest.runner import Counts

_PER_S = 4.0


class _Counted(ProgressColumn):
    """The counts of a run, asked anew each time the line is drawn."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def render(self, task: Task) -> Text:
        """Called by rich, in its own thread."""
        counts = self._counts
        failed = sum(counts.errors.copy().values())
        told = f"{counts.ended:,} ended, {counts.in_flight:,} in flight"
        if counts.held_back:
            told += f", {counts.held_back:,} held back"
        text = Text(told)
        if failed:
            text.append(f", {failed:,} failed", style="red")
        return text


@contextmanager
def showing(counts: Counts, total: int | None, console: Console) -> Iterator[None]:
    """Show `counts` on a terminal while the block runs; elsewhere show nothing."""
    if not console.is_terminal:
        yield
        return
    progress = _Bar(counts, total, console)
    with progress:
        yield
        progress.refresh()


class _Bar(Progress):
    """A bar whose place is read from the counts, so that the run itself draws nothing."""

    def __init__(self, counts: Counts, total: int | None, console: Console) -> None:
        self._counts = counts
        super().__init__(
            TextColumn("requests"),
            BarColumn(),
            _Counted(counts),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=_PER_S,
            transient=True,
        )
        self._task = self.add_task("requests", total=total)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich before it draws."""
        for task in self.tasks:
            task.completed = self._counts.ended
        yield from super().get_renderables()
