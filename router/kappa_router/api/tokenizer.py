"""The model's own tokenizer and chat template, from plain values to token ids; and as a program.

`python -m kappa_router.api.tokenizer SOURCE...` tokenizes long prompts for a decider. Its standard
input is a socket, on which frames come as `multiprocessing.connection` sends them. It dies with its
parent, and each prompt may take only so much memory; its other side is `kappa_router.api.render`.
So this file imports little: no Ray, no vLLM, no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kappa.host import die_with_parent
from kappa.incremental_tokenizer import Encode, Ids, IncrementalTokenizer

# A template that looks into a list of content parts gets the list from vLLM, any other one string.
_LOOKS_INTO_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content")
# Bytes of text that one byte after the normalizer can come from, at most. NFC: 3.5, of the 7 bytes
# U+1FBE U+0308 U+0301, which become U+0390 of 2; a test tries every character.
_SHRINKS = {"": 1, "NFC": 4}
# Pre-tokenizers that only cut; others, or a split that removes, make text disappear.
_CUTTING = ("ByteLevel", "Digits", "Split")
_BYTE_VALUES = 256
# Measured: 233 bytes of memory for each of 3.9 million one-byte tokens.
_SPARE_BYTES, _MEMORY_PER_BYTE = 256 << 20, 400
_LARGE_BYTES = 1 << 20


class PromptTooLong(Exception):  # about a prompt, not a fault
    """A text has too many bytes for the context, whatever its tokens; `args`: its bytes."""


class PromptTokenizer:
    """Tokenizes for one model; slow work, to be called off the event loop.

    longest_token_bytes: bytes of text that one token stands for, at most; None where that is not
    certain.
    """

    def __init__(self, source: str) -> None:
        """Load the tokenizer of `source` (folder or Hugging Face name)."""
        # The program keeps torch away from it first.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        template = str(self._tokenizer.chat_template or "")
        self.takes_parts = bool(_LOOKS_INTO_PARTS.search(template))
        self.takes_developers = "developer" in template
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        self.longest_token_bytes = longest_token_bytes(backend)
        # The first call takes truncation and padding out of the backend, which `tokens` calls.
        self._tokenizer("a")
        self._incremental = None if backend is None else IncrementalTokenizer(backend)

    def tokens(
        self, plain: Mapping[str, Any], most_tokens: int | None = None, tenant: str = "",
        encode: Encode | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Token ids, int64, of a text or of messages with what their template is given. Only parts
        that this tenant has not sent lately are encoded (`kappa.incremental_tokenizer`).

        plain: `{"text": str}` or `{"chat": {...}}` with the arguments of `apply_chat_template`, and
        `add_special_tokens`. most_tokens: the largest context; None: not known. encode: encodes
        those parts; by default this tokenizer does.

        Raises:
            PromptTooLong: it cannot fit, found before it is tokenized.
            Exception: whatever a template, or `encode`, raises.
        """
        if "text" in plain:
            text = plain["text"]
        else:
            text = str(self._tokenizer.apply_chat_template(**plain["chat"], tokenize=False))
        if most_tokens is not None and self.longest_token_bytes is not None:
            text_bytes = len(text.encode(errors="replace"))
            if text_bytes > most_tokens * self.longest_token_bytes:
                raise PromptTooLong(text_bytes)
        special = plain["add_special_tokens"]
        if self._incremental is None:
            ids = self._tokenizer(text, add_special_tokens=special).input_ids
            return np.asarray(ids, dtype=np.int64)
        found = self._incremental.look_up(text, tenant)
        ids = self._incremental.finish(found, add_special_tokens=special, encode=encode)
        return ids.astype(np.int64)

    def encode(self, texts: list[str]) -> list[Ids]:
        """Ids of parts of prompts, int32; nothing is remembered."""
        assert self._incremental is not None
        return self._incremental.encode_parts(texts)


def longest_token_bytes(backend: Any) -> int | None:
    """Bytes of text that one token stands for, at most; None if that cannot be said for sure.

    It can of a byte-level vocabulary with all 256 bytes in it, before which nothing takes text away
    but a normalizer with a known worst case. backend: a `tokenizers.Tokenizer`.
    """
    if backend is None or backend.truncation is not None:
        return None
    shrinks = _SHRINKS.get(str(_state(backend.normalizer).get("type", "")))
    added = backend.get_added_tokens_decoder().values()
    if shrinks is None or any(token.lstrip or token.rstrip for token in added):
        return None
    cuts = _flat(_state(backend.pre_tokenizer))
    keep = all(c["type"] in _CUTTING and c.get("behavior") != "Removed" for c in cuts)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    single_bytes = sum(len(token) == 1 for token in vocabulary)
    byte_level = any(c["type"] == "ByteLevel" for c in cuts) and single_bytes >= _BYTE_VALUES
    if not keep or not byte_level:
        return None
    # A character of a byte-level token is a byte; an added token is found as the text it is.
    lengths = [len(token) for token in vocabulary]
    lengths += [len(token.content.encode()) for token in added]
    return max(lengths) * shrinks


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state or {}


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A pre-tokenizer's parts, those of sequences one by one."""
    if state.get("type") != "Sequence":
        return [state] if state else []
    return [part for inner in state["pretokenizers"] for part in _flat(inner)]


def keep_models_away() -> None:
    """Have `transformers` load tokenizers and nothing else in this process, before it is imported:
    it imports these if they are there, which are three quarters of its memory, and seconds; numba
    the linear algebra, which no loop of ours needs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torch", "torchvision", "scipy", "scipy.linalg", "sklearn", "pandas"):
        # A module that is here already costs nothing more.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


# -- the program ------------------------------------------------------------------------------


def main(sources: Sequence[str], load: Callable[[str], Any] = PromptTokenizer) -> None:
    """Load the tokenizers of `sources` and serve on standard input until the decider is gone.

    A question is a prompt (`plain`) or `texts` that are parts of one, in JSON; answers (`_answer`)
    are in msgpack.
    """
    die_with_parent()
    keep_models_away()
    with contextlib.suppress(EOFError, OSError):
        tokenizers, pipe = {source: load(source) for source in sources}, Connection(os.dup(0))
        pipe.send_bytes(b"ready")
        while True:
            question = pipe.recv_bytes()
            _bound_memory(_SPARE_BYTES + _MEMORY_PER_BYTE * len(question))
            pipe.send_bytes(msgspec.msgpack.encode(_answer(tokenizers, question)))
            if len(question) > _LARGE_BYTES:
                # What a long prompt took would stay for good.
                ctypes.CDLL(None).malloc_trim(0)


def _answer(tokenizers: Mapping[str, Any], question: bytes) -> dict[str, Any]:
    """`ids` of the prompt or of each text, as bytes of little-endian int32; else `too_long`, the
    prompt's bytes, or `error`, the name of what was raised."""
    try:
        given = msgspec.json.decode(question)
        tokenizer = tokenizers[given["source"] or next(iter(tokenizers))]
        if "texts" in given:
            parts = tokenizer.encode(given["texts"])
        else:
            parts = [tokenizer.tokens(given["plain"], given["most_tokens"], given["tenant"])]
        return {"ids": [part.astype("<i4").tobytes() for part in parts]}
    except PromptTooLong as error:
        return {"too_long": error.args[0]}
    except MemoryError:
        # numpy has one of its own name.
        return {"error": MemoryError.__name__}
    except Exception as error:
        # Not its text, which may quote the prompt.
        return {"error": type(error).__name__}


def _bound_memory(more_bytes: int) -> None:
    """Allow so much more of private memory that may be written, as RLIMIT_DATA counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit_bytes = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
