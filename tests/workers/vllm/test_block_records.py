"""Records of a host tier: there after a kill, invalid while overwritten, never half read."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.vllm.persistent_tier import BlockRecords, StoredBlock

SLOTS, TOKENS = 6, 4


def opened(path, slots=SLOTS, tokens=TOKENS, seed="s"):
    return BlockRecords(path, slots, tokens, seed)


def a_block(name, parent=None, salt=""):
    return StoredBlock(name.encode(), parent, tuple(range(len(name), len(name) + TOKENS)), salt)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records"


def test_what_was_written_is_there_again_oldest_first(path):
    written = [
        (3, a_block("a", salt="tenant")), (0, a_block("b", parent=b"a")),
        (5, a_block("c", parent=b"")),
        (2, StoredBlock(b"k" * 64, b"p" * 64, (2**31 - 1,) * TOKENS, "s" * 180)),
    ]  # fmt: skip
    records = opened(path)
    assert all(records.write(slot, block) for slot, block in written)
    assert opened(path).valid() == written


def test_a_killed_writer_leaves_what_it_had_written(path):
    program = (
        "import os, signal; from pathlib import Path\n"
        "from workers.vllm.persistent_tier import *\n"
        f"r = BlockRecords(Path({str(path)!r}), {SLOTS}, {TOKENS}, 's')\n"
        f"r.write(2, StoredBlock(b'k', None, (1, 2, 3, 4)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert opened(path).valid() == [(2, StoredBlock(b"k", None, (1, 2, 3, 4)))]


def test_a_slot_is_invalid_until_it_is_whole_again(path):
    records = opened(path)
    records.write(1, a_block("old"))
    records.invalidate(1)
    assert opened(path).valid() == []
    records.write(1, a_block("new"))
    assert opened(path).valid() == [(1, a_block("new"))]


def test_of_two_slots_with_one_key_the_newer_counts_in_its_own_place(path):
    records = opened(path)
    for slot, block in ((4, a_block("a")), (3, a_block("b")), (1, a_block("a", salt="later"))):
        records.write(slot, block)
    assert records.valid() == [(3, a_block("b")), (1, a_block("a", salt="later"))]


def test_order_goes_on_after_a_restart(path):
    for slot, name in ((0, "a"), (1, "b"), (0, "c")):
        opened(path).write(slot, a_block(name))
    assert [block.key for _, block in opened(path).valid()] == [b"b", b"c"]


@pytest.mark.parametrize(
    "other", [{"slots": SLOTS + 1}, {"tokens": TOKENS + 1}, {"seed": "another"}]
)
def test_records_of_another_tier_are_not_read(path, other):
    opened(path).write(0, a_block("a"))
    assert opened(path, **other).valid() == []


@pytest.mark.parametrize(
    "block",
    [
        StoredBlock(b"", None, (1, 2, 3, 4)), StoredBlock(b"k", None, (1, 2, 3)),
        StoredBlock(b"k" * 400, None, (1, 2, 3, 4)), StoredBlock(b"k", b"p" * 400, (1, 2, 3, 4)),
        StoredBlock(b"k", None, (1, 2, 3, 4), "s" * 400),
    ],
)  # fmt: skip
def test_what_a_record_has_no_room_for_is_not_written(path, block):
    records = opened(path)
    records.write(0, a_block("before"))
    assert not records.write(0, block)
    assert records.valid() == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 + SLOTS * 300), st.integers(1, 255), st.binary(max_size=40))
def test_a_damaged_file_never_yields_a_block_that_was_not_written(tmp_path_factory, at, by, tail):
    path = tmp_path_factory.mktemp("damaged") / "records"
    records = opened(path)
    written = [a_block(name, parent=b"p", salt="s") for name in ("a", "bb", "ccc")]
    for slot, block in enumerate(written):
        records.write(slot, block)
    del records
    data = np.fromfile(path, dtype=np.uint8)
    data[at % len(data)] ^= by
    path.write_bytes(data.tobytes())
    assert all(block in written for _, block in opened(path).valid())
    path.write_bytes(data.tobytes()[:-1] + tail)
    assert all(block in written for _, block in opened(path).valid())


@pytest.mark.parametrize(("slots", "tokens"), [(0, 4), (4, 0)])
def test_a_tier_of_nothing_is_refused(tmp_path, slots, tokens):
    with pytest.raises(ValueError, match="at least one of each"):
        opened(tmp_path / "records", slots, tokens)
    assert not os.listdir(tmp_path)
