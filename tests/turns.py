"""Live tests with clusters of their own, played by turns: all of them in every run took too long.

`.ci/run` counts its runs in `KAPPA_TURN`, and each plays one group: any `len(GROUPS)` runs in a row
play all. `KAPPA_TURN=1` chooses a group, `KAPPA_MORE_CLUSTERS=1` plays all at once.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

TURN, ALL = "KAPPA_TURN", "KAPPA_MORE_CLUSTERS"
GROUPS = (
    ("test_torch_cluster", "test_front_pod"),
    ("test_models", "test_own_engines"),
    ("test_faults", "test_deciders"),
    ("test_drop_in", "test_front_door"),
    ("test_transfer", "test_token_ids"),
    ("test_lmcache", "test_scheduler_bench"),
)
"""Files of `tests/live`, without their suffix; the groups take about as long as each other."""


def by_turns(path: str) -> pytest.MarkDecorator:
    """The mark of a file's tests: skipped where it is another group's turn."""
    why = why_not(Path(path).stem, os.environ)
    return pytest.mark.skipif(bool(why), reason=why)


def why_not(name: str, environ: Mapping[str, str]) -> str:
    """Why a file is not played now, and when it will be; empty: it is played.

    Raises:
        ValueError: the file is in no group, or `KAPPA_TURN` is no number.
    """
    group = next((i for i, names in enumerate(GROUPS) if name in names), None)
    if group is None:
        raise ValueError(f"{name} is in no group of tests/turns.py: add it to the shortest")
    turn = turn_of(environ)
    if environ.get(ALL) or (turn is not None and turn % len(GROUPS) == group):
        return ""
    if turn is None:
        return f"one turn of {len(GROUPS)} of .ci/run plays it: set {TURN}={group}, or {ALL}=1"
    later = turn + (group - turn) % len(GROUPS)
    return f"turn {later} plays it, and this is {turn}: set {TURN}={later}, or {ALL}=1"


def turn_of(environ: Mapping[str, str]) -> int | None:
    """The turn that the environment names.

    Raises:
        ValueError: it is no number.
    """
    text = environ.get(TURN, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{TURN} is {text!r}, no number: set it to 0 to {len(GROUPS) - 1}")
    return int(text)


def played(environ: Mapping[str, str]) -> str:
    """One line for the report: which groups this run plays."""
    turn = turn_of(environ)
    if environ.get(ALL):
        return f"clusters by turns: all ({ALL})"
    if turn is None:
        return f"clusters by turns: none ({TURN} is not set)"
    return f"clusters by turns: {', '.join(GROUPS[turn % len(GROUPS)])} (turn {turn})"
