"""Prompts of `kappa bench serve`: single ones, each of them new, and conversations."""

from __future__ import annotations

from random import Random

MAX_TOKENS = 16
PROMPT_WORDS = {"short": 12, "1k": 970}
"""Words in a prompt, by its name; the tiny model's tokenizer makes a token of each."""
TALK_WORDS = {"8k": 8_000, "32k": 32_000, "128k": 128_000}
"""Words of a conversation's first turn."""
_MESSAGE_WORDS, _FOLLOW_UP_WORDS = 2_000, 12
# Tokens of a conversation per word, with a template or another tokenizer.
_ROOM = 1.2

_WORDS = ("the", "file", "test", "error", "value", "return", "class", "list", "name", "line")


def prompt_text(kind: str, random: Random) -> str:
    """A prompt of common words behind a number, so that no two begin alike."""
    words = random.choices(_WORDS, k=PROMPT_WORDS[kind])
    return f"{random.getrandbits(48)} {' '.join(words)}"


def opening(kind: str, random: Random) -> list[dict[str, str]]:
    """The messages of a conversation's first turn, from both sides; none begins as another."""
    left, messages = TALK_WORDS[kind], list[dict[str, str]]()
    while left > 0 or len(messages) % 2 == 0:
        words = random.choices(_WORDS, k=min(max(left, 1), _MESSAGE_WORDS))
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": f"{random.getrandbits(48)} {' '.join(words)}"})
        left -= len(words)
    return messages


def most_tokens(kind: str, requests: int) -> int:
    """Tokens that a context must hold for `requests` turns of a prompt of this kind."""
    turns = requests * (_FOLLOW_UP_WORDS + MAX_TOKENS + 32)
    return int(_ROOM * (TALK_WORDS.get(kind, 0) + turns)) if kind in TALK_WORDS else 0


def follow_up(random: Random) -> str:
    """A user's next words."""
    return " ".join(random.choices(_WORDS, k=_FOLLOW_UP_WORDS))
