"""Recorded chat sessions: several turns each, where every turn's input extends the one before.

Agent traces are the case the router exists for: nearly all of a turn's tokens were seen in the
turn before. The readers here keep order and pauses, so that the simulator and the load test can
replay them. Formats are JSON lines, plain or gzipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kappa_workload.reading import Seconds, WorkloadError, json_lines

# The mini-SWE harness' message after each reply: the result of its command, or a complaint that
# there was not exactly one command.
_HARNESS_MESSAGE = re.compile(
    r"\n\n(?=<returncode>|Please always provide EXACTLY ONE action in triple backticks)"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, with the recorded reply."""

    t_s: float  # since the session started
    input_text: str  # as serialised by the source
    output_text: str
    output_tokens: int | None = None  # requested length of the reply; None: as recorded


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation, in order of time."""

    id: str
    turns: tuple[Turn, ...]


class _SessionRecord(msgspec.Struct):
    session: str
    t_s: Seconds
    input: str
    output: str


def demo_sessions_path() -> Path:
    """Path of the sessions that ship with this package
    (``workload/kappa_workload/data/README.md``)."""
    return Path(__file__).parent / "data" / "miniswe_slice.jsonl.gz"


def read_sessions(path: str | Path) -> list[Session]:
    """Read sessions from JSON lines of ``session, t_s, input, output``; ``.gz`` is read as is.

    Lines of different sessions may be mixed; within one session ``t_s`` must not go back.
    Sessions come in the order of their first line.

    Raises:
        WorkloadError: if the file is absent, damaged or breaks these rules.
    """
    turns: dict[str, list[Turn]] = {}
    for where, record in json_lines(Path(path), _SessionRecord):
        earlier = turns.setdefault(record.session, [])
        if earlier and record.t_s < earlier[-1].t_s:
            raise WorkloadError(
                f"{where}: t_s {record.t_s} is before the previous turn's {earlier[-1].t_s}"
            )
        earlier.append(Turn(record.t_s, record.input, record.output))
    return [Session(id=session, turns=tuple(group)) for session, group in turns.items()]


def as_messages(turn: Turn, replies: Sequence[str] = ()) -> list[dict[str, str]]:
    """Split a turn's input into OpenAI chat messages.

    A mini-SWE input carries no role markers: it is the task followed by everything the harness
    said, joined by blank lines, without the model's replies. Each part becomes a ``user`` message.
    The split depends only on the text before it, so the messages of turn k+1 begin with those of
    turn k. An input of another format is one ``user`` message.

    Args:
        turn: the turn to split.
        replies: what the assistant said after the first, second, … part (the recorded outputs of
            the earlier turns, or a live model's). They are placed in between, which gives a chat
            with alternating roles for the models that insist on one. Those beyond the last part
            but one are ignored.
    """
    parts = _HARNESS_MESSAGE.split(turn.input_text)
    messages: list[dict[str, str]] = []
    for index, part in enumerate(parts):
        messages.append({"role": "user", "content": part})
        if index < min(len(replies), len(parts) - 1):
            messages.append({"role": "assistant", "content": replies[index]})
    return messages
