"""Texts of a workload, as chats: kept beside the shapes and turned into messages when asked.

The readers of formats that hold texts give one of these. A copy of a workload begins every chat
with its number, so that copies share no beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workload.documents import Question
from workload.prompts import filler
from workload.shapes import Message


@dataclass(frozen=True, slots=True, eq=False)
class Talks:
    """Conversations, each prompt of which is everything said before.

    talks: the messages of each session. prompts: of each session, how many of them each turn sends.
    """

    talks: Sequence[tuple[Message, ...]]
    prompts: Sequence[tuple[int, ...]]

    def messages(self, session: int, turn: int, copy: int) -> tuple[Message, ...]:
        """What was said before the turn's answer."""
        said = self.talks[session][: self.prompts[session][turn]]
        return _marked(said, copy)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Whole prompts, each sent as one message of the user.

    prompt: the prompt of a session's turn, both by their places.
    """

    prompt: Callable[[int, int], str]

    def messages(self, session: int, turn: int, copy: int) -> tuple[Message, ...]:
        """The prompt as a chat."""
        return _marked(({"role": "user", "content": self.prompt(session, turn)},), copy)


@dataclass(frozen=True, slots=True, eq=False)
class Chats:
    """Requests that each have all their messages: by session and turn."""

    chats: Sequence[Sequence[tuple[Message, ...]]]

    def messages(self, session: int, turn: int, copy: int) -> tuple[Message, ...]:
        """The turn's messages as they stand."""
        return _marked(self.chats[session][turn], copy)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents whose bodies are not at hand: a summary, then plain words up to their length.

    asked: the questions of each session, in order. tokens: the length of each session's document.
    summaries: text and tokens of each document's summary; a document without one is plain words.
    """

    asked: Sequence[tuple[Question, ...]]
    tokens: Sequence[int]
    summaries: dict[str, tuple[str, int]]

    def messages(self, session: int, turn: int, copy: int) -> tuple[Message, ...]:
        """The document, the same for every question on it, and the turn's question."""
        question = self.asked[session][turn]
        summary, summary_tokens = self.summaries.get(question.document, ("", 0))
        words = filler(question.document, self.tokens[session] - summary_tokens)
        parts = [part for part in (summary, words, question.text) if part]
        return _marked(({"role": "user", "content": "\n\n".join(parts)},), copy)


def _marked(messages: tuple[Message, ...], copy: int) -> tuple[Message, ...]:
    if not copy:
        return messages
    first = messages[0] | {"content": f"{copy} {messages[0]['content']}"}
    return (first, *messages[1:])
