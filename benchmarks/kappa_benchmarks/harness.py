"""The tools of every bench: arms in turns, intervals, results, tables, options.

A bench measures, calls `result` with its facts, and hands that to `publish` with a function that
prints it for a reader.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kappa_deploy.commands.console import Json, command, machine

__all__ = [
    "Column", "Interval", "Json", "alternate", "append_line", "command", "finite", "half_width",
    "machine", "names", "note", "numbers", "paired", "publish", "quantile", "quartiles",
    "read_lines", "result", "rows_table", "save_json", "spread", "table", "usage_errors",
]  # fmt: skip

T = TypeVar("T")

_FILE_COLUMNS = 170


# Results ------------------------------------------------------------------------------------------


def result(**facts: Any) -> dict[str, Any]:
    """The facts of a bench, with the command, the machine, its load averages at the end (1, 5 and
    15 minutes) and the day."""
    made = {"machine": machine(), "load_average": os.getloadavg(), "command": command()}
    return {**facts, **made, "date": datetime.now(UTC).date().isoformat()}


def publish(
    facts: Mapping[str, Any], show: Callable[[Console], None], *, json_output: bool,
    out: Path | None = None, remark: str = "",
) -> None:  # fmt: skip
    """Print a result as one JSON object, or for a reader with the command and machine beneath.

    Args:
        facts: of `result`.
        show: prints it for a reader.
        json_output: print JSON.
        out: a file that gets it as JSON, too.
        remark: printed beside the machine, such as "paced".
    """
    if out is not None:
        save_json(facts, out)
    if json_output:
        print(_as_json(facts).decode())
        return
    # Into a file, a table is as wide as it needs, not as 80 columns.
    console = Console(width=None if Console().is_terminal else _FILE_COLUMNS)
    show(console)
    load = "/".join(f"{average:.1f}" for average in facts["load_average"])
    made = f"{facts['command']}  on {facts['machine']}, load average {load}"
    made += f", {remark}" if remark else ""
    console.print(made, highlight=False, markup=False, soft_wrap=True)


def save_json(facts: Mapping[str, Any], path: Path) -> None:
    """Write a result, indented."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(_as_json(facts), indent=1) + b"\n")


def _as_json(facts: Mapping[str, Any]) -> bytes:
    # msgspec writes null for infinity and NaN, which JSON lacks: one missing figure must not cost
    # the result of an hour. torch's version is a subclass of str.
    return msgspec.json.encode(facts, enc_hook=str)


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file of JSON lines, on disk before this returns.

    A last line that a crash cut short is dropped first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(_as_json(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, none if there is no file; a last line cut short is left out.

    Raises:
        ValueError: a line is not a row: file, line and remedy are named.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: not a row ({error}); remove the line") from None
    return rows


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()
) -> Table:
    """Columns to the right, but for the first and those of `left`."""
    made = Table(title=title or None)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number == 0 or name in left else "right")
    for row in rows:
        made.add_row(*row)
    return made


Column = str | Callable[[Mapping[str, Any]], str]
"""The content of a column: a row's key, dots before inner ones, a format behind a colon, as in
ttft_s.p50:.3g (`ms`: seconds as milliseconds, one decimal below 100); or a function of the row.
"""


def rows_table(
    title: str,
    columns: Mapping[str, Column],
    rows: Iterable[Mapping[str, Any]],
    left: Sequence[str] = (),
) -> Table:
    """As `table`, of rows and columns by heading; a dash where a row lacks the key."""
    return table(
        title, list(columns), ([_cell(r, c) for c in columns.values()] for r in rows), left
    )


def _cell(row: Mapping[str, Any], column: Column) -> str:
    if callable(column):
        return column(row)
    path, _, form = column.partition(":")
    found: Any = row
    for key in path.split("."):
        found = None if found is None else found.get(key)
    if found is None:
        return "-"
    return f"{1e3 * found:.{0 if found >= 0.1 else 1}f}" if form == "ms" else format(found, form)


def note(text: str) -> None:
    """One line of progress, to standard error."""
    Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


# Options ------------------------------------------------------------------------------------------


@contextmanager
def usage_errors() -> Iterator[None]:
    """End the command with status 2 and one line for input that cannot be used."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def numbers(text: str, option: str, most: float = 1e6) -> tuple[float, ...]:
    """Different numbers above 0 and at most `most` from a text with commas.

    Raises:
        ValueError: names the option.
    """
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < number <= most for number in found):
        raise ValueError(f"{option} is {text!r}: give numbers above 0 with commas, such as 0.8,3")
    return found


def names(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Different names, all of them known, from a text with commas.

    Raises:
        ValueError: names the option and the known names.
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in found if name not in known]
    if wrong or not found:
        what = f"unknown {', '.join(map(repr, wrong))}" if wrong else "nothing given"
        raise ValueError(f"{option}: {what}: choose of {', '.join(known)}")
    return found


# Measuring ----------------------------------------------------------------------------------------


def alternate(arms: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Results of each arm, round by round; every arm runs once a round, their order reversed each
    time.

    Drift (clocks, other work on the machine) hits all arms, and the caches that one arm leaves hit
    each as often from either side. A first round is dropped. Garbage is collected between rounds
    only, so that no arm pays for another's; older objects (half a second's worth, with torch) are
    not searched again each time.
    """
    samples: dict[str, list[T]] = {name: [] for name in arms}
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        for number in range(-1, rounds):
            for name in arms if number % 2 == 0 else reversed(list(arms)):
                sample = arms[name]()
                if number >= 0:
                    samples[name].append(sample)
            gc.collect()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return samples


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of `count` values and its 95 % interval; the ends are NaN where there is one value."""

    mean: float
    low: float
    high: float
    count: int


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The geometric mean of ours / theirs, pair by pair, with Student's t on the logarithms.

    Raises:
        ValueError: there are no pairs.
    """
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    if not len(logs):
        raise ValueError("no values to average: play at least one round")
    mean, count, half = float(logs.mean()), len(logs), half_width(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


def half_width(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Half of the 95 % interval of a mean, by Student's t; NaN of one value."""
    # A tenth of a second to import, where `scipy.stats` takes a whole one.
    from scipy.special import stdtrit

    count = len(values)
    if count < 2:
        return math.nan
    return float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count))


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile, linear between neighbours; None if there are no values."""
    return float(np.quantile(values, share)) if len(values) else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": float(np.median(values)), "least": min(values), "most": max(values)}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def finite(value: float) -> float | None:
    """The number; None for infinity and NaN, which JSON lacks."""
    return value if math.isfinite(value) else None
