"""`kappa demo`: two acts on a small unlike cluster, with every decision explained.

Starts the cluster (or uses a running one), replays the agent sessions that ship with the
repository, and prints a row per request: what was on the device, what came from the host tier, what
was computed, which node was chosen and why, and how good the prediction was. On a cluster of its
own the same requests then run under policies of others: what the choice was worth. On its own nodes
a second act follows, long documents that many ask about (`demo_acts`), and a sentence says what was
gained. Fails if the host tier or a node stayed idle, since the demo then showed nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from kappa.host import lacking
from kappa.slo import OBJECTIVE
from kappa_deploy.commands.console import Json, percent, print_json, print_table, print_text
from kappa_deploy.commands.demo_acts import (
    NODES,
    Act,
    demo_settings,
    documents_act,
    gained,
    memory_bound_on,
)
from kappa_deploy.commands.demo_rows import HEADER, OTHERS, TOKENS, Row, Worth, line, print_compared
from kappa_deploy.commands.serve import Config, Policy, running, settings_or_exit
from kappa_loadtest.client import EndpointError
from kappa_loadtest.run_folder import RequestRecord
from kappa_loadtest.sessions import ChatSession, ChatTurn, chat_sessions, node_rows, replay
from kappa_router.console import fail, warn
from kappa_workload.sessions import demo_sessions_path, read_sessions

# Each of them has so long for all requests.
_COMPARED_S = 240.0


def demo(
    url: Annotated[
        str | None, typer.Option(help="A running cluster; default: one started for this.")
    ] = None,
    config: Config = None,
    policy: Policy = None,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Simulated nodes: no engine, no cluster.")
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="Then the same requests under other policies, to compare.")
    ] = True,
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Sessions at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 8,
    json_output: Json = False,
) -> None:
    """Replay recorded agent sessions and show where each request went, and why."""
    if url is not None and (config is not None or policy is not None):
        raise typer.BadParameter("--config and --policy are for a cluster started here: drop --url")
    if emulated:
        if (url, config, policy) != (None, None, None):
            raise typer.BadParameter("--emulated has nodes of its own: drop the other options")
        # The policies that ours is compared with come in by name, not by an import that fails.
        if missing := lacking(["loadtest"]):
            fail(f"kappa demo --emulated: {missing}")
        from kappa_deploy.commands.emulated import show_emulated

        show_emulated(json_output)
        return
    chats = chat_sessions(read_sessions(demo_sessions_path()), sessions)
    if url is not None:
        show(url.rstrip("/"), chats, max_tokens, json_output)
        return
    given = {} if config else demo_settings()
    settings = settings_or_exit(config, policy, port=0, changes=given)
    # Every policy serves all of the requests.
    router = settings.router.model_copy(update={"admission": False})
    settings = settings.model_copy(update={"router": router})
    # A log of decisions replays under one policy; of several deciders one alone would change.
    compare = compare and settings.router.record is None and settings.http.replicas == 1
    with running(settings) as cluster:
        policies = Policies(cluster.use_policy, settings.router.policy) if compare else None
        act = documents_act(settings) if compare and config is None else None
        show(cluster.url, chats, max_tokens, json_output, policies, act)


class Policies(NamedTuple):
    """Has the cluster decide by a policy of this name, and the name of its own."""

    use: Callable[[str], None]
    own: str


def show(
    url: str,
    chats: Sequence[ChatSession],
    max_tokens: int,
    json_output: bool,
    policies: Policies | None = None,
    act: Act | None = None,
) -> None:
    """Replay, print, and exit with 1 if the demo did not show what it is for.

    policies: none: nothing is compared. act: what is played under each policy after the chats.
    """
    console = Console(soft_wrap=True, quiet=json_output)
    try:
        before = asyncio.run(node_rows(url))
        console.print(title(before), highlight=False)
        warn(f"live on the page at {url}/", "dim")
        console.print(HEADER, style="bold", highlight=False)
        is_drawn = console.is_terminal and not json_output
        with Progress(console=console, transient=True, disable=not is_drawn) as progress:
            task = progress.add_task("requests", total=sum(len(chat.turns) for chat in chats))

            def on_record(record: RequestRecord) -> None:
                console.print(line(to_dict(record)), highlight=False, markup=False)
                progress.advance(task)

            records = asyncio.run(replay(url, chats, max_tokens, on_record))
        after = asyncio.run(node_rows(url))
        limit_s = OBJECTIVE.ttft_s * before[0]["profile"]["dilation"]
        compared: list[Worth] = []
        second: Second | None = None
        if policies is not None:
            compared.append(worth("this", records, limit_s))
            for name, words in OTHERS.items():
                warn(f"the same {len(records)} requests under {words} …", "dim")
                policies.use(name)
                theirs = _replayed_under(name, url, chats, max_tokens)
                compared.append(worth(words, theirs, limit_s))
            if act is not None:
                second = _second_act(url, act, max_tokens, policies, limit_s)
    except EndpointError as error:
        fail(str(error))
    rows = [to_dict(record) for record in records]
    totals = summary(records, before, after)
    faults = shortcomings(rows, [row["node"] for row in before], totals)
    if json_output:
        found = {"url": url, "totals": totals, "faults": faults, "requests": rows}
        beside = [one._asdict() for one in compared]
        found |= {"compared": beside} if beside else {}
        print_json(found | (second.to_dict() if second else {}))
    else:
        _print_totals(totals)
        if compared:
            within = f"goodput: first token within {limit_s:g} s"
            print_compared(f"What the choice was worth ({within})", compared)
        if second is not None:
            print_compared(f"Second act, long documents asked by many ({within})", second.compared)
            print_text(f"{gained('Agents', compared)}\n{second.sentence}")
    for fault in faults:
        warn(f"demo: {fault}", "red")
    if faults:
        raise typer.Exit(1)


class Second(NamedTuple):
    """The second act under every policy."""

    compared: list[Worth]
    # Requests that were memory-bound on the node behind PCIe, as a share.
    memory_bound_share: float | None
    requests_per_node: Mapping[str, int]

    @property
    def sentence(self) -> str:
        where = ", ".join(f"{n} on {node}" for node, n in sorted(self.requests_per_node.items()))
        why = (
            f"; {percent(self.memory_bound_share)} of the requests are memory-bound behind PCIe, "
            f"and seconds of link and GPU, which no other here counts, sent {where}"
        )
        return gained("Documents", self.compared, why)

    def to_dict(self) -> dict[str, Any]:
        fields = self._asdict() | {"compared": [one._asdict() for one in self.compared]}
        return {"second_act": fields | {"gained": self.sentence}}


def _second_act(url: str, act: Act, max_tokens: int, policies: Policies, limit_s: float) -> Second:
    """Play the act under every policy, ours first; what was read is read again under each."""
    compared, ours = [], list[RequestRecord]()
    for name, words in {policies.own: "this", **OTHERS}.items():
        warn(f"long documents: {len(act.asked)} requests under {words} …", "dim")
        policies.use(name)
        _replayed_under(f"{name} 2", url, act.read, 1)
        records = _replayed_under(f"{name} 2", url, act.asked, max_tokens)
        compared.append(worth(words, records, limit_s))
        ours = ours or records
    served = Counter(record.node for record in ours if not record.error)
    return Second(compared, memory_bound_on(NODES[0]["name"], ours), served)


def _replayed_under(
    policy: str, url: str, chats: Sequence[ChatSession], max_tokens: int
) -> list[RequestRecord]:
    """The records of the chats under a policy; fewer if they have not ended in time."""
    records: list[RequestRecord] = []

    async def within() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMPARED_S):
                await replay(url, marked(chats, policy), max_tokens, records.append)

    asyncio.run(within())
    return records


def marked(chats: Sequence[ChatSession], word: str) -> list[ChatSession]:
    """The same chats, each beginning with `word`: no cache holds anything of them yet."""

    def begun(turn: ChatTurn) -> ChatTurn:
        first, *rest = turn.messages
        return ChatTurn((first | {"content": f"{word}: {first['content']}"}, *rest), turn.pause_s)

    return [ChatSession(chat.name, tuple(map(begun, chat.turns))) for chat in chats]


def worth(policy: str, records: Sequence[RequestRecord], limit_s: float) -> Worth:
    """What requests got under a policy: TTFT in seconds; goodput in those that had their first
    token within `limit_s`, per second from the first that was sent to the last that ended."""
    done = [record for record in records if not record.error]
    ttft_s = np.array([to_dict(record)["ttft_s"] for record in done])
    if not done:
        return Worth(policy, 0, None, None, 0.0)
    lasted_s = max(r.ended_s for r in records) - min(r.sent_s for r in records)
    p50_s, p99_s = (float(np.quantile(ttft_s, q, method="higher")) for q in (0.5, 0.99))
    goodput_rps = int((ttft_s <= limit_s).sum()) / lasted_s
    return Worth(policy, len(done), p50_s, p99_s, goodput_rps)


def title(nodes: Sequence[Row]) -> str:
    """The nodes, and whether their speeds are real."""
    paced = [row for row in nodes if row["paced"]]
    names = ", ".join(f"{row['node']} ({row['profile']['link_name']})" for row in nodes)
    if not paced:
        return f"Nodes {names}, at the speed of this machine"
    dilation = paced[0]["profile"]["dilation"]
    tables = {row["node"]: table for row in paced if (table := row["profile"].get("silicon"))}
    by = "".join(f"; steps of {node} by {table}" for node, table in tables.items())
    return (
        f"Nodes {names}. PACED: real vLLM with a tiny model, whose steps and loads last as those "
        f"of {paced[0]['emulated_model']} on these nodes, with 1 s stretched to {dilation:g} s{by}"
    )


def to_dict(record: RequestRecord) -> Row:
    """One request, JSON-ready; tokens are those that the engine reported."""
    tokens = {name: (record.actual or {}).get(name) or 0 for name in TOKENS}
    first_s, bound, error = record.first_token_s, None, None
    if record.ratio is not None and record.crit is not None:
        bound = "memory" if record.ratio >= record.crit else "compute"
    if record.error:
        kind = f"HTTP {record.status}" if record.status not in (0, 200) else record.error
        error = f"{kind}: {record.error_detail}"
    return {
        "session": record.session,
        "turn": record.turn,
        "request_id": record.request_id,
        "node": record.node,
        "paced": record.paced,
        **tokens,
        "ratio": tokens["cached_tokens"] / max(tokens["new_tokens"], 1),
        "kappa_crit": record.crit,
        "bound": bound,
        "reason": record.reason or None,
        "predicted_ttft_s": record.predicted_ttft_s or 0.0,
        "ttft_s": 0.0 if first_s is None else first_s - record.sent_s,
        "error": error,
    }


def summary(
    records: Sequence[RequestRecord], before: Sequence[Row], after: Sequence[Row]
) -> dict[str, Any]:
    """Totals of a replay; `before` and `after` are the cluster's nodes around it."""
    answered = [record for record in records if not record.error]
    done = [to_dict(record) for record in answered]
    ttft_s = np.array([row["ttft_s"] for row in done])
    errors = np.abs(np.array([row["predicted_ttft_s"] for row in done]) - ttft_s) / ttft_s
    as_predicted = [
        all((record.predicted or {}).get(name) == row[name] for name in TOKENS)
        for record, row in zip(answered, done, strict=True)
    ]

    def gained(key: str) -> int:
        earlier, later = (
            sum((row["totals"] or {}).get(key, 0) for row in rows) for rows in (before, after)
        )
        return later - earlier

    steps = gained("steps_total")
    return {
        "requests": len(records),
        "failed": len(records) - len(done),
        "paced": any(row["paced"] for row in before),
        "requests_per_node": dict(Counter(row["node"] for row in done)),
        "device_tokens": sum(row["device_tokens"] for row in done),
        "host_tokens": sum(row["cached_tokens"] for row in done),
        "new_tokens": sum(row["new_tokens"] for row in done),
        "memory_bound_share": _mean([row["bound"] == "memory" for row in done]),
        "split_as_predicted_share": _mean(as_predicted),
        "ttft_error_median": float(np.median(errors)) if done else None,
        "ttft_error_p90": float(np.quantile(errors, 0.9, method="higher")) if done else None,
        "ttft_median_s": float(np.median(ttft_s)) if done else None,
        "overrun_share": gained("overruns_total") / steps if steps else None,
    }


def _mean(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def shortcomings(rows: Sequence[Row], nodes: Sequence[str], totals: Row) -> list[str]:
    """Why the demo did not show what it is for; empty when it did."""
    faults = [
        f"session {row['session']} turn {row['turn']} failed: {row['error']}"
        for row in rows
        if row["error"]
    ]
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


def _print_totals(totals: Row) -> None:
    names = {
        "device_tokens": "prompt tokens found on the device",
        "host_tokens": "loaded from the host tier (C)",
        "new_tokens": "computed (N)",
    }
    all_tokens = max(sum(totals[key] for key in names), 1)
    nodes = ", ".join(f"{n}: {k}" for n, k in sorted(totals["requests_per_node"].items()))
    errors = [percent(totals[key]) for key in ("ttft_error_median", "ttft_error_p90")]
    rows = [
        ("requests", f"{totals['requests']} ({totals['failed']} failed); {nodes}"),
        *((name, f"{totals[k]:,} ({totals[k] / all_tokens:.0%})") for k, name in names.items()),
        ("memory-bound requests (κ ≥ κ_crit)", percent(totals["memory_bound_share"])),
        ("token split as predicted", percent(totals["split_as_predicted_share"])),
        ("TTFT prediction error, median / p90", " / ".join(errors)),
        ("steps that overran their pace", percent(totals["overrun_share"])),
    ]
    print_table(f"Totals ({'paced' if totals['paced'] else 'real speed'})", ("", ""), rows, left=2)
