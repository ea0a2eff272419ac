"""A process of its own that tokenizes one prompt at a time, and can be ended.

This is the ingress' side; `router.ingress.tokenizer_main` is the program, with a socket as its
standard input. It is started for the first prompt, not forked. A prompt that takes longer than its
bytes allow costs the process, and the next prompt starts another. Blocking: call it from a thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from router.errors import prompt_not_tokenized, tokenizer_not_started
from router.ingress.prompt_tokenizer import PromptTooLong

_START_S = 60.0
# Measured, 3.9 MB of one-byte tokens: 8 s on a free core, 28 s on a busy one.
_SHORTEST_S, _S_PER_BYTE = 5.0, 20e-6
# The root that this package is imported from: the process needs the same.
_ROOT = str(Path(__file__).parents[2])


class NotRendered(Exception):  # the prompt's fault, as a template saw it
    """The template or tokenizer refused the prompt; `args`: the name of its error."""


def longest_s(prompt_bytes: int) -> float:
    """Seconds that tokenizing so many bytes may take."""
    return _SHORTEST_S + _S_PER_BYTE * prompt_bytes


class TokenizerProcess:
    """The process as the ingress sees it. Not for two threads at once; `close` is for any."""

    def __init__(self, source: str, module: str = "router.ingress.tokenizer_main") -> None:
        """`source`: the tokenizer's folder or name; `module`: what is run."""
        self._command = [sys.executable, "-m", module, source]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock, self._closed = threading.Lock(), False

    @property
    def pid(self) -> int | None:
        """The running process' id; None while there is none."""
        return None if self._process is None else self._process.pid

    def tokens(self, plain: Mapping[str, Any], most_tokens: int | None = None) -> np.ndarray:
        """As `PromptTokenizer.tokens`, there.

        Raises:
            ApiError: 400, it took too long or too much memory; 503, the process did not start.
            PromptTooLong: it cannot fit `most_tokens`.
            NotRendered: the template or the tokenizer refused it.
        """
        question = json.dumps({"plain": plain, "most_tokens": most_tokens}).encode()
        pipe = self._started()
        limit_s = longest_s(len(question))
        try:
            answer = self._asked(pipe, question, limit_s)
        except (OSError, EOFError):
            self._end()
            raise prompt_not_tokenized(len(question), limit_s) from None
        if answer[:1] == b"{":
            _raise(json.loads(answer), len(question), limit_s)
        return np.frombuffer(answer[1:], dtype="<i4").astype(np.int64)

    def close(self) -> None:
        """End the process, for good."""
        with self._lock:
            self._closed = True
        self._end()

    def _asked(self, pipe: Connection, question: bytes, limit_s: float) -> bytes:
        pipe.send_bytes(question)
        if not pipe.poll(limit_s):
            raise TimeoutError
        return pipe.recv_bytes()

    def _started(self) -> Connection:
        """The connection to a process that has loaded its tokenizer."""
        process, pipe = self._process, self._pipe
        if process is not None and pipe is not None and process.poll() is None:
            return pipe
        self._end()
        try:
            pipe = self._start()
            if not pipe.poll(_START_S):
                raise TimeoutError
            pipe.recv_bytes()
        except (OSError, EOFError):
            self._end()
            raise tokenizer_not_started() from None
        return pipe

    def _start(self) -> Connection:
        mine, its = Pipe()
        paths = [_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with self._lock, its:
            if self._closed:
                mine.close()
                raise tokenizer_not_started()
            self._pipe = mine
            self._process = subprocess.Popen(
                self._command, stdin=its.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        return mine

    def _end(self) -> None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()


def _raise(answer: Mapping[str, Any], asked_bytes: int, limit_s: float) -> None:
    if "too_long" in answer:
        raise PromptTooLong(answer["too_long"])
    if answer["error"] == "MemoryError":
        raise prompt_not_tokenized(asked_bytes, limit_s)
    raise NotRendered(answer["error"])
