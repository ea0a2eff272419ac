"""`kappa demo`: recorded agent sessions on a small unlike cluster, with every decision explained.

Starts the cluster (or uses a running one), replays the sessions that ship with the repository, and
prints a row per request: what was on the device, what came from the host tier, what was computed,
which node was chosen and why, and how good the prediction was. Fails if the host tier or a node
stayed idle, since the demo then showed nothing.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from deploy.commands.console import fail, percent, print_json, print_table, warn
from deploy.commands.provenance import Json
from deploy.commands.serve import Config, Policy, running, settings_or_exit
from loadtest.client import EndpointError
from loadtest.sessions import ChatSession, ChatTurn, TurnOutcome, node_rows, replay
from workload.sessions import Session, as_messages, demo_sessions_path, read_sessions

# Agents think for seconds; a demo that waits as long shows nothing more.
_LONGEST_PAUSE_S = 1.0

_HEADER = (
    f"{'session/turn':<13} {'node':<8} {'device':>6} {'C host':>6} {'N new':>6} {'κ':>7} "
    f"{'κ_crit':>7} {'bound':<8} {'reason':<14} {'predicted':>9} {'TTFT':>9}"
)


def demo(
    url: Annotated[
        str | None, typer.Option(help="A running cluster; default: one started for this.")
    ] = None,
    config: Config = None,
    policy: Policy = None,
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Sessions at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 8,
    json_output: Json = False,
) -> None:
    """Replay recorded agent sessions and show where each request went, and why."""
    if url is not None and (config is not None or policy is not None):
        raise typer.BadParameter("--config and --policy are for a cluster started here: drop --url")
    chats = chat_sessions(read_sessions(demo_sessions_path()), sessions)
    if url is not None:
        show(url.rstrip("/"), chats, max_tokens, json_output)
        return
    with running(settings_or_exit(config, policy, port=0)) as cluster:
        show(cluster.url, chats, max_tokens, json_output)


def show(url: str, chats: Sequence[ChatSession], max_tokens: int, json_output: bool) -> None:
    """Replay, print, and exit with 1 if the demo did not show what it is for."""
    console = Console(soft_wrap=True)
    # Ray and vLLM, once imported, have it log every request.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        before = asyncio.run(node_rows(url))
        if not json_output:
            console.print(title(before), highlight=False)
            console.print(_HEADER, style="bold", highlight=False)
        outcomes = _replay(url, chats, max_tokens, None if json_output else console)
        after = asyncio.run(node_rows(url))
    except EndpointError as error:
        fail(str(error))
    totals = summary(outcomes, before, after)
    faults = shortcomings(outcomes, [row["node"] for row in before], totals)
    if json_output:
        rows = [to_dict(outcome) for outcome in outcomes]
        print_json({"url": url, "totals": totals, "faults": faults, "requests": rows})
    else:
        _print_totals(totals)
    for fault in faults:
        warn(f"demo: {fault}", "red")
    if faults:
        raise typer.Exit(1)


def chat_sessions(recorded: Sequence[Session], count: int) -> list[ChatSession]:
    """`count` chats from the recorded sessions; beyond those, copies under a system message.

    The assistant's turns are the recorded ones, so that each prompt extends the one before.
    """
    chats = []
    for number in range(count):
        copy, index = divmod(number, len(recorded))
        session = recorded[index]
        first = [{"role": "system", "content": f"Replay {copy + 1}."}] if copy else []
        replies = [turn.output_text for turn in session.turns]
        turns, last_s = [], 0.0
        for k, turn in enumerate(session.turns):
            messages = (*first, *as_messages(turn, replies[:k]))
            turns.append(ChatTurn(messages, min(turn.t_s - last_s, _LONGEST_PAUSE_S)))
            last_s = turn.t_s
        chats.append(ChatSession(session.id[:6] + (f"+{copy}" if copy else ""), tuple(turns)))
    return chats


def title(nodes: Sequence[dict[str, Any]]) -> str:
    """What runs, and whether its speeds are real."""
    paced = [row for row in nodes if row["paced"]]
    names = ", ".join(f"{row['node']} ({row['profile']['link_name']})" for row in nodes)
    if not paced:
        return f"Nodes {names}, at the speed of this machine"
    dilation = paced[0]["profile"]["dilation"]
    return (
        f"Nodes {names}. PACED: real vLLM with a tiny model, whose steps and loads last as those "
        f"of {paced[0]['emulated_model']} on these nodes, with 1 s stretched to {dilation:g} s"
    )


def line(outcome: TurnOutcome) -> str:
    """One request as a row under `_HEADER`; tokens are those that the engine reported."""
    head = f"{outcome.session + '/' + str(outcome.turn):<13} {outcome.node or '-':<8} "
    if outcome.error:
        return f"{head}failed: {outcome.error}"
    d = outcome.decision
    device, host, new = _tokens(outcome)
    return (
        f"{head}{device:>6} {host:>6} {new:>6} {host / max(new, 1):>7.2f} "
        f"{d.get('kappa_crit', 0.0):>7.1f} {d.get('bound', '?'):<8} {d.get('reason', '?'):<14} "
        f"{outcome.predicted_ttft_s:>7.2f} s {outcome.ttft_s:>7.2f} s"
    )


def to_dict(outcome: TurnOutcome) -> dict[str, Any]:
    """One request, JSON-ready."""
    device, host, new = _tokens(outcome)
    return {
        "session": outcome.session,
        "turn": outcome.turn,
        "request_id": outcome.request_id,
        "node": outcome.node,
        "paced": outcome.paced,
        "device_tokens": device,
        "cached_tokens": host,
        "new_tokens": new,
        "ratio": host / max(new, 1),
        "kappa_crit": outcome.decision.get("kappa_crit"),
        "bound": outcome.decision.get("bound"),
        "reason": outcome.decision.get("reason"),
        "predicted_ttft_s": outcome.predicted_ttft_s,
        "ttft_s": outcome.ttft_s,
        "error": outcome.error or None,
    }


def summary(
    outcomes: Sequence[TurnOutcome],
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Totals of a replay; `before` and `after` are the cluster's nodes around it."""
    done = [outcome for outcome in outcomes if not outcome.error]
    device, host, new = (sum(_tokens(outcome)[i] for outcome in done) for i in range(3))
    errors = sorted(abs(o.predicted_ttft_s - o.ttft_s) / o.ttft_s for o in done)
    steps = _gained(before, after, "steps_total")
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "paced": any(row["paced"] for row in before),
        "requests_per_node": dict(Counter(outcome.node for outcome in done)),
        "device_tokens": device,
        "host_tokens": host,
        "new_tokens": new,
        "memory_bound_share": _share([o.decision.get("bound") == "memory" for o in done]),
        "split_as_predicted_share": _share([_split_held(o) for o in done]),
        "ttft_error_median": _quantile(errors, 0.5),
        "ttft_error_p90": _quantile(errors, 0.9),
        "ttft_median_s": _quantile(sorted(o.ttft_s for o in done), 0.5),
        "overrun_share": _gained(before, after, "overruns_total") / steps if steps else None,
    }


def shortcomings(
    outcomes: Sequence[TurnOutcome], nodes: Sequence[str], totals: dict[str, Any]
) -> list[str]:
    """Why the demo did not show what it is for; empty when it did."""
    faults = [f"session {o.session} turn {o.turn} failed: {o.error}" for o in outcomes if o.error]
    idle = sorted(set(nodes) - set(totals["requests_per_node"]))
    if idle:
        faults.append(
            f"no request went to {', '.join(idle)}: send more at once (--sessions), or look at "
            "GET /v1/nodes"
        )
    if not totals["host_tokens"]:
        faults.append(
            "no token came from the host tier: the device caches hold all sessions. Lower "
            "engine.device_blocks, or raise --sessions"
        )
    return faults


def _replay(
    url: str, chats: Sequence[ChatSession], max_tokens: int, console: Console | None
) -> list[TurnOutcome]:
    def run(on_outcome: Callable[[TurnOutcome], None]) -> list[TurnOutcome]:
        return asyncio.run(replay(url, chats, max_tokens, on_outcome))

    if console is None:
        return run(lambda _: None)
    if not console.is_terminal:
        return run(lambda outcome: print(line(outcome), flush=True))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("requests", total=sum(len(chat.turns) for chat in chats))

        def on_outcome(outcome: TurnOutcome) -> None:
            progress.console.print(line(outcome), highlight=False, markup=False)
            progress.advance(task)

        return run(on_outcome)


def _print_totals(totals: dict[str, Any]) -> None:
    all_tokens = max(totals["device_tokens"] + totals["host_tokens"] + totals["new_tokens"], 1)
    nodes = ", ".join(f"{n}: {k}" for n, k in sorted(totals["requests_per_node"].items()))
    rows = [("requests", f"{totals['requests']} ({totals['failed']} failed); {nodes}")]
    for name, key in (
        ("prompt tokens found on the device", "device_tokens"),
        ("loaded from the host tier (C)", "host_tokens"),
        ("computed (N)", "new_tokens"),
    ):
        rows.append((name, f"{totals[key]:,} ({totals[key] / all_tokens:.0%})"))
    errors = [percent(totals[key]) for key in ("ttft_error_median", "ttft_error_p90")]
    rows += [
        ("memory-bound requests (κ ≥ κ_crit)", percent(totals["memory_bound_share"])),
        ("token split as predicted", percent(totals["split_as_predicted_share"])),
        ("TTFT prediction error, median / p90", " / ".join(errors)),
        ("steps that overran their pace", percent(totals["overrun_share"])),
    ]
    print_table(f"Totals ({'paced' if totals['paced'] else 'real speed'})", ("", ""), rows, left=2)


def _tokens(outcome: TurnOutcome) -> tuple[int, int, int]:
    """Prompt tokens found on the device, loaded, computed."""
    actual = outcome.decision.get("actual") or {}
    device, host, new = (
        actual.get(key) or 0 for key in ("device_tokens", "cached_tokens", "new_tokens")
    )
    return device, host, new


def _split_held(outcome: TurnOutcome) -> bool:
    predicted = outcome.decision.get("predicted") or {}
    keys = ("device_tokens", "cached_tokens", "new_tokens")
    return tuple(predicted.get(key) for key in keys) == _tokens(outcome)


def _gained(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], key: str) -> int:
    def total(rows: Sequence[dict[str, Any]]) -> int:
        return sum((row["totals"] or {}).get(key, 0) for row in rows)

    return total(after) - total(before)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank."""
    if not ordered:
        return None
    if share == 0.5:
        return statistics.median(ordered)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
