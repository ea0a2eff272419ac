"""The common parts of commands: options, tables and figures, JSON, faults that end one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table

from kappa.keys import bearer
from kappa_router.console import fail

if TYPE_CHECKING:
    import httpx

KEY_VARIABLES = ("KAPPA_API_KEY", "OPENAI_API_KEY")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ClusterName = Annotated[
    str, typer.Option(help="mixed, small, uniform, or a YAML or JSON file of nodes.")
]
ModelName = Annotated[str, typer.Option(help="Built-in name or config.json.")]
KvDtype = Annotated[str, typer.Option(help="Of the KV cache, such as fp8; auto: the model's own.")]
RefusedClients = Annotated[
    str, typer.Option(help="Refused clients: never, at_once, backoff or retry_after.")
]
Patience = Annotated[
    float, typer.Option(help="Seconds after which who still waits in a queue leaves.")
]
ApiKey = Annotated[
    str | None, typer.Option(help="API key; default: $KAPPA_API_KEY or $OPENAI_API_KEY.")
]


def with_options(model: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes a dataclass first: its annotated fields become options."""
    hints = get_type_hints(model, include_extras=True)
    ours = [f for f in dataclasses.fields(model) if hasattr(hints[f.name], "__metadata__")]

    def wrapped(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            options = model(**{field.name: given.pop(field.name) for field in ours})
            function(options, **given)

        kind = inspect.Parameter.KEYWORD_ONLY
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        fields = [
            inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])
            for f in ours
        ]
        signature = inspect.Signature([*fields, *(p.replace(kind=kind) for p in own)])
        # Typer reads the attribute, which mypy does not know of functions.
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return wrapped


# -- output ---------------------------------------------------------------------------------------


def print_json(data: Any) -> None:
    """One JSON object, at once."""
    typer.echo(json.dumps(data, allow_nan=False))


def print_text(text: str) -> None:
    """Text for people as it is: neither coloured nor wrapped."""
    Console(highlight=False, emoji=False, soft_wrap=True).print(text, markup=False)


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> None:
    """A table of `left` columns of text, then figures. Columns that do not fit the terminal without
    cutting a word follow in a second table, behind the first column again."""
    console, found = Console(), [tuple(row) for row in rows]
    words = [_longest_word((name, *(row[i] for row in found))) for i, name in enumerate(columns)]
    for part in _fitting(words, console.width):
        table = Table(title=title, title_justify="left")
        for number in part:
            justify: JustifyMethod = "left" if number < left else "right"
            table.add_column(columns[number], justify=justify, min_width=words[number])
        for row in found:
            table.add_row(*(row[number] for number in part))
        console.print(table)
        title = None


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _fitting(words: Sequence[int], width: int) -> list[list[int]]:
    """Columns by number, cut into tables that are at most `width` characters wide; words: the
    longest word of each column. A border is one character, a column's padding and border three."""
    parts, used = [[0]], 1 + words[0] + 3
    for number in range(1, len(words)):
        needed = words[number] + 3
        if used + needed > width and len(parts[-1]) > 1:
            parts.append([0])
            used = 1 + words[0] + 3
        parts[-1].append(number)
        used += needed
    return parts


def seconds(value: float | None) -> str:
    """To three figures, in the unit that fits; `-` for none."""
    if value is None:
        return "-"
    if value < 0.9995e-3:
        return f"{1e6 * value:.0f} µs"
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def number(value: float | None) -> str:
    """To four figures; `-` for none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.4g}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def machine() -> str:
    """This machine in a few words, for results."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {name}, {memory_gb:.0f} GiB, {platform.system()}"


def command() -> str:
    """The command line, as typed, for results."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


# -- faults and keys ------------------------------------------------------------------------------


@contextlib.contextmanager
def bad_parameter() -> Iterator[None]:
    """ValueError and OSError are shown as faults of the options, with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def api_key(given: str | None) -> str:
    """The key given, or of the environment; empty if there is none."""
    return given or next((os.environ[v] for v in KEY_VARIABLES if os.environ.get(v)), "")


@contextlib.contextmanager
def cluster_at(url: str, key: str | None, timeout_s: float) -> Iterator[httpx.Client]:
    """A client of a running cluster; where it does not answer as one, the command ends with 1."""
    import httpx

    base = url.rstrip("/")
    try:
        headers = bearer(api_key(key))
        with httpx.Client(base_url=base, headers=headers, timeout=timeout_s) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        fail(
            f"{base} does not answer as a kappa-serve endpoint: {error!r}. Start one with `kappa "
            "serve`, or give --url and --key"
        )
