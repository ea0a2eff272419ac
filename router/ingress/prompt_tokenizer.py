"""The model's own tokenizer and chat template, from plain values to token ids.

Imports little, since the tokenizer's own process imports it, too: no Ray, no vLLM, no torch. Slow
work: call it off the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from transformers import AutoTokenizer

# A template that looks into a list of content parts gets the list from vLLM, any other one string.
_LOOKS_INTO_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content")
# Bytes of text that one byte after the normalizer can come from, at most. NFC: 3.5, of the 7 bytes
# U+1FBE U+0308 U+0301, which become U+0390 of 2; a test tries every character.
_SHRINKS = {"": 1, "NFC": 4}
# Pre-tokenizers that only cut; others, or a split that removes, make text disappear.
_CUTTING = ("ByteLevel", "Digits", "Split")
_BYTE_VALUES = 256


class PromptTooLong(Exception):  # about a prompt, not a fault
    """A text has too many bytes for the context, whatever its tokens; `args`: its bytes."""


class PromptTokenizer:
    """Tokenizes for one model. `longest_token_bytes`: bytes of text that one token stands for, at
    most; None where that is not certain."""

    def __init__(self, source: str, chat_template: str | None = None) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        self._template = chat_template
        template = str(chat_template or self._tokenizer.chat_template or "")
        self.takes_parts = bool(_LOOKS_INTO_PARTS.search(template))
        self.takes_developers = "developer" in template
        self.longest_token_bytes = longest_token_bytes(
            getattr(self._tokenizer, "backend_tokenizer", None)
        )

    def tokens(self, plain: Mapping[str, Any], most_tokens: int | None = None) -> np.ndarray:
        """Token ids, int64, of a text or of messages with what their template is given.

        plain: `{"text": str}` or `{"chat": {...}}` with the arguments of `apply_chat_template`, and
        `add_special_tokens`. most_tokens: the largest context; None: not known.

        Raises:
            PromptTooLong: it cannot fit, found before it is tokenized.
            Exception: whatever a template raises.
        """
        text = plain["text"] if "text" in plain else self._rendered(plain["chat"])
        self._check(text, most_tokens)
        ids = self._tokenizer(text, add_special_tokens=plain["add_special_tokens"])["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def _rendered(self, chat: Mapping[str, Any]) -> str:
        template = chat.get("chat_template") or self._template
        return str(
            self._tokenizer.apply_chat_template(
                **{**chat, "chat_template": template}, tokenize=False
            )
        )

    def _check(self, text: str, most_tokens: int | None) -> None:
        if most_tokens is None or self.longest_token_bytes is None:
            return
        text_bytes = len(text.encode(errors="replace"))
        if text_bytes > most_tokens * self.longest_token_bytes:
            raise PromptTooLong(text_bytes)


def longest_token_bytes(backend: Any) -> int | None:
    """Bytes of text that one token stands for, at most; None if that cannot be said for sure.

    It can of a byte-level vocabulary with all 256 bytes in it, before which nothing takes text away
    but a normalizer whose worst is known. backend: a `tokenizers.Tokenizer`.
    """
    if backend is None or backend.truncation is not None:
        return None
    shrinks = _SHRINKS.get(_normalizer(backend))
    added = backend.get_added_tokens_decoder().values()
    if shrinks is None or any(token.lstrip or token.rstrip for token in added):
        return None
    parts = list(_parts(_state(backend.pre_tokenizer)))
    if not any(part["type"] == "ByteLevel" for part in parts) or not all(map(_keeps, parts)):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if sum(len(token) == 1 for token in vocabulary) < _BYTE_VALUES:
        return None
    # A character of a byte-level token is a byte; an added token is found as the text it is.
    lengths = [len(token) for token in vocabulary]
    lengths += [len(token.content.encode()) for token in added]
    return max(lengths) * shrinks


def _normalizer(backend: Any) -> str:
    state = _state(backend.normalizer)
    return str(state.get("type", "")) if state else ""


def _state(part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _parts(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state.get("type") == "Sequence":
        for part in state["pretokenizers"]:
            yield from _parts(part)
    elif state:
        yield state


def _keeps(part: Mapping[str, Any]) -> bool:
    return part["type"] in _CUTTING and part.get("behavior") != "Removed"
