"""`kappa route report`: what our routing would save, or has saved, from a rollout's journal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kappa.keys import bearer
from kappa_deploy.commands.console import ApiKey, Json, api_key
from kappa_router.console import fail

if TYPE_CHECKING:
    from kappa_router.rollout_journal import RolloutSegment
    from kappa_simulator.counterfactual import Comparison

_TIMEOUT_S = 60.0
_FIGURES = ("median", "mean", "p99")


def report(
    journal: Annotated[
        Path | None, typer.Argument(help="The file that --journal named; - is standard input.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running kappa route, instead.")] = None,
    api_key: ApiKey = None,
    json_output: Json = False,
) -> None:
    """Say what turning kappa's routing on would save, in seconds, and how sure that is."""
    from kappa_router.rollout_journal import read_journal

    if (journal is None) == (url is None):
        fail("give a JOURNAL or --url, one of them", 2)
    try:
        if journal is None:
            where = f"{str(url).rstrip('/')}/v1/journal"
            segments = read_journal(_fetched(where, api_key), where)
        else:
            where = "standard input" if str(journal) == "-" else str(journal)
            segments = read_journal(_read(journal), where)
        if not segments:
            raise ValueError(f"{where}: the journal is empty; send requests first")
        found = facts_of(segments)
    except (OSError, ValueError) as error:
        fail(str(error), 2)
    print(json.dumps(found) if json_output else "\n".join(page(found)))


def facts_of(segments: list[RolloutSegment]) -> dict[str, Any]:
    """The figures of the page: `estimated` of the latest segment that another rule steered (none
    where ours steers all), `measured` arm against arm over all segments; each None if too little is
    known. Raises ValueError where neither is to be had."""
    from kappa_router.policy import policy_named
    from kappa_simulator.counterfactual import arms, counterfactual

    last = segments[-1]
    shadowed = [s for s in segments if s.mode == "shadow"]
    measured = arms([r for s in segments for r in s.requests])
    estimated, why = None, "no part of the journal is in mode shadow"
    if shadowed:
        try:
            estimated = counterfactual(shadowed[-1], policy_named(shadowed[-1].policy))
        except ValueError as error:
            why = str(error)
    if estimated is None and measured is None:
        raise ValueError(f"nothing can be compared: {why}")
    return {
        "mode": last.mode, "present": last.present, "policy": last.policy,
        "requests": sum(len(s.requests) for s in segments),
        "failed": sum(s.failed for s in segments),
        "estimated": _plain(estimated), "measured": _plain(measured),
    }  # fmt: skip


def _plain(found: Comparison | None) -> dict[str, Any] | None:
    if found is None:
        return None
    saved = zip(_FIGURES, found.measured, found.other, found.saved, strict=True)
    return {
        "requests": found.requests,
        "conversations": found.conversations,
        "model_error": None if math.isnan(found.model_error) else found.model_error,
        "ttft_s": {
            name: {"present": now, "kappa": then, **saving._asdict()}
            for name, now, then, saving in saved
        },
    }


def page(found: dict[str, Any]) -> Iterator[str]:
    """The report in plain words."""
    balancer, estimated, measured = found["present"], found["estimated"], found["measured"]
    yield f"{found['requests']} answered requests; the present balancer: {balancer}"
    if found["failed"]:
        yield f"{found['failed']} had no answer and are left out"
    if estimated is not None:
        yield ""
        yield (
            f"What turning kappa's routing on would save (an estimate from {estimated['requests']} "
            f"requests in {estimated['conversations']} conversations):"
        )
        yield from _table(estimated["ttft_s"], balancer)
        yield from (
            "The requests were replayed through models of your servers, as they were sent and as",
            "kappa would have sent them, so what other choices do to queues and caches counts.",
            f"Before correction the models are off by {estimated['model_error']:.0%} on a median "
            "request; by what they",
            "are off in the present balancer's replay, both replays are corrected.",
        )
    if measured is not None:
        yield ""
        yield (
            f"What was saved where kappa routed, measured ({measured['requests']} requests in "
            f"{measured['conversations']} conversations):"
        )
        yield from _table(measured["ttft_s"], balancer)
        yield "Both arms share the servers: what kappa frees, the others gain from too."
    yield ""
    yield "Ranges hold 95 % of what other samples of as many conversations would have given."
    yield from _advice(estimated or measured)


def _table(rows: dict[str, Any], balancer: str) -> Iterator[str]:
    yield f"  time to first token {balancer:>18} {'kappa':>9} {'saved':>9}   range"
    for name, row in rows.items():
        yield (
            f"  {name:<20}{row['present']:>17.3f} s {row['kappa']:>7.3f} s {row['saved_s']:>7.3f} s"
            f"   {row['low_s']:.3f} to {row['high_s']:.3f} s"
        )


def _advice(shown: dict[str, Any]) -> Iterator[str]:
    mean = shown["ttft_s"]["mean"]
    if mean["low_s"] > 0:
        yield "On average kappa is faster beyond doubt of the sample."
    elif mean["high_s"] < 0:
        yield "On average kappa is slower: leave the present balancer in place."
    else:
        yield "Whether kappa is faster cannot be said yet: let more conversations come."


def _read(path: Path) -> Iterator[str]:
    if str(path) == "-":
        yield from sys.stdin
        return
    with path.open(encoding="utf-8") as file:
        yield from file


def _fetched(where: str, key: str | None) -> Iterator[str]:
    import httpx

    headers = bearer(api_key(key))
    try:
        with httpx.stream("GET", where, headers=headers, timeout=_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                said = answer.read().decode(errors="replace")[:300]
                raise ValueError(f"{where} answered {answer.status_code}: {said}")
            yield from answer.iter_lines()
    except httpx.HTTPError as error:
        raise ValueError(f"{where}: {error or type(error).__name__}") from None
