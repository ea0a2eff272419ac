"""How a command speaks on stderr, and how a fault ends it."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console


def warn(text: str, style: str = "yellow") -> None:
    """Text on stderr."""
    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    console.print(text, style=style, markup=False)


def fail(why: str, code: int = 1) -> NoReturn:
    """End the command: 1, something failed; 2, the input was at fault."""
    warn(why, "red")
    raise typer.Exit(code)
