"""`kappa bench dynamo`: Dynamo's own harness, its routers and ours before its mockers.

Mockers and frontend are Dynamo's, all in real time; nodes are EMULATED by Dynamo. Every arm is
reached through the same hop (`dynamo_proxy`), and every run has fresh processes and empty caches. A
run's row is appended to a file, so that a bench that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np
import typer
from rich.console import Console

from kappa.host import free_port
from kappa.model import kv_bytes_per_token
from kappa.protocol import Announcement
from kappa.settings.cluster import load_settings
from kappa_benchmarks.harness import (
    Column,
    Json,
    append_line,
    names,
    note,
    publish,
    read_lines,
    result,
    rows_table,
    usage_errors,
)
from kappa_benchmarks.routing.peers.dynamo_cluster import (
    BLOCK_TOKENS,
    BUDGET_TOKENS,
    CLUSTERS,
    HOST,
    MODEL,
    SHAPE,
    Emulation,
    Harness,
    Mocker,
    dynamo,
    node_of,
    step_of,
)
from kappa_benchmarks.routing.peers.dynamo_rows import (
    FIGURES,
    TUNED,
    TUNING,
    TUNING_SEED,
    Row,
    Sent,
    figures,
    summary,
    tuned,
)
from kappa_benchmarks.routing.peers.routers import (
    DYNAMO_VERSION,
    PeerError,
    dynamo_python,
    started,
)
from kappa_workload.catalogue import workload_named
from kappa_workload.replay import ReplayOptions, ReplaySession, mean_turns, replay_sessions
from kappa_workload.shapes import Workload

EMULATED = "Nodes are EMULATED by Dynamo's mockers: this ranks routers, it measures no GPU."
_TWO_TIER = """worker_selection:
  aggregated: two-tier
  instances:
    - name: two-tier
      type: dynamo-two-tier-cost-fn
"""
_ARMS = "ours,kv,two-tier,least-loaded,round-robin"
_WRONG_BY = 3.0
_PROXY = "kappa_benchmarks.routing.peers.dynamo_proxy"
_WIRE_S = 0.2
Bodies = dict[tuple[str, int], bytes]


@dataclass(frozen=True, slots=True)
class HarnessLoad:
    """The requests of a run, the same for every arm."""

    trace: str
    requests: int
    # Requests per wall second while sessions begin.
    rate: float
    # Of a session, least and most.
    turns: tuple[int, int] = (3, 10)
    # Tokens of each answer.
    output: int = 16
    # Longest between turns, in wall seconds.
    pause: float = 1.0
    # Tokens; a session ends before a longer prompt.
    longest: int = 24_000

    def sessions(self, seed: int) -> list[ReplaySession]:
        """Interleaved sessions with at least `requests` requests together."""
        found = workload_named(self.trace)
        long = tuple(s for s in found.sessions if len(s.turns) >= self.turns[0])
        options = ReplayOptions(
            max_turns=self.turns[1], max_output_tokens=self.output, salt=seed,
            max_context_tokens=self.longest,
        )  # fmt: skip
        kept = replace(found, sessions=long, texts=None)
        rng = np.random.default_rng((seed, 3))
        gaps_s = (rng.exponential(_turns(kept, options) / self.rate) for _ in itertools.count())
        made, requests = [], 0
        for session in replay_sessions(
            kept, arrivals=itertools.accumulate(gaps_s), seed=seed, options=options
        ):
            made.append(session)
            requests += len(session.requests)
            if requests >= self.requests:
                break
        return made


def _turns(workload: Workload, options: ReplayOptions) -> float:
    most = options.max_turns or 1
    cut = tuple(replace(s, turns=s.turns[:most]) for s in workload.sessions)
    return mean_turns(replace(workload, sessions=cut))


# -- arms -----------------------------------------------------------------------------------------


def frontend_options(arm: str, folder: Path) -> list[str]:
    """The frontend's options for an arm: `kv` with options, as in `kv:host-cache-hit-weight=1`;
    `two-tier`; `ours`, which chooses itself; or a mode of Dynamo's.

    Raises:
        ValueError: an option is not NAME=VALUE.
    """
    name, _, text = arm.partition(":")
    if name.startswith("ours"):
        return ["--router-mode", "direct"]
    if name == "two-tier":
        policy = folder / "policy.yaml"
        policy.write_text(_TWO_TIER)
        return ["--router-mode", "kv", "--router-policy-config", str(policy)]
    options = ["--router-mode", name]
    for option in filter(None, text.split(",")):
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise ValueError(f"arm {arm!r}: {option!r} is not NAME=VALUE")
        options += [f"--router-{key}", value]
    return options


def announcement(node: Mocker, instance: int, emulation: Emulation, wrong: float) -> Announcement:
    """A node as our router is told: the catalogue's figures at the bench's dilation.

    wrong: multiplies the link's seconds and each constant of a step, in turn with its inverse.
    """
    step, dilation = step_of(node.profile, emulation.dilation), emulation.dilation
    sign = itertools.cycle((wrong, 1 / wrong))
    constants = ("token_s", "pair_s", "weights_s", "context_token_s", "fixed_s")
    link = node.h2d_bytes_per_s / dilation / next(sign)
    # A mocker's loads take their bytes and nothing besides.
    known = replace(node_of(node.profile), d2h_bytes_per_s=0.0, load_fixed_s=0.0)
    profile = replace(known, name=node.name, h2d_bytes_per_s=link, copy_fixed_s=0.0)
    return Announcement(
        worker=str(instance), model=MODEL, node=profile,
        step=replace(step, **{name: getattr(step, name) * next(sign) for name in constants}),
        kv_bytes_per_token=kv_bytes_per_token(SHAPE), emulated_model=SHAPE.name,
        fingerprint="mocker", block_tokens=BLOCK_TOKENS, device_blocks=emulation.device_blocks,
        host_blocks=emulation.host_blocks, max_batch_tokens=BUDGET_TOKENS,
        max_context_tokens=emulation.device_blocks * BLOCK_TOKENS, events_endpoint="",
        snapshot_endpoint="", engine="emulated",
    )  # fmt: skip


def _ours(arm: str, found: Harness, emulation: Emulation, seed: int) -> Row | None:
    """Settings of the hop's router in `ours` and `ours-wrong`, where a policy other than `priced`
    stands behind a colon; None in other arms."""
    name, _, policy = arm.partition(":")
    if not name.startswith("ours"):
        return None
    rows = []
    for number, node in enumerate(emulation.nodes):
        wrong = (_WRONG_BY if number % 2 == 0 else 1 / _WRONG_BY) if name == "ours-wrong" else 1.0
        rows.append(announcement(node, found.instances[node.name], emulation, wrong).to_dict())
    return {
        "announcements": rows, "events": found.events, "policy": policy or "priced", "seed": seed
    }  # fmt: skip


# -- one run --------------------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    nvext: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def send(
    http: aiohttp.ClientSession, url: str, one: Sent, body: bytes, now: Callable[[], float]
) -> None:
    """Send one request; a failure becomes its error."""
    one.sent_s, error = now(), ""
    headers = {"content-type": "application/json", "x-request-id": one.request}
    try:
        async with http.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            if answer.status != 200:
                error = f"status {answer.status}: {(await answer.text())[:200]}"
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if one.first_s is None:
                    chunk = _decode_chunk(line[6:])
                    if chunk.choices:
                        one.first_s = now()
                        workers = (chunk.nvext or {}).get("worker_id", {})
                        one.instance = workers.get("prefill_worker_id", 0)
                elif b'"usage":{' in line:
                    details = (_decode_chunk(line[6:]).usage or {}).get("prompt_tokens_details")
                    one.cached = (details or {}).get("cached_tokens") or 0
        if one.first_s is None and not error:
            error = "no token came"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    one.error, one.ended_s = error, now()


def bodies_of(sessions: Sequence[ReplaySession], output: int) -> Bodies:
    """Bodies by session and turn; output: tokens of each answer."""
    bodies = {}
    for session in sessions:
        for turn in session.requests:
            prompt = turn.make_prompt()
            assert isinstance(prompt, np.ndarray)
            bodies[session.id, turn.turn] = msgspec.json.encode({
                "model": MODEL, "prompt": prompt.tolist(), "max_tokens": output,
                "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True},
                "nvext": {"extra_fields": ["worker_id"]},
            })  # fmt: skip
    return bodies


async def play(
    url: str, sessions: Sequence[ReplaySession], bodies: Bodies, pause_s: float, limit_s: float
) -> list[Sent]:
    """Send all, each turn a pause after its predecessor's end; requests that have not ended after
    `limit_s` are unfinished."""
    sent: list[Sent] = []
    begun_s = time.monotonic() + _WIRE_S

    def now() -> float:
        return time.monotonic() - begun_s

    async def one_session(http: aiohttp.ClientSession, session: ReplaySession) -> None:
        due_s = session.arrival_s
        for turn in session.requests:
            due_s = now() + min(turn.after_s, pause_s) if turn.turn else due_s
            await asyncio.sleep(max(due_s - now(), 0.0))
            one = Sent(f"{session.id}#{turn.turn}", turn.input_tokens, due_s)
            sent.append(one)
            await send(http, url, one, bodies[session.id, turn.turn], now)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as http:
        tasks = [asyncio.create_task(one_session(http, session)) for session in sessions]
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in tasks:
            if task not in late:
                task.result()
    return sent


async def run(arm: str, load: HarnessLoad, emulation: Emulation, seed: int, model: Path) -> Row:
    """One arm, one seed, with all processes its own."""
    sessions = load.sessions(seed)
    bodies = bodies_of(sessions, load.output)
    limit_s = 60.0 + 4 * load.requests / load.rate
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with dynamo(emulation, frontend_options(arm, folder), model, folder) as found:
            port = free_port(HOST)
            hello = {
                "port": port,
                "upstream": found.url,
                "ours": _ours(arm, found, emulation, seed),
            }
            command = [sys.executable, "-m", _PROXY]
            async with started(f"hop of {arm}", command, hello) as ask:
                url = f"http://{HOST}:{port}"
                sent = await play(url, sessions, bodies, load.pause, limit_s)
                decided = await ask({})
    nodes = {instance: node for node, instance in found.instances.items()}
    return {
        "arm": arm, "trace": load.trace, "seed": seed, "dilation": emulation.dilation,
        "load": asdict(load), **figures(sent, nodes, decided.get("decisions", {})),
        "learnt": {nodes[int(k)]: v for k, v in decided.get("learnt", {}).items()},
        "event_blocks": decided.get("blocks"),
    }  # fmt: skip


# -- the command ----------------------------------------------------------------------------------


def dynamo_bench(
    trace: Annotated[str, typer.Option(help="Workload by name or file.")] = "miniswe",
    cluster: Annotated[str, typer.Option(help=f"Of {', '.join(CLUSTERS)}.")] = "unlike",
    arms: Annotated[str, typer.Option(help="With semicolons or commas; see the docs.")] = _ARMS,
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    seed: Annotated[int, typer.Option(help="The first one.")] = 1,
    requests: Annotated[int, typer.Option(min=20, help="Of a run.")] = 300,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a wall second.")] = 15.0,
    dilation: Annotated[float, typer.Option(min=0.1, help="Wall seconds an emulated one.")] = 5.0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Begin no run after this time.")] = 1e6,
    out: Annotated[Path, typer.Option(help="Rows are appended, and go on from.")] = Path(
        "dynamo.jsonl"
    ),
    json_output: Json = False,
) -> None:
    """Dynamo's routers and ours before Dynamo's mockers, in real time: TTFT by arm."""
    with usage_errors():
        nodes = CLUSTERS[names(cluster, CLUSTERS, "--cluster")[0]]
        chosen = [arm.strip() for arm in arms.replace(";", "\n").split("\n")]
        if ";" not in arms and ":" not in arms:
            chosen = [arm.strip() for arm in arms.split(",")]
        load, emulation = HarnessLoad(trace, requests, rate), Emulation(nodes, dilation)
        load.sessions(seed)
        rows = read_lines(out)
    done = {(r["trace"], r["cluster"], r["arm"], r["seed"]) for r in rows}
    until_s, model = time.monotonic() + 60 * minutes, _tokenizer()
    dynamo_python()
    # In turns, so that drift hits all arms.
    turns = [
        (arm, each)
        for number, each in enumerate(range(seed, seed + seeds))
        for arm in (chosen if number % 2 == 0 else reversed(chosen))
    ]
    tuning = [(arm, TUNING_SEED) for arm in TUNING if TUNED in chosen]
    for arm, each in [*tuning, *turns]:
        if (trace, cluster, arm, each) in done or time.monotonic() > until_s:
            continue
        try:
            spec = tuned(rows, trace, cluster) if arm == TUNED else arm
            found = asyncio.run(run(spec, load, emulation, each, model))
        except PeerError as error:
            note(f"{arm} seed {each}: not run: {error}")
            continue
        row = {"cluster": cluster, **found, "arm": arm, "spec": spec}
        append_line(out, row)
        rows.append(row)
        note(_line(row))
    facts = result(
        emulated=True, header=EMULATED, dynamo=DYNAMO_VERSION,
        rows=summary([r for r in rows if r["cluster"] == cluster and r["seed"] != TUNING_SEED]),
        out=str(out),
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def _tokenizer() -> Path:
    """A model's folder: the frontend wants a tokenizer, though prompts come as token ids."""
    from kappa_deploy.app.model import prepare_model

    return Path(prepare_model(load_settings()).source)


def _line(row: Row) -> str:
    ttft = " ".join(f"{k} {v:.3f}" for k, v in row["ttft_s"].items() if v is not None)
    off = row.get("prediction", {}).get("later", {}).get("median")
    return (
        f"{row['trace']} {row['arm']} seed {row['seed']}: {row['measured']} measured, failed "
        f"{row['failed']}, TTFT {ttft} s, cached {row['cached']:.2f}, late {row['late_ms']:.0f} ms"
        f", {row['lasted_s']:.0f} s; shares {[round(v, 2) for v in row['share'].values()]}"
        + ("" if off is None else f"; predictions off {100 * off:.0f} %")
    )


def show(facts: Mapping[str, Any], console: Console) -> None:
    """A row per trace and arm."""
    console.print(facts["header"], highlight=False)

    def cell(line: Mapping[str, Any], key: str) -> str:
        if "ours_over_it" not in line:
            return ""
        found = line["ours_over_it"][key]
        interval = f" [{found['low']:.2f}, {found['high']:.2f}]" if found["count"] > 1 else ""
        return f"{found['mean']:.2f}{interval}"

    columns: dict[str, Column] = {
        "trace": "trace", "arm": "arm", "requests": "requests", "failed": "failed",
        **{f"{k} ms": f"ttft_s.{k}:ms" for k in FIGURES}, "cached": "cached:.2f",
        **{f"ours/it {k}": partial(cell, key=k) for k in FIGURES},
    }  # fmt: skip
    title = "TTFT, wall time; geometric means over seeds"
    console.print(rows_table(title, columns, facts["rows"], ("arm",)))
