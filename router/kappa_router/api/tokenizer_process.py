"""A process that tokenizes long prompts for a decider, seen from the decider.

A template or a tokenizer may take seconds, or gigabytes, over what a client sends, and only a
process can be ended. What runs in it is `kappa_router.api.tokenizer`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

import msgspec
import numpy as np

from kappa.incremental_tokenizer import Ids
from kappa_router.api import errors
from kappa_router.api.tokenizer import PromptTooLong

_START_S = 60.0
# Measured, 3.9 MB of one-byte tokens: 8 s on a free core, 28 s on a busy one.
_SHORTEST_S, _S_PER_BYTE = 5.0, 20e-6


class PromptRefused(Exception):  # the prompt's fault, as a template saw it
    """The template or tokenizer refused the prompt; `args`: the name of its error."""


def longest_s(prompt_bytes: int) -> float:
    """The most seconds that tokenizing a prompt of that size may take."""
    return _SHORTEST_S + _S_PER_BYTE * prompt_bytes


class TokenizerProcess:
    """A process of its own that tokenizes one prompt at a time, from the first one on.

    A prompt that takes longer than its bytes allow costs the process, and the next one starts
    another. Blocking: call it from a thread, and not from two at once; `close` is for any.
    """

    def __init__(self, *sources: str, module: str = "kappa_router.api.tokenizer") -> None:
        """`sources`: the tokenizers' folders or names; `module`: the program."""
        self._command = [sys.executable, "-m", module, *sources]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock, self._closed = threading.Lock(), False

    def tokens(
        self, plain: Mapping[str, Any], most_tokens: int | None = None, source: str = "",
        tenant: str = "",
    ) -> np.ndarray:  # fmt: skip
        """As `PromptTokenizer.tokens`, there; `source`: by which tokenizer, empty: the first.

        Raises:
            ApiError: 400, it took too long or too much memory; 503, the process did not start.
            PromptTooLong: it cannot fit `most_tokens`.
            PromptRefused: the template or the tokenizer refused it.
        """
        prompt = {
            "plain": plain, "most_tokens": most_tokens, "source": source, "tenant": tenant,
        }  # fmt: skip
        (ids,) = self._ask(prompt)
        return ids.astype(np.int64)

    def encode(self, texts: list[str], source: str = "") -> list[Ids]:
        """As `PromptTokenizer.encode`, there; raises as `tokens` does."""
        return self._ask({"texts": texts, "source": source})

    def _ask(self, prompt: Mapping[str, Any]) -> list[Ids]:
        """The ids in the process' answer to a question."""
        question = msgspec.json.encode(prompt)
        limit_s = longest_s(len(question))
        too_much = errors.PROMPT_NOT_TOKENIZED(prompt_bytes=len(question), limit_s=limit_s)
        pipe = self._started()
        try:
            pipe.send_bytes(question)
            if not pipe.poll(limit_s):
                raise TimeoutError
            answer = msgspec.msgpack.decode(pipe.recv_bytes())
        except (OSError, EOFError):
            self._end()
            raise too_much from None
        if "ids" in answer:
            return [np.frombuffer(ids, dtype="<i4") for ids in answer["ids"]]
        if "too_long" in answer:
            raise PromptTooLong(answer["too_long"])
        raise too_much if answer["error"] == "MemoryError" else PromptRefused(answer["error"])

    def close(self) -> None:
        """End the process, for good."""
        with self._lock:
            self._closed = True
        self._end()

    def _started(self) -> Connection:
        """The connection to a process that has loaded its tokenizer."""
        if self._process is not None and self._pipe is not None and self._process.poll() is None:
            return self._pipe
        self._end()
        pipe, its = Pipe()
        # It imports what this process does, wherever that comes from.
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with self._lock, its:
            if self._closed:
                pipe.close()
                raise errors.TOKENIZER_NOT_STARTED()
            self._pipe = pipe
            self._process = subprocess.Popen(
                self._command, stdin=its.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        try:
            if not pipe.poll(_START_S):
                raise TimeoutError
            pipe.recv_bytes()
        except (OSError, EOFError):
            self._end()
            raise errors.TOKENIZER_NOT_STARTED() from None
        return pipe

    def _end(self) -> None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()
