"""Rows of a file on disk: what was written comes back, and what did not is said."""

import errno
import os

import numpy as np
import pytest

from kappa_workers.paced import disk_file
from kappa_workers.paced.disk_file import ALIGN, DiskError, DiskFile, measure_disk, row_bytes

WIDTHS = (3000, 2000)
BLOCKS = 40


@pytest.fixture
def file(tmp_path):
    made = DiskFile(tmp_path, BLOCKS, WIDTHS)
    yield made
    made.close()
    made.close()


def blocks(seed=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(-128, 128, (BLOCKS, width), dtype=np.int8) for width in WIDTHS]


def empty():
    return [np.zeros((BLOCKS, width), dtype=np.int8) for width in WIDTHS]


def behind(file):
    """The file by another way, past O_DIRECT: it has no name any more."""
    return open(f"/proc/self/fd/{file._fd}", "r+b", buffering=0)


def test_rows_come_back_byte_for_byte_wherever_they_are(file, monkeypatch):
    # Several parts, several calls a part, neighbours and strangers among the rows.
    monkeypatch.setattr(disk_file, "_CALL_BYTES", 3 * file.row_bytes)
    file._reading.rows, file._writing.rows = 7, 5
    rng, source, got = np.random.default_rng(1), blocks(), empty()
    ids = rng.permutation(BLOCKS)[:30]
    rows = np.concatenate([np.arange(10, 25), rng.permutation(10), np.arange(30, 35)])
    assert file.write(source, ids, rows)
    order = rng.permutation(30)[:20]
    places = rng.permutation(BLOCKS)[:20]
    assert file.read(rows[order], got, places).all()
    for tensor, wanted in zip(got, source, strict=True):
        assert np.array_equal(tensor[places], wanted[ids[order]])
        assert not tensor[np.setdiff1d(np.arange(BLOCKS), places)].any()


def test_a_row_takes_whole_pages_and_the_file_no_name(file, tmp_path):
    assert (row_bytes(1), row_bytes(ALIGN), row_bytes(ALIGN + 1)) == (ALIGN, ALIGN, 2 * ALIGN)
    assert file.row_bytes == 2 * ALIGN
    assert os.fstat(file._fd).st_size == BLOCKS * 2 * ALIGN
    assert not list(tmp_path.iterdir()), "nothing is left of a process that is killed"


def test_read_refuses_rows_changed_cut_short_or_never_written(file):
    source, got = blocks(), empty()
    assert file.write(source, np.arange(12), np.arange(12))
    with behind(file) as raw:
        raw.seek(4 * file.row_bytes + 2500)
        raw.write(b"rot")
        # Padding does not count.
        raw.seek(6 * file.row_bytes + sum(WIDTHS))
        raw.write(b"any")
        raw.truncate(10 * file.row_bytes + 100)
    whole = file.read(np.arange(14), got, np.arange(14))
    assert np.flatnonzero(~whole).tolist() == [4, 10, 11, 12, 13]
    assert np.array_equal(got[0][6], source[0][6])
    assert not got[0][4].any() and not got[1][10].any(), "nothing untrue was copied"


def test_a_row_written_anew_holds_the_new_block(file):
    first, second, got = blocks(1), blocks(2), empty()
    assert file.write(first, np.arange(4), np.arange(4))
    assert file.write(second, np.array([2]), np.array([1]))
    assert file.read(np.arange(4), got, np.arange(4)).all()
    assert np.array_equal(got[1][1], second[1][2]) and np.array_equal(got[1][2], first[1][2])


def test_a_write_that_fails_leaves_rows_that_do_not_come(file, monkeypatch):
    assert file.write(blocks(1), np.arange(4), np.arange(4))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        assert not file.write(blocks(2), np.arange(2), np.arange(2))
    assert file.read(np.arange(4), empty(), np.arange(4)).tolist() == [False, False, True, True]


def test_a_read_that_fails_is_a_row_that_does_not_come(file, monkeypatch):
    assert file.write(blocks(), np.arange(4), np.arange(4))

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert not file.read(np.arange(4), empty(), np.arange(4)).any()


def test_file_names_the_remedy_for_a_missing_or_full_folder(tmp_path):
    with pytest.raises(DiskError, match=r"nowhere: No such file .* or lower engine.disk_bytes"):
        DiskFile(tmp_path / "nowhere", BLOCKS, WIDTHS)
    with pytest.raises(DiskError, match=r"for 9,007,199,254,740,992 bytes"):
        DiskFile(tmp_path, 1 << 40, [8000])
    assert not list(tmp_path.iterdir())


def test_a_disk_is_measured_by_bytes_of_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_file, "_TRIAL_BYTES", 1 << 20)
    found = measure_disk(tmp_path, 5000)
    sizes = [row["bytes"] for row in found["read"]]
    assert sizes == [5000, 8 * 5000, 64 * 5000, 128 * 5000]
    assert all(row["bytes_per_s"] > 0 for row in found["read"])
    assert found["bytes_per_s"] == found["read"][-1]["bytes_per_s"]
    assert isinstance(found["direct"], bool) and not list(tmp_path.iterdir())
