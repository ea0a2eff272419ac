"""What is sent by every client, and what each of them must tell: one workload, one kind of answer.

Prompts are plain text for `/v1/completions`, since all clients can send it unchanged. Either so
many requests are open all the time (`concurrency`), or they are due at even distances (`rate_rps`):
both are the same to every client, which random arrivals are not.

A round's figure is the median over its requests; a client's the median over its rounds, with the
least and the largest of them. Ratios are taken within a round, in which the machine was nearly the
same for all. Clients differ in when they count a request as sent: ours when its bytes have gone
out, others before they ask their pool for a connection. `ttft_due_s`, ours from when a request was
due over theirs, is the other end of that.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.routing.peers.process import bounded_run

_WORDS = ("the", "file", "test", "error", "value", "return", "class", "list", "name", "line")
_LAST_LINES = 3
FIGURES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "late_s")
TOLERATED = 0.05


class ClientError(RuntimeError):
    """A client could not be run, or told what we cannot read; says which, and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent. Exactly one of `concurrency` and `rate_rps` is given.

    prompts: one per request, in order. output_tokens: of every answer. tokenizer: a folder, for
    clients that insist on one. timeout_s: for the whole of a client's run.
    """

    url: str
    model: str
    prompts: tuple[str, ...]
    output_tokens: int
    tokenizer: str
    concurrency: int | None = None
    rate_rps: float | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_rps is None):
            raise ValueError("a plan has either a concurrency or a rate")
        if not self.prompts:
            raise ValueError("a plan has at least one prompt")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as a client saw it; seconds from sending it.

    tpot_s: from the first to the last token over the tokens after the first; NaN for a single one.
    late_s: from when it was due to sending it; NaN if the client does not tell.
    """

    ttft_s: float
    tpot_s: float
    e2e_s: float
    late_s: float = math.nan


@dataclass(frozen=True, slots=True)
class Played:
    """What a client told of one run.

    gaps_s: between chunks, of all requests; empty if it does not tell. seconds: from the first
    request to the end of the last. cpu_s: of all its processes, start included.
    """

    answers: tuple[Answer, ...]
    failed: int
    seconds: float
    gaps_s: tuple[float, ...] = ()
    cpu_s: float = math.nan


def prompts(count: int, words: int, seed: int, salt: str = "") -> tuple[str, ...]:
    """Texts of common words behind a number, so that no two begin alike; with a salt of theirs."""
    random = Random(seed)
    head = f"{salt} " if salt else ""
    return tuple(
        f"{head}{random.getrandbits(48)} {' '.join(random.choices(_WORDS, k=words))}"
        for _ in range(count)
    )


def run(
    name: str,
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> tuple[str, float]:
    """Run a client to its end; its standard output, and the CPU seconds that it took.

    Raises:
        ClientError: it failed, or took longer; with the last that it said.
    """
    before_s = _children_s()
    try:
        done = bounded_run(command, timeout_s=timeout_s, stdin=stdin, environment=environment)
    except (TimeoutError, OSError) as error:
        raise ClientError(f"{name}: {error}") from None
    if done.code != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last = " | ".join(said[-_LAST_LINES:]) or "it said nothing"
        raise ClientError(f"{name} ended with code {done.code}: {last}")
    return done.stdout, _children_s() - before_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def json_lines(name: str, path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines.

    Raises:
        ClientError: it is not there, or a line is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ClientError(f"{name} left no {path.name}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ClientError(f"{name}: {path}:{number}: {error}") from None
        if not isinstance(value, dict):
            raise ClientError(f"{name}: {path}:{number}: expected an object")
        found.append(value)
    return found


def figures(played: Played) -> dict[str, float | None]:
    """A round's medians in seconds; None for what the client does not tell."""
    values = {
        "ttft_s": [a.ttft_s for a in played.answers],
        "tpot_s": [a.tpot_s for a in played.answers],
        "itl_s": list(played.gaps_s),
        "e2e_s": [a.e2e_s for a in played.answers],
        "late_s": [a.late_s for a in played.answers],
        "ttft_due_s": [a.late_s + a.ttft_s for a in played.answers],
    }
    return {name: _median(found) for name, found in values.items()}


def compared(
    rounds: Sequence[Mapping[str, Played]], ours: str, least_s: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Rows of all clients and the ratios of ours to each other one.

    Args:
        rounds: what each client told, by its name; the same names in every round.
        ours: whose figures are divided by the others'.
        least_s: what the endpoint itself takes, where that is known (a stub's latencies).
    """
    told = [{name: figures(played) for name, played in one.items()} for one in rounds]
    names = list(rounds[0]) if rounds else []
    rows = [
        _row(name, [one[name] for one in rounds], [one[name] for one in told], least_s or {})
        for name in names
    ]
    ratios = [
        {"ours": ours, "against": name, "figures": _ratios(told, ours, name)}
        for name in names
        if name != ours
    ]
    return {"clients": rows, "ratios": ratios}


def _row(
    name: str,
    played: Sequence[Played],
    told: Sequence[Mapping[str, float | None]],
    least_s: Mapping[str, float],
) -> dict[str, Any]:
    spreads: dict[str, Any] = {figure: _spread([t[figure] for t in told]) for figure in FIGURES}
    excess = {
        figure: spreads[figure]["median"] - least
        for figure, least in least_s.items()
        if spreads[figure] is not None
    }
    return {
        "client": name,
        "rounds": len(played),
        "requests": sum(len(p.answers) for p in played),
        "failed": sum(p.failed for p in played),
        **spreads,
        "above_the_endpoint_s": excess,
        "rps": _spread([len(p.answers) / p.seconds for p in played if p.seconds > 0]),
        "cpu_s": _spread([p.cpu_s for p in played]),
    }


def _ratios(
    told: Sequence[Mapping[str, Mapping[str, float | None]]], ours: str, other: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    alike = [(figure, figure) for figure in FIGURES if figure != "late_s"]
    for figure, theirs_s in [*alike, ("ttft_due_s", "ttft_s")]:
        pairs = [(one[ours][figure], one[other][theirs_s]) for one in told]
        spread = _spread([mine / theirs for mine, theirs in pairs if mine and theirs])
        if spread is not None:
            spread["within_5_percent"] = abs(spread["median"] - 1) <= TOLERATED
        found[figure] = spread
    return found


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median, least and largest of a few rounds; None without any."""
    found = [value for value in values if value is not None and not math.isnan(value)]
    if not found:
        return None
    return {"median": statistics.median(found), "least": min(found), "largest": max(found)}


def _median(values: Sequence[float]) -> float | None:
    found = np.asarray(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    return float(np.median(found)) if len(found) else None
