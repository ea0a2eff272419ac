"""Our client on the plan that the others get, in a process of its own like theirs.

    python -m benchmarks.serving.clients.ours < plan.json

It is the client of `kappa replay`: the same runner, endpoint and journal. The plan comes as JSON on
stdin; the records stay in the folder that is given as the argument.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.serving.clients.common import Answer, ClientError, Plan, Played, run
from loadtest.client import EndpointSettings
from loadtest.journal import RECORDS, Journal, JournalError, read_records
from loadtest.run import play as replay
from loadtest.runner import Counts, RunSettings
from workload.replay import ReplaySession, Request

NAME = "kappa replay"
_ROOT = Path(__file__).parents[3]


def play(plan: Plan, python: Path, folder: Path) -> Played:
    """Have our client send the plan; `folder` is empty and stays behind with its files.

    Raises:
        ClientError: it failed, or its records cannot be read.
    """
    command = [str(python), "-m", "benchmarks.serving.clients.ours", str(folder / "run")]
    environment = {"PYTHONPATH": str(_ROOT)}
    given = json.dumps(asdict(plan))
    _, cpu_s = run(NAME, command, plan.timeout_s, environment, stdin=given)
    return read(folder / "run", cpu_s)


def sessions(plan: Plan) -> Iterator[ReplaySession]:
    """A session of one request per prompt, evenly apart, or all there from the start."""
    for number, prompt in zip(count(), plan.prompts):
        due_s = number / plan.rate_rps if plan.rate_rps is not None else 0.0
        request = Request(
            session=str(number), turn=0, tenant="", arrival_s=due_s, after_s=0.0,
            input_tokens=len(prompt.split()), output_tokens=plan.output_tokens,
            cached_tokens=0, new_tokens=len(prompt.split()), make_prompt=partial(str, prompt),
        )  # fmt: skip
        yield ReplaySession(str(number), "", due_s, (request,))


def read(folder: Path, cpu_s: float = math.nan) -> Played:
    """What the records of a run say.

    Raises:
        ClientError: they cannot be read.
    """
    answers: list[Answer] = []
    gaps: list[float] = []
    failed = 0
    begin_s, end_s = math.inf, -math.inf
    try:
        for record in read_records(folder / RECORDS):
            begin_s, end_s = min(begin_s, record.sent_s), max(end_s, record.ended_s)
            if record.error or record.first_token_s is None or record.last_token_s is None:
                failed += 1
                continue
            answers.append(
                Answer(
                    record.first_token_s - record.sent_s,
                    float("nan") if record.tpot_s is None else record.tpot_s,
                    record.last_token_s - record.sent_s,
                    record.sent_s - record.scheduled_s,
                )
            )
            gaps += record.gaps_s
    except JournalError as error:
        raise ClientError(f"{NAME}: {error}") from None
    return Played(tuple(answers), failed, max(end_s - begin_s, 0.0), tuple(gaps), cpu_s)


def main() -> None:
    """Send the plan on stdin."""
    given = json.load(sys.stdin)
    plan = Plan(**{**given, "prompts": tuple(given["prompts"])})
    journal = Journal.create(Path(sys.argv[1]), {"asked": {}, "workload": "bench clients"})
    try:
        asyncio.run(
            replay(
                EndpointSettings(plan.url, plan.model, ignore_eos=True),
                RunSettings(closed=plan.concurrency),
                sessions(plan),
                journal,
                counts=Counts(),
            )
        )
    finally:
        journal.close()


if __name__ == "__main__":
    main()
