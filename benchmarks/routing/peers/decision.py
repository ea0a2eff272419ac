"""How long the real peers take to decide, in process, each in its own environment.

For `kappa bench router`, which times our decisions in the same run. sglang-router is not here: it
decides inside a proxy, whose round trip is not decision time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.routing.peers.process import ScriptError, run_script
from benchmarks.routing.peers.venvs import DYNAMO, PeerError, peer_python

WORKERS = 4
BLOCK_TOKENS = 16
_TIMEOUT_S = 300.0
_DYNAMO_WHAT = "select_and_reserve in process, ids as list, tokenization excluded"
_RAY_WHAT = {
    "prefix_tree": "PrefixTree match and insert in process, without its actor's calls, text of 4 "
    "characters a token",
    "pow_2": "PowerOfTwoChoicesRequestRouter's choice, queue lengths answered at once",
}


def decision_rows(
    lengths: Sequence[int],
    repeats: int = 200,
    missing: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """A row per peer, length in tokens and state of its index.

    {"peer", "version", "tokens", "workers", "index", "us": {"p50", "p99"}, "what"}; `index` is
    "empty" or "held" (one worker holds the whole prompt).

    Args:
        lengths: of the prompts, in tokens.
        repeats: decisions measured per row.
        missing: told of a peer that cannot be measured here, and why, which is then left out.

    Raises:
        PeerError: a peer cannot be measured here and `missing` is not given.
        ValueError: lengths or repeats are not positive.
    """
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise ValueError(
            f"lengths and repeats must be at least 1, got {list(lengths)} and {repeats}"
        )
    request = {
        "lengths": list(lengths),
        "repeats": repeats,
        "workers": WORKERS,
        "block_tokens": BLOCK_TOKENS,
    }
    rows: list[dict[str, Any]] = []
    for measure in (_dynamo_rows, _ray_rows):
        try:
            rows += measure(request)
        except (PeerError, ScriptError) as error:
            if missing is None:
                raise PeerError(str(error)) from error
            missing(str(error))
    return rows


def _dynamo_rows(request: dict[str, Any]) -> list[dict[str, Any]]:
    answers = run_script(peer_python(DYNAMO), "dynamo_decision.py", request, _TIMEOUT_S)
    return [
        _row("dynamo", DYNAMO.version, answer, answer["index"], _DYNAMO_WHAT) for answer in answers
    ]


def _ray_rows(request: dict[str, Any]) -> list[dict[str, Any]]:
    ours = Path(sys.executable)
    answers = run_script(ours, "ray_decision.py", request, _TIMEOUT_S)
    return [
        _row(
            f"ray_{answer['router']}", version("ray"), answer, "empty", _RAY_WHAT[answer["router"]]
        )
        for answer in answers
    ]


def _row(peer: str, of: str, answer: dict[str, Any], index: str, what: str) -> dict[str, Any]:
    return {
        "peer": peer,
        "version": of,
        "tokens": answer["tokens"],
        "workers": WORKERS,
        "index": index,
        "us": answer["us"],
        "what": what,
    }
