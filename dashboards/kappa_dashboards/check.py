"""Sends every query of every panel to a live Prometheus, and reports those without a result.

`python -m kappa_dashboards.check --prometheus URL [--window S]`: queries are read from the
committed JSON, with the dashboards' variables filled in as Grafana would. Exits with 1 if a panel
that must show something shows nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kappa_dashboards.build import DASHBOARDS, FOLDER

_TIMEOUT_S = 30.0
_POINTS = 120


@dataclass(slots=True)
class PanelAnswer:
    """Prometheus' results for one panel."""

    dashboard: str
    title: str
    absent: str  # why queries may be empty; "": they may not
    values: list[float] = field(default_factory=list)  # the last number of each series
    empty: list[str] = field(default_factory=list)  # queries without a series with a number

    @property
    def is_missing(self) -> bool:
        """Whether a query that must return something returned nothing."""
        return bool(self.empty) and not self.absent


class CheckError(RuntimeError):
    """Prometheus cannot be queried; the message gives place and reason."""


def fill(expr: str, variables: dict[str, str]) -> str:
    """`expr` with Grafana's variables replaced; longer names first, as one may begin another."""
    for name in sorted(variables, key=len, reverse=True):
        expr = expr.replace(f"${name}", variables[name])
    return expr


def variables_of(board: dict, rate_window_s: float) -> dict[str, str]:
    """A dashboard's variables at their defaults, and the window of its rates."""
    values = {"__rate_interval": f"{max(1, round(rate_window_s))}s"}
    for variable in board["templating"]["list"]:
        if variable["type"] == "datasource":
            continue
        values[variable["name"]] = (
            variable["allValue"]
            if variable.get("includeAll")
            else str(variable.get("current", {}).get("value") or variable.get("query", ""))
        )
    return values


def panels_of(board: dict) -> Iterator[dict]:
    """The panels with queries of a dashboard's JSON."""
    return (panel for panel in board["panels"] if panel.get("targets"))


def ask(
    url: str, window_s: float, rate_window_s: float, end_s: float, folder: Path = FOLDER
) -> list[PanelAnswer]:
    """Evaluate every panel over the `window_s` seconds before `end_s`.

    Raises:
        CheckError: no answer at `url`, or a refused query.
    """
    answers = []
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for built in DASHBOARDS:
            absent = {panel.title: panel.absent for panel in built.panels}
            board = json.loads((folder / f"{built.uid}.json").read_text(encoding="utf-8"))
            variables = variables_of(board, rate_window_s)
            for panel in panels_of(board):
                answer = PanelAnswer(built.uid, panel["title"], absent[panel["title"]])
                for target in panel["targets"]:
                    expr = fill(target["expr"], variables)
                    found = _range(client, expr, end_s, window_s)
                    answer.values += found
                    if not found:
                        answer.empty.append(expr)
                answers.append(answer)
    return answers


def _range(client: httpx.Client, expr: str, end_s: float, window_s: float) -> list[float]:
    """The last number of each series of a query over the window that has one."""
    form = {
        "query": expr,
        "start": f"{end_s - window_s:.3f}",
        "end": f"{end_s:.3f}",
        "step": f"{max(1.0, window_s / _POINTS):.3f}",
    }
    try:
        got = client.post("/api/v1/query_range", data=form)
        data = got.json()
    except (httpx.HTTPError, ValueError) as error:
        raise CheckError(f"{client.base_url}: no Prometheus answers: {error!r}") from None
    if data.get("status") != "success":
        raise CheckError(f"{client.base_url} refuses {expr}: {data.get('error', got.text[:200])}")
    series = ([float(v) for _, v in row["values"]] for row in data["data"]["result"])
    numbers = (list(filter(math.isfinite, values)) for values in series)
    return [values[-1] for values in numbers if values]


def report(answers: Sequence[PanelAnswer]) -> str:
    """A summary, with the panels that returned nothing."""
    lines = [f"{len(answers)} panels, {sum(len(a.values) for a in answers)} series"]
    for answer in answers:
        if answer.empty:
            state = f"may be empty: {answer.absent}" if answer.absent else "MISSING"
            lines.append(f"{answer.dashboard} / {answer.title}: {state}")
            lines += [f"    {expr}" for expr in answer.empty]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Query Prometheus and print the report."""
    parser = argparse.ArgumentParser(prog="python -m kappa_dashboards.check", description=__doc__)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--window", type=float, default=300.0, metavar="S", help="look back, in s")
    parser.add_argument(
        "--rate-window", type=float, default=60.0, metavar="S", help="window of the rates, in s"
    )
    options = parser.parse_args(arguments)
    if options.window <= 0 or options.rate_window <= 0:
        parser.error("--window and --rate-window are seconds, above 0")
    try:
        answers = ask(
            options.prometheus.rstrip("/"), options.window, options.rate_window, time.time()
        )
    except CheckError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(answers))
    return 1 if any(answer.is_missing for answer in answers) else 0


if __name__ == "__main__":
    sys.exit(main())
