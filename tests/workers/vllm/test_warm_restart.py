"""Shelves: one worker each, left to a successor of the same identity and to nobody else."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from workers.vllm import warm_restart
from workers.vllm.warm_restart import WarmRestartError, claim_folder, engine_lock

ME = {"model": "m", "block_tokens": 32}


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kept"


def test_a_successor_finds_what_its_predecessor_left(root):
    first = claim_folder(root, ME)
    assert not first.warm
    (first.folder / "kv").write_bytes(b"blocks")
    first.release()
    second = claim_folder(root, ME)
    assert second.warm and (second.folder / "kv").read_bytes() == b"blocks"


def test_two_workers_never_share_a_shelf(root):
    shelves = [claim_folder(root, ME) for _ in range(3)]
    assert len({shelf.folder for shelf in shelves}) == 3
    assert not any(shelf.warm for shelf in shelves)


def test_a_shelf_of_another_pool_waits_for_its_own_worker(root):
    first = claim_folder(root, {**ME, "pool": "a"})
    (first.folder / "kv").write_bytes(b"blocks")
    first.release()
    claim_folder(root, {**ME, "pool": "b"})
    again = claim_folder(root, {**ME, "pool": "a"})
    assert again.warm and (again.folder / "kv").read_bytes() == b"blocks"


def test_a_shelf_of_an_earlier_run_of_the_machine_is_removed(root, monkeypatch):
    first = claim_folder(root, {**ME, "pool": "a"})
    first.release()
    monkeypatch.setattr("workers.vllm.warm_restart._boot", lambda: "another")
    claim_folder(root, {**ME, "pool": "b"})
    assert names(root) == ["shelf-00"]


@pytest.mark.parametrize("other", [{"model": "other"}, {"block_tokens": 16}, {"more": 1}])
def test_a_shelf_of_another_identity_is_emptied(root, other):
    first = claim_folder(root, ME)
    (first.folder / "kv").write_bytes(b"blocks")
    first.release()
    second = claim_folder(root, {**ME, **other})
    assert not second.warm and not (second.folder / "kv").exists()
    assert names(root) == ["shelf-00"]


def test_a_shelf_in_use_is_left_alone_whoever_asks(root):
    held = claim_folder(root, ME)
    (held.folder / "kv").write_bytes(b"blocks")
    claim_folder(root, {"model": "other"})
    assert (held.folder / "kv").read_bytes() == b"blocks"


class Clock:
    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_successor_waits_for_a_predecessor_that_still_drains(root):
    first = claim_folder(root, ME)
    clock = Clock()

    def sleep(seconds):
        clock.sleep(seconds)
        if clock.now > 3:
            first.release()

    second = claim_folder(root, ME, 10.0, 0.0, clock, sleep)
    assert second.warm and second.folder == first.folder
    assert 3 < clock.now < 4


def test_the_wait_is_bounded_and_pointless_ones_are_not_begun(root):
    first = claim_folder(root, ME)
    clock = Clock()
    second = claim_folder(root, ME, 10.0, 0.0, clock, clock.sleep)
    assert not second.warm and 10 <= clock.now < 11
    clock = Clock()
    claim_folder(root, {"model": "other"}, 10.0, 0.0, clock, clock.sleep)
    assert clock.now == 0.0
    first.release()


def test_siblings_that_start_together_do_not_wait_for_each_other(root):
    sibling = claim_folder(root, ME)
    clock = Clock()
    assert not claim_folder(root, ME, 10.0, 60.0, clock, clock.sleep).warm
    assert clock.now == 0.0
    os.utime(sibling.folder / "lock", (0, 0))
    claim_folder(root, ME, 10.0, 60.0, clock, clock.sleep)
    assert clock.now >= 10.0, "one that has been there for long may be about to leave"


def test_a_killed_worker_leaves_its_shelf(root):
    program = (
        "import os, signal; from pathlib import Path; from workers.vllm.warm_restart import *\n"
        f"shelf = claim_folder(Path({str(root)!r}), {ME!r})\n"
        "(shelf.folder / 'kv').write_bytes(b'blocks')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    shelf = claim_folder(root, ME)
    assert shelf.warm and (shelf.folder / "kv").read_bytes() == b"blocks"


def test_an_engine_that_outlives_its_replica_keeps_the_next_one_out(root):
    folder = claim_folder(root, ME).folder
    old = engine_lock(folder)
    with pytest.raises(WarmRestartError, match="another engine still writes"):
        engine_lock(folder, wait_s=0.0)
    old.release()
    old.release()
    engine_lock(folder, wait_s=0.0).release()


def test_a_folder_that_others_may_read_is_refused(root):
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(WarmRestartError, match=r"others may read it.*mode 700"):
        claim_folder(root, ME)


def test_a_folder_that_cannot_be_made_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WarmRestartError, match=r"handover_dir .*such as /dev/shm/kappa"):
        claim_folder(tmp_path / "file" / "kept", ME)


def test_what_is_kept_is_readable_by_this_user_only(root):
    shelf = claim_folder(root, ME)
    assert os.stat(shelf.folder).st_mode & 0o077 == 0
    assert os.stat(root).st_mode & 0o077 == 0


def test_a_shelf_that_another_replaces_meanwhile_is_not_shared(root, monkeypatch):
    claim_folder(root, {**ME, "model": "old"}).release()
    siblings, theirs = [], []

    class Slow(warm_restart.Lock):
        def __init__(self, path):
            super().__init__(path)
            if not siblings:
                work = lambda: theirs.append(claim_folder(root, ME))  # noqa: E731
                siblings.append(threading.Thread(target=work))
                siblings[0].start()
                siblings[0].join(timeout=1.0)

    monkeypatch.setattr(warm_restart, "Lock", Slow)
    mine = claim_folder(root, ME)
    siblings[0].join(timeout=30.0)
    assert theirs[0].folder != mine.folder
    assert names(root) == ["shelf-00", "shelf-01"]


def test_the_turn_at_the_shelves_is_not_waited_for_without_end(root):
    root.mkdir(mode=0o700)
    with (
        warm_restart._alone(root),
        pytest.raises(WarmRestartError, match="locked by another process"),
        warm_restart._alone(root, wait_s=0.0),
    ):
        pass
    claim_folder(root, ME)
