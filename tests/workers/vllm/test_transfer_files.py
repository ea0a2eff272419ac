"""KV on its way between workers: whole or not at all, bounded, swept, and in its folder only."""

import os
import threading
import time
import uuid

import pytest

torch = pytest.importorskip("torch")

from workers.vllm.transfer_files import TransferError, TransferFiles, TransferOptions  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "transfer"


def files(folder, rank=0, time=(), **changes):
    given = {"most_bytes": 1 << 20, "wait_s": 0.2, **changes}
    return TransferFiles(TransferOptions(str(folder), **given), rank, *time)


def blocks(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 127, (3, size), dtype=torch.int8, generator=generator)
        for size in (64, 64, 32)
    ]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def name():
    return uuid.uuid4().hex


def long_gone(path):
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago), follow_symlinks=False)


def test_what_is_sent_is_received_bit_by_bit_and_once(folder):
    between, one = files(folder), name()
    between.send(one, blocks(), 96)
    assert folder.stat().st_mode & 0o077 == 0
    assert same(between.receive(one, 96), blocks())
    assert list(folder.iterdir()) == []
    with pytest.raises(TransferError, match="not there after"):
        between.receive(one, 96)


def test_a_receiver_waits_for_the_sender(folder):
    between, one, received = files(folder, wait_s=30.0), name(), []
    receiver = threading.Thread(target=lambda: received.append(between.receive(one, 96)))
    receiver.start()
    between.send(one, blocks(), 96)
    receiver.join(timeout=30)
    assert len(received) == 1


def test_a_full_folder_refuses_at_once(folder):
    between, first, second = files(folder, most_bytes=600, wait_s=1e6), name(), name()
    between.send(first, blocks(), 96)
    between.send(second, blocks(), 96)
    with pytest.raises(TransferError, match="refused"):
        between.receive(second, 96)
    assert between.receive(first, 96)


@pytest.mark.parametrize("evil", ["../../etc/passwd", "", "a" * 31, "A" * 32, "a" * 32 + "/x"])
def test_a_name_cannot_lead_out_of_the_folder(folder, evil):
    between = files(folder)
    with pytest.raises(TransferError, match="none of ours"):
        between.receive(evil, 1)
    with pytest.raises(TransferError, match="none of ours"):
        between.send(evil, blocks(), 1)


def test_a_broken_file_is_lost_and_removed(folder):
    between, one = files(folder), name()
    (folder / f"{one}-0.kv").write_bytes(b"no tensors")
    with pytest.raises(TransferError, match="cannot be read"):
        between.receive(one, 96)
    assert list(folder.iterdir()) == []


def test_a_paced_transfer_lasts_as_long_as_its_bytes_would(folder):
    slept, now = [], [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    between = files(folder, token_s=0.01, fixed_s=0.5, time=(lambda: now[0], sleep))
    between.send(name(), blocks(), 96)
    assert slept == [pytest.approx(0.5 + 0.96)]


def test_each_process_of_an_engine_hands_its_own_part_over(folder):
    ranks, one = [files(folder, rank=rank) for rank in range(2)], name()
    for rank, between in enumerate(ranks):
        between.send(one, blocks(rank), 96)
    for rank, between in enumerate(ranks):
        assert same(between.receive(one, 96), blocks(rank))


@pytest.mark.parametrize("at_start", [True, False])
def test_what_nobody_received_is_swept_at_the_next_start_and_when_the_next_is_sent(
    folder, at_start
):
    between, new = files(folder), name()
    between.send(name(), blocks(), 96)
    (old,) = folder.iterdir()
    long_gone(old)
    if at_start:
        files(folder)
        assert list(folder.iterdir()) == []
    between.send(new, blocks(), 96)
    assert [path.stem for path in folder.iterdir()] == [f"{new}-0"]


def test_a_transfer_that_cannot_be_written_is_refused_and_leaves_nothing(folder, monkeypatch):
    def full(_, path):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    between, one = files(folder, wait_s=3.0), name()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("workers.vllm.transfer_files.save_file", full)
        between.send(one, blocks(), 96)
    with pytest.raises(TransferError, match="refused"):
        between.receive(one, 96)
    assert list(folder.iterdir()) == []


def test_a_wait_that_began_before_is_not_begun_again(folder):
    slept, one = [], name()
    between = files(folder, wait_s=5.0, time=(lambda: 100.0, slept.append))
    with pytest.raises(TransferError, match="not there after 5 s"):
        between.receive(one, 96, since_s=95.0)
    assert slept == []
    between.send(one, blocks(), 96)
    assert between.receive(one, 96, since_s=0.0), "what is there is received, however late"


def test_only_transfers_are_swept_and_counted_whatever_else_lies_in_the_folder(folder):
    folder.mkdir(mode=0o700)
    foreign = [
        folder / "notes.txt", folder / f"{name()}.kv", folder / f"{name()}-0.txt",
        folder / f"{name().upper()}A-0.kv", folder / f"x{name()}-0.kv",
    ]  # fmt: skip
    for path in foreign:
        path.write_bytes(b"x" * 1000)
    inside, link = folder / f"{name()}-0.kv", folder / f"{name()}-1.kv"
    inside.mkdir()  # of a transfer's name, and no file
    (inside / "kept").write_bytes(b"x")
    link.symlink_to(foreign[0])
    ours = [folder / f"{name()}-{rank}{end}" for rank in (0, 12) for end in (".kv", ".part")]
    ours.append(folder / f"{name()}-3.refused")
    for path in ours:
        path.touch()
    for path in (*foreign, inside, link, *ours):
        long_gone(path)
    between, one = files(folder, most_bytes=600), name()
    assert not any(path.exists() for path in ours)
    between.send(one, blocks(), 96)  # what is foreign takes none of its bytes
    assert between.receive(one, 96)
    assert {*foreign, inside, link} == set(folder.iterdir())


def test_another_users_folder_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user's"):
        files(folder)


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o1777])
def test_a_folder_that_others_may_use_is_refused_by_its_setting_and_untouched(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    old = folder / f"{name()}-0.kv"
    old.touch()
    long_gone(old)
    with pytest.raises(PermissionError, match=r"transfer\.folder .*transfer .*mode 700"):
        files(folder)
    assert old.exists()
