"""What all commands share: options, tables and figures, JSON, and how a fault ends a command."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

KEY_VARIABLES = ("KAPPA_API_KEY", "OPENAI_API_KEY")

ApiKey = Annotated[
    str | None, typer.Option(help="API key; default: $KAPPA_API_KEY or $OPENAI_API_KEY.")
]


def print_json(data: Any) -> None:
    """One JSON object, at once."""
    typer.echo(json.dumps(data, allow_nan=False))


def print_text(text: str) -> None:
    """Text for people as it is: neither coloured nor wrapped."""
    Console(highlight=False, emoji=False, soft_wrap=True).print(text, markup=False)


def warn(text: str, style: str = "yellow") -> None:
    """Text on stderr."""
    Console(stderr=True, highlight=False, emoji=False, soft_wrap=True).print(
        text, style=style, markup=False
    )


def fail(why: str, code: int = 1) -> NoReturn:
    """End the command: 1, something failed; 2, the input was at fault."""
    warn(why, "red")
    raise typer.Exit(code)


@contextlib.contextmanager
def bad_parameter() -> Iterator[None]:
    """ValueError and OSError are shown as faults of the options, with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> None:
    """A table whose first `left` columns are text, the others figures."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def seconds(value: float | None) -> str:
    """In ms below 10 s; `-` for none."""
    return "-" if value is None else f"{value * 1e3:,.1f} ms" if value < 10 else f"{value:,.1f} s"


def number(value: float | None) -> str:
    """To four figures; `-` for none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.4g}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def api_key(given: str | None, variables: Sequence[str] = KEY_VARIABLES) -> str:
    """The key given, or of the environment; empty if there is none."""
    return given or next((os.environ[v] for v in variables if os.environ.get(v)), "")


def bearer(key: str) -> dict[str, str]:
    """The headers that carry a key, if there is one."""
    return {"authorization": f"Bearer {key}"} if key else {}
