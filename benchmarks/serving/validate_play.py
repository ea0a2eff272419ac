"""The HTTP side of `kappa bench validate`: plays scripts at a cluster, notes what each request saw.

Prompts are turned into bodies before a run starts, so that the client takes little of the machine
that it measures; what it took is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cluster_client import ClusterClient, Prepared
from benchmarks.serving.scoring import usage
from benchmarks.serving.validate_traffic import FORCED_TOKEN, Script

_LEAD_S = 0.3
# Reports of the last steps, and with them admissions, follow a moment later.
_SETTLE_S = 1.2
_MORE_DECISIONS = 64


class Answered(msgspec.Struct):
    """One request: seconds are real ones of the client's clock, from the start of the run.

    `error` is empty on success. Token counts are the engine's own; None if it reported none.
    """

    session: str
    turn: int
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    request_id: str = ""
    node: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str = ""
    decided_after_s: float | None = None
    engine_ttft_s: float | None = None
    predicted_s: float | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    new_tokens: int | None = None


class Played(msgspec.Struct):
    """One run: every request in order of sending, and what the run took of client and nodes.

    `client_cpu_share`: of one core, this whole process; `busy_share`: of the nodes' gpu time until
    the last answer; `overrun_share`: steps that could not keep their pace.
    """

    answers: list[Answered] = []
    seconds: float = 0.0
    client_cpu_share: float = 0.0
    busy_share: float = 0.0
    overrun_share: float = 0.0

    def ttfts_s(self) -> NDArray[np.float64]:
        return np.array([answer.ttft_s for answer in self.answers if not answer.error])


async def play(client: ClusterClient, scripts: Sequence[Script]) -> Played:
    """Send every session at its time, each turn a pause after the answer before it."""
    sent = [
        [
            client.prepare(ask.prompt.tolist(), ask.output_tokens, allowed_token_ids=[FORCED_TOKEN])
            for ask in script.asks
        ]
        for script in scripts
    ]
    before = await client.nodes()
    played = Played()
    start_s = time.monotonic() + _LEAD_S
    cpu_s = time.process_time()
    await asyncio.gather(
        *(
            _session(client, script, prepared, start_s, played)
            for script, prepared in zip(scripts, sent, strict=True)
        )
    )
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
    _add_decisions(played, decisions, start_s)
    return played


async def _session(
    client: ClusterClient,
    script: Script,
    prepared: Sequence[Prepared],
    start_s: float,
    played: Played,
) -> None:
    next_s = start_s + script.start_s
    for turn, (ask, one) in enumerate(zip(script.asks, prepared, strict=True)):
        await asyncio.sleep(next_s + (ask.after_s if turn else 0.0) - time.monotonic())
        record = await client.send(one, script.session, turn)
        first_s = record.sent_s if record.first_token_s is None else record.first_token_s
        played.answers.append(
            Answered(
                script.session, turn, record.sent_s - start_s, len(ask.prompt), ask.output_tokens,
                record.request_id, record.node, first_s - record.sent_s,
                record.ended_s - record.sent_s, record.error,
            )
        )  # fmt: skip
        next_s = record.ended_s
        if record.error:
            return


def _add_decisions(played: Played, decisions: Sequence[dict[str, Any]], start_s: float) -> None:
    records = {record["request_id"]: record for record in decisions}
    # The cluster is on this machine: its wall clock and ours are one.
    wall_s = time.time() - time.monotonic() + start_s
    for answer in played.answers:
        record = records.get(answer.request_id)
        if record is None:
            continue
        actual = record["actual"]
        answer.decided_after_s = record["time_s"] - wall_s - answer.sent_s
        answer.engine_ttft_s = actual["ttft_s"]
        answer.predicted_s = record["predicted"]["ttft_s"]
        answer.device_tokens = actual["device_tokens"]
        answer.host_tokens = actual["cached_tokens"]
        answer.new_tokens = actual["new_tokens"]
