"""Names the conversation that a request belongs to, by its body."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kappa_router.api.metadata import CONVERSATION_KEYS

# A text's conversation is known by its first characters, or token ids, in steps of `_STRIDE`; as
# many texts are remembered.
_OPENING, _STRIDE, _MOST_NAMES = 1024, 8, 1 << 16
_FACTORS = np.random.default_rng(0).integers(1 << 64, size=_OPENING, dtype=np.uint64) | 1


class Conversations:
    """Names of conversations: what the client calls one, else how it begins.

    A chat begins with all up to its first question. A bare prompt has no such end: it is named
    after the longest earlier one that it begins with, as far as its first 1,024 characters or ids.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def of(self, opening: str | list[int]) -> str:
        """The name of a body's conversation, by its `opening_of`; empty where it has none."""
        if isinstance(opening, str):
            return opening
        whole = opening[-1]
        known = (self._names[one] for one in reversed(opening) if one in self._names)
        self._names[whole] = name = next(known, f"{whole:016x}")
        self._names.move_to_end(whole)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)
        return name


def opening_of(data: Mapping[str, Any]) -> str | list[int]:
    """The name of a body's conversation, empty where it has no prompt that can be read; of a bare
    prompt the names of all its beginnings, the longest last."""
    named = next((data[key] for key in CONVERSATION_KEYS if isinstance(data.get(key), str)), "")
    messages, prompt = data.get("messages", data.get("input")), data.get("prompt")
    opening = messages if messages is not None else prompt
    if named or not opening or not isinstance(opening, list | str):
        return named
    with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
        if messages is None or isinstance(opening, str):
            return _beginnings(opening[:_OPENING])
        first = (i for i, one in enumerate(opening) if isinstance(one, dict) and _asks(one))
        return _digest(opening[: next(first, 0) + 1])
    return ""


def _beginnings(opening: list[Any] | str) -> str | list[int]:
    """Names of the beginnings of a text or ids, by sums with random factors: a hundred digests
    would cost as much as the whole rest of reading a short body."""
    if len(opening) < _STRIDE:
        return _digest(opening)
    if not isinstance(opening, str) and any(type(one) is not int for one in opening):
        opening = msgspec.json.encode(opening).decode()[:_OPENING]
    if isinstance(opening, str):
        values = np.frombuffer(opening.encode("utf-32-le", "surrogatepass"), "<u4")
    else:
        values = np.array(opening, dtype=np.int64)
    sums = np.cumsum((values.astype(np.uint64) + 1) * _FACTORS[: len(values)])
    beginnings: list[int] = sums[_STRIDE - 1 :: _STRIDE].tolist()
    return beginnings


def _digest(part: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(part), digest_size=8).hexdigest()


def _asks(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "user"
