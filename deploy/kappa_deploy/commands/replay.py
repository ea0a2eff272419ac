"""`kappa replay`: a workload against any OpenAI endpoint, and a report of the results.

Exit codes: 0 the objective was met, or none was given; 1 it was missed, or nothing was answered;
2 bad input, and then nothing was sent; 130 stopped by Ctrl-C, with a report of what was done.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from itertools import cycle, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kappa_deploy.commands import console
from kappa_loadtest.client import EndpointError, EndpointSettings
from kappa_loadtest.cluster import Surveyed, survey
from kappa_loadtest.options import LoadOptions
from kappa_loadtest.run import Played, play, showing, streams_allowed
from kappa_loadtest.run_folder import OPTIONS, RunFolder, RunFolderError, locked, read_run
from kappa_loadtest.runner import Counts, RunSettings
from kappa_router.console import warn
from kappa_workload.replay import ReplaySession

_SECRET = ("--key", "--tenant-key")


@console.with_options(LoadOptions)
def replay(
    options: LoadOptions,
    ctx: typer.Context,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that Ctrl-C leaves to streams.")
    ] = 10.0,
    key: console.ApiKey = None,
    tenant_key: Annotated[
        list[str] | None,
        typer.Option(help="TENANT=KEY, again for each; sessions are dealt to these in turn."),
    ] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Seconds per later token.")] = None,
    slo_share: Annotated[float | None, typer.Option(help="Share of requests within; 0.9.")] = None,
    dilation: Annotated[
        float, typer.Option(help="Real seconds per second of the limits given (paced nodes).")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Folder of the results.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    report: Annotated[Path | None, typer.Option(help="Only report on this folder again.")] = None,
    json_output: console.Json = False,
) -> None:
    """Replay a workload against an OpenAI endpoint: latencies, goodput, errors, and why."""
    with console.bad_parameter():
        if report is not None:
            _report(report, json_output)
            return
        options = (options if resume is None else _as_before(options, ctx, resume)).checked()
        objective = _objective(slo_ttft, slo_tpot, slo_share, dilation)
        keys = _keys(key, tenant_key)
        options, surveyed, traffic = _ready(options, keys, is_new=resume is None)
        if surveyed is not None and not surveyed.nodes and set(objective) == {"share"}:
            raise ValueError(
                f"--slo-share: {options.url} reports no nodes, so there is no objective to share "
                "in: give --slo-ttft or --slo-tpot"
            )
        folder = resume or out or Path(f"replay-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        settings = options.run_settings(streams_allowed(options.in_flight), grace)
        with ExitStack() as stack:
            if resume is None:
                run = _run(options, surveyed, settings.in_flight) | {"objective": objective}
                run_folder = RunFolder.create(folder, run)
                stack.enter_context(locked(folder))
            else:
                stack.enter_context(locked(folder))
                run_folder = RunFolder.resume(folder, asdict(options))
                objective = objective or run_folder.run.get("objective") or {}
                run_folder.note(objective=objective, interrupted=False, end=None)
            lock = stack.pop_all()
    with lock:
        endpoint = options.endpoint(surveyed, keys)
        try:
            played = _play(run_folder, endpoint, settings, traffic, options.requests)
            figures = _report(folder, json_output)
        except (OSError, RunFolderError) as error:
            warn(f"no report: {error}")
            raise typer.Exit(1) from None
    if played is None:
        raise typer.Exit(1)
    missed = figures["slo"]["passed"] is False or not figures["completed"]
    raise typer.Exit(130 if played.was_stopped else int(missed))


def _as_before(options: LoadOptions, ctx: typer.Context, resume: Path) -> LoadOptions:
    """The options of the run in `resume`, but for those that stand on the command line."""
    before = read_run(resume).get(OPTIONS) or {}
    for name in {field.name for field in fields(options)} & ctx.params.keys() & before.keys():
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            options = replace(options, **{name: before[name]})
    return options


def _ready(
    options: LoadOptions, keys: Mapping[str, str], *, is_new: bool
) -> tuple[LoadOptions, Surveyed | None, Iterator[ReplaySession]]:
    """Check all that can be wrong before the first request; ValueError names the fault.

    An endpoint that does not answer is no obstacle if the model is given: then its requests fail,
    and are counted. A run that goes on needs its answer, to send what it would have sent.
    """
    workload = options.open()
    tenants = [name for name in keys if name]
    if foreign := options.priorities().keys() - {"", *tenants}:
        raise ValueError(f"--priority names {min(foreign)!r}: give --tenant-key {min(foreign)}=KEY")
    if tenants:
        dealt = zip(workload.sessions, cycle(tenants), strict=False)
        workload = replace(workload, sessions=tuple(replace(s, tenant=t) for s, t in dealt))
    count = sum(len(session.turns) for session in workload.sessions)
    took = f"{options.workload}: {count:,} requests of {len(workload.sessions):,} sessions"
    warn("\n  ".join([f"{took}, read as: {workload.source}", *workload.notes]), "dim")
    options.replay(workload, None)
    surveyed: Surveyed | None = None
    try:
        key = keys.get("", next(iter(keys.values()), ""))
        surveyed = asyncio.run(survey(str(options.url), key))
    except EndpointError as error:
        if not options.model and is_new:
            remedy = "with --model NAME requests are sent all the same, and counted as failed"
            raise ValueError(f"{error}. Nothing was sent; {remedy}") from None
        if not is_new:
            raise
        warn(str(error))
    if surveyed is not None and not options.model:
        options = replace(options, model=surveyed.models[0])
    elif surveyed is not None and options.model not in surveyed.models:
        warn(f"{options.url} lists {', '.join(surveyed.models)}, not {options.model!r}")
    return options, surveyed, options.replay(workload, surveyed)


def _play(
    run_folder: RunFolder,
    endpoint: EndpointSettings,
    settings: RunSettings,
    traffic: Iterator[ReplaySession],
    total: int | None,
) -> Played | None:
    """Send everything, and note how it went; None if the run could not go on to its end."""
    counts = Counts()
    played = None
    try:
        with showing(counts, total, Console(stderr=True)):
            played = asyncio.run(play(endpoint, settings, traffic, run_folder, counts))
    except (OSError, ValueError) as error:
        warn(f"the run could not go on: {error}")
    finally:
        run_folder.close()
    client = counts.to_dict()
    client["held_back"] += (run_folder.run.get("client") or {}).get("held_back", 0)
    if played is not None:
        client |= {
            "cpu_share": played.client_cpu_share,
            "elapsed_s": played.elapsed_s,
            "decisions_untold": played.decisions_missing,
        }
    run_folder.note(
        interrupted=played is None or played.was_stopped,
        end=datetime.now(UTC).isoformat(timespec="seconds"),
        client=client,
    )
    return played


def _objective(
    ttft_s: float | None, tpot_s: float | None, share: float | None, dilation: float
) -> dict[str, float]:
    """The limits in real seconds, those that were given."""
    from kappa_loadtest.results import objective_of

    if not dilation > 0:
        raise ValueError(f"--dilation is {dilation}: give a factor above zero")
    limits = {"ttft_s": ttft_s, "tpot_s": tpot_s}
    given = {name: limit * dilation for name, limit in limits.items() if limit is not None}
    given |= {} if share is None else {"share": share}
    objective_of({"objective": given})
    return given


def _keys(key: str | None, tenant_keys: list[str] | None) -> dict[str, str]:
    default = console.api_key(key)
    keys = {"": default} if default else {}
    for given in tenant_keys or []:
        tenant, _, value = given.partition("=")
        if not (tenant and value):
            # The text may be a key: it is not repeated.
            raise ValueError("--tenant-key: give TENANT=KEY")
        keys[tenant] = value
    return keys


def _run(options: LoadOptions, surveyed: Surveyed | None, max_streams: int) -> dict[str, Any]:
    """The run.json of a run that begins; its command line without keys."""
    shown = [Path(sys.argv[0]).name]
    for before, word in pairwise(sys.argv):
        name, equals, _ = word.partition("=")
        is_secret = before in _SECRET or (name in _SECRET and equals)
        shown.append("…" if before in _SECRET else f"{name}=…" if is_secret else word)
    python, load = platform.python_version(), os.getloadavg()[0]
    return {
        "command": shown,
        "workload": options.workload,
        "url": options.url,
        "model": options.model,
        "seed": options.seed,
        "max_streams": max_streams,
        "machine": f"{os.cpu_count()} cores, Python {python}, load {load:.1f}",
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": list(surveyed.nodes) if surveyed else [],
        "interrupted": False,
        "end": None,
        OPTIONS: asdict(options),
    }


def _report(folder: Path, json_output: bool) -> dict[str, Any]:
    """Write the report and print it; returns its figures."""
    from kappa_loadtest.report import REPORT, slowest_lines, write_report

    figures = write_report(folder)
    if json_output:
        console.print_json({**figures, "folder": str(folder)})
        return figures
    note = f". {figures['note']}" if figures["note"] else ""
    console.print_text(
        f"{figures['requests']:,} requests, {figures['completed']:,} completed, "
        f"{figures['failed']:,} failed, in {figures['duration_s']:,.1f} s{note}"
    )
    quantiles = ("mean", "p50", "p90", "p99", "max")
    times = [
        (name.removesuffix("_s").upper(), *(console.seconds(figures[name][q]) for q in quantiles))
        for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "late_s")
    ]
    console.print_table(None, ("", *quantiles), times)
    classes = [
        (row["name"], f"{row['requests']:,}", f"{row['failed']:,}",
         *(console.seconds(row["ttft_s"][q]) for q in quantiles))
        for row in figures["priorities"]
    ]  # fmt: skip
    if classes:
        console.print_table(None, ("priority", "requests", "failed", *quantiles), classes)
    lines, slo = [], figures["slo"]
    if slo["met"] is not None:
        result = f"{slo['basis']} objective: {slo['met']:.1%} met"
        if slo["passed"] is not None:
            word = "met" if slo["passed"] else "missed"
            result = f"SLO {word}: {slo['met']:.1%}, {slo['share']:.1%} required"
        goodput = f"goodput {figures['goodput_rps'] or 0:.4g} requests/s"
        lines.append(f"{result} ({slo['meaning']}), {goodput}")
    lines += [f"{k}: {e['count']:,} ({e['meaning']})" for k, e in figures["errors"].items()]
    lines += [*slowest_lines(figures), f"report: {folder / REPORT}"]
    console.print_text("\n".join(lines))
    return figures
