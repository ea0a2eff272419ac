"""Live clusters by turns: each group has its own, none is left out, and `.ci/run` counts them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.turns import ALL, GROUPS, TURN, played, why_not

ROOT = Path(__file__).parents[1]
NAMES = [name for group in GROUPS for name in group]
# Stands in for ./dev: says what the tests would be given.
DEV = """#!/bin/sh
[ "$1" = test ] && echo "given: turn=$KAPPA_TURN all=$KAPPA_MORE_CLUSTERS other=$OTHER args=$2"
[ "$1" != "$BROKEN_STEP" ]
"""


def files_played(**environ):
    return [name for name in NAMES if not why_not(name, environ)]


def test_groups_are_the_files_that_are_played_by_turns():
    marked = {p.stem for p in ROOT.glob("tests/live/*.py") if "by_turns(__file__)" in p.read_text()}
    assert marked == set(NAMES) and len(NAMES) == len(marked)


@pytest.mark.parametrize("first", [0, 1, 1436])
def test_turns_play_every_group_once_in_a_round(first):
    turns = range(first, first + len(GROUPS))
    found = [tuple(files_played(**{TURN: str(turn)})) for turn in turns]
    assert sorted(found) == sorted(GROUPS)


def test_all_groups_are_played_at_once_when_asked_for():
    assert files_played(**{ALL: "1"}) == files_played(**{ALL: "1", TURN: "1"}) == NAMES
    assert files_played() == files_played(**{ALL: "", TURN: ""}) == []


@pytest.mark.parametrize("turn", range(7))
def test_the_reason_names_the_turn_that_plays_the_file(turn):
    left_out = [name for name in NAMES if name not in files_played(**{TURN: str(turn)})]
    assert left_out
    for name in left_out:
        words = why_not(name, {TURN: str(turn)}).split()
        later = int(words[words.index("turn") + 1])
        assert turn < later < turn + len(GROUPS)
        assert name in files_played(**{TURN: str(later)})


def test_the_report_says_what_is_played():
    assert "none" in played({}) and "all" in played({ALL: "1"})
    for turn, group in enumerate(GROUPS):
        assert all(name in played({TURN: str(turn)}) for name in group)


@pytest.mark.parametrize("turn", ["-1", "x", "1.5", "²"])
def test_a_turn_that_is_no_number_is_refused(turn):
    with pytest.raises(ValueError, match=r"KAPPA_TURN is .*set it to 0 to 5"):
        why_not(NAMES[0], {TURN: turn})


def test_a_file_without_a_group_is_refused():
    with pytest.raises(ValueError, match="test_new is in no group"):
        why_not("test_new", {})


@pytest.fixture
def clone(tmp_path):
    """A repository of one commit, with `.ci/run` and what stands in for ./dev."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "dev").write_text(DEV)
    (tmp_path / "dev").chmod(0o755)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "One")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def run(clone, *arguments, **environ):
    """What the tests of one run were given, its exit status, and all that it said."""
    done = subprocess.run(
        [clone / ".ci" / "run", *arguments],
        env=os.environ | {"OTHER": "x", ALL: "", TURN: ""} | environ,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("given: ")]
    return found, done.returncode, done.stdout


def given(turn, all_="", arguments=""):
    return [f"given: turn={turn} all={all_} other= args={arguments}"]


def test_ci_gives_each_whole_run_the_next_turn(clone):
    """The first has that of the number of commits; what plays a part of the tests takes none."""
    turns = [run(clone)[0], run(clone, "-k x")[0], run(clone)[0], run(clone)[0]]
    assert turns == [given(1), given(2, arguments="-k x"), given(2), given(3)]


def test_ci_plays_the_turn_that_is_named_and_says_it(clone):
    found, status, output = run(clone, **{TURN: "7", ALL: "1"})
    assert (found, status) == (given(7, "1"), 0)
    assert "turn 7" in output
    assert run(clone)[0] == given(1), "a turn that was chosen does not count"


def test_ci_keeps_the_turn_when_no_test_was_played(clone):
    script = clone / "dev"
    script.write_text(DEV.replace("$BROKEN_STEP", "setup"))
    assert run(clone)[:2] == ([], 1)
    script.write_text(DEV.replace("$BROKEN_STEP", "test"))
    assert run(clone)[:2] == (given(1), 1)
    assert run(clone)[:2] == (given(2), 1)
