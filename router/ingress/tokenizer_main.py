"""The program that tokenizes long prompts: `python -m router.ingress.tokenizer_main SOURCE`.

Its standard input is a socket to the ingress, on which frames come as `multiprocessing.connection`
sends them. It dies with its parent, and each prompt may take only so much memory. The other side is
`router.ingress.tokenizer_process`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Measured: 233 bytes of memory for each of 3.9 million one-byte tokens.
_SPARE_BYTES, _MEMORY_PER_BYTE = 256 << 20, 400
_LARGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def serve(tokenizer: Any, pipe: Connection) -> None:
    """Answer until the ingress is gone: ids as little-endian int32 after a space, or a JSON object
    with `error` or `too_long`."""
    from router.ingress.prompt_tokenizer import PromptTooLong

    pipe.send_bytes(b"ready")
    while True:
        question = pipe.recv_bytes()
        _bound_memory(_data_bytes() + _SPARE_BYTES + _MEMORY_PER_BYTE * len(question))
        try:
            asked = json.loads(question)
            ids = tokenizer.tokens(asked["plain"], asked["most_tokens"])
            answer = b" " + ids.astype("<i4").tobytes()
        except PromptTooLong as error:
            answer = json.dumps({"too_long": error.args[0]}).encode()
        except MemoryError:
            # numpy has one of its own name.
            answer = json.dumps({"error": MemoryError.__name__}).encode()
        except Exception as error:
            # Not its text, which may quote the prompt.
            answer = json.dumps({"error": type(error).__name__}).encode()
        pipe.send_bytes(answer)
        if len(question) > _LARGE_BYTES:
            # What a long prompt took would stay for good.
            ctypes.CDLL(None).malloc_trim(0)


def _data_bytes() -> int:
    """What this process has of private memory that it may write, as RLIMIT_DATA counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def _bound_memory(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


def _loaded(source: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from router.ingress.prompt_tokenizer import PromptTokenizer

    return PromptTokenizer(source)


def main(source: str, load: Callable[[str], Any] = _loaded) -> None:
    """Load the tokenizer of `source` and serve on standard input."""
    _die_with_parent()
    # `transformers` imports them if they are there; a tokenizer needs none of them, and they are
    # three quarters of the memory.
    for name in ("torch", "torchvision", "scipy", "sklearn", "pandas"):
        sys.modules[name] = None  # type: ignore[assignment]
    with contextlib.suppress(EOFError, OSError):
        serve(load(source), Connection(os.dup(0)))


if __name__ == "__main__":
    main(sys.argv[1])
