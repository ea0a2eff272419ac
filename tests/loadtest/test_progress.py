"""How far a run is, for those who look."""

import io

from rich.console import Console

from loadtest.progress import showing
from loadtest.runner import Counts


def shown(counts: Counts, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120)
    with showing(counts, 10, console):
        counts.ended, counts.in_flight, counts.held_back = 1234, 5, 6
        counts.errors["429"] = 7
    return file.getvalue()


def test_a_terminal_sees_the_counts() -> None:
    told = shown(Counts(), is_terminal=True)
    assert "1,234 ended, 5 in flight, 6 held back" in told
    assert "7 failed" in told


def test_a_pipe_gets_nothing() -> None:
    assert shown(Counts(), is_terminal=False) == ""
