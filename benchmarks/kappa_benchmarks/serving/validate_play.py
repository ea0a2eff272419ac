"""The HTTP side of `kappa bench validate`: plays scripts at a cluster, notes each request's times.

Prompts are turned into bodies before a run starts, so that the client takes little of the machine
that it measures; its share is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kappa_benchmarks.serving.client import ClusterClient, usage
from kappa_benchmarks.serving.validate_scripts import FORCED_TOKEN, Script
from kappa_loadtest.client import Prepared

_LEAD_S = 0.3
# Reports of the last steps, and with them admissions, follow a moment later.
_SETTLE_S = 1.2
_MORE_DECISIONS = 64


class Answered(msgspec.Struct):
    """One request; real seconds of the client's clock."""

    # From the start of the run.
    sent_s: float
    prompt_tokens: int
    request_id: str = ""
    node: str = ""
    ttft_s: float = 0.0
    # Empty on success.
    error: str = ""
    # From sending to the router's decision, and from there to the first token. None: the cluster
    # reported no outcome.
    decided_after_s: float | None = None
    engine_ttft_s: float | None = None


class Played(msgspec.Struct):
    """One run."""

    # In order of sending.
    answers: list[Answered] = []
    seconds: float = 0.0
    # CPU of this whole process, over one core's.
    client_cpu_share: float = 0.0
    # Of the nodes' GPU time until the last answer.
    busy_share: float = 0.0
    # Of the steps: those that could not keep their pace.
    overrun_share: float = 0.0

    def ttfts_s(self) -> NDArray[np.float64]:
        return np.array([answer.ttft_s for answer in self.answers if not answer.error])


async def play(client: ClusterClient, scripts: Sequence[Script]) -> Played:
    """Send every session at its time, each turn a pause after the answer before it."""
    prepared = []
    for script in scripts:
        forced = {"allowed_token_ids": [FORCED_TOKEN]}
        prepared.append([
            client.prepare(one.prompt.tolist(), one.output_tokens, **forced)
            for one in script.requests
        ])  # fmt: skip
    before = await client.nodes()
    played = Played()
    start_s = time.monotonic() + _LEAD_S
    cpu_s = time.process_time()
    async with asyncio.TaskGroup() as sessions:
        for script, bodies in zip(scripts, prepared, strict=True):
            sessions.create_task(_session(client, script, bodies, start_s, played))
    played.seconds = time.monotonic() - start_s
    elapsed_s = played.seconds + _LEAD_S
    played.client_cpu_share = (time.process_time() - cpu_s) / elapsed_s
    await asyncio.sleep(_SETTLE_S)
    used = usage(before, await client.nodes())
    # Reports are taken over a longer time than the run: idle seconds do not count.
    played.busy_share = used.load * (elapsed_s + _SETTLE_S) / elapsed_s
    played.overrun_share = used.overrun_share
    played.answers.sort(key=lambda answer: answer.sent_s)
    decisions = await client.decisions(len(played.answers) + _MORE_DECISIONS)
    by_request = {decision["request_id"]: decision for decision in decisions}
    # The cluster is on this machine: its wall clock and ours are one.
    start_wall_s = time.time() - time.monotonic() + start_s
    for answer in played.answers:
        decision = by_request.get(answer.request_id)
        if decision is not None:
            answer.decided_after_s = decision["time_s"] - start_wall_s - answer.sent_s
            answer.engine_ttft_s = decision["actual"]["ttft_s"]
    return played


async def _session(
    client: ClusterClient, script: Script, bodies: Sequence[Prepared], start_s: float, into: Played
) -> None:
    due_s = start_s + script.start_s
    for number, (one, body) in enumerate(zip(script.requests, bodies, strict=True)):
        await asyncio.sleep(due_s + (one.after_s if number else 0.0) - time.monotonic())
        record = await client.send(body)
        first_s = record.sent_s if record.first_token_s is None else record.first_token_s
        into.answers.append(
            Answered(
                record.sent_s - start_s, len(one.prompt), record.request_id, record.node,
                first_s - record.sent_s, record.error,
            )
        )  # fmt: skip
        due_s = record.ended_s
        if record.error:
            return
