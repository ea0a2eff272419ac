"""Folders of host tiers: one worker each, left to a successor of the same identity alone."""

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


def left(root, identity=ME):
    """A worker's folder with blocks, which its worker has left."""
    claimed = claim_folder(root, identity)
    assert not has_blocks(claimed)
    (claimed.folder / "kv").write_bytes(b"blocks")
    claimed.release()


def has_blocks(claimed):
    return (claimed.folder / "kv").exists()


def test_a_successor_finds_what_its_predecessor_left(root):
    left(root)
    assert has_blocks(claim_folder(root, ME))


def test_two_workers_never_share_a_folder(root):
    claimed = [claim_folder(root, ME) for _ in range(3)]
    assert len({one.folder for one in claimed}) == 3


def test_a_folder_of_another_pool_waits_for_its_own_worker(root):
    left(root, {**ME, "pool": "a"})
    assert not has_blocks(claim_folder(root, {**ME, "pool": "b"}))
    assert has_blocks(claim_folder(root, {**ME, "pool": "a"}))


def test_a_folder_of_an_earlier_run_of_the_machine_is_removed(root, monkeypatch):
    left(root, {**ME, "pool": "a"})
    monkeypatch.setattr("workers.vllm.warm_restart._boot", lambda: "another")
    assert not has_blocks(claim_folder(root, {**ME, "pool": "b"}))
    assert names(root) == ["shelf-00"]


@pytest.mark.parametrize("other", [{"model": "other"}, {"block_tokens": 16}, {"more": 1}])
def test_a_folder_of_another_identity_is_emptied(root, other):
    left(root)
    second = claim_folder(root, {**ME, **other})
    assert not has_blocks(second)
    assert names(root) == ["shelf-00"]


@pytest.mark.parametrize("text", ["", "{broken", "[1]"])
def test_a_folder_whose_identity_cannot_be_read_is_emptied(root, text):
    left(root)
    (root / "shelf-00" / "identity.json").write_text(text)
    assert not has_blocks(claim_folder(root, ME))
    assert names(root) == ["shelf-00"]


def test_a_folder_in_use_is_left_alone_whoever_asks(root):
    held = claim_folder(root, ME)
    (held.folder / "kv").write_bytes(b"blocks")
    claim_folder(root, {"model": "other"})
    assert (held.folder / "kv").read_bytes() == b"blocks"


class Clock:
    """Seconds that pass as they are slept; `then` is called once three have passed."""

    def __init__(self, then=lambda: None):
        self.now, self._then = 0.0, then

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now > 3:
            self._then()

    def claim(self, root, identity=ME, settled_s=0.0):
        return claim_folder(root, identity, 10.0, settled_s, self, self.sleep)


def test_a_successor_waits_for_a_predecessor_that_still_drains(root):
    first = claim_folder(root, ME)
    clock = Clock(first.release)
    second = clock.claim(root)
    assert second.folder == first.folder
    assert 3 < clock.now < 4


def test_the_wait_is_bounded_and_pointless_ones_are_not_begun(root):
    first, clock, other = claim_folder(root, ME), Clock(), Clock()
    assert clock.claim(root).folder != first.folder and 10 <= clock.now < 11
    other.claim(root, {"model": "other"})
    assert other.now == 0.0
    first.release()


def test_siblings_that_start_together_do_not_wait_for_each_other(root):
    sibling, clock = claim_folder(root, ME), Clock()
    assert clock.claim(root, settled_s=60.0).folder != sibling.folder
    assert clock.now == 0.0
    os.utime(sibling.folder / "lock", (0, 0))
    clock.claim(root, settled_s=60.0)
    assert clock.now >= 10.0, "one that has been there for long may be about to leave"


def test_a_killed_worker_leaves_its_folder(root):
    program = (
        "import os, signal; from pathlib import Path; from workers.vllm.warm_restart import *\n"
        f"claimed = claim_folder(Path({str(root)!r}), {ME!r})\n"
        "(claimed.folder / 'kv').write_bytes(b'blocks')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert has_blocks(claim_folder(root, ME))


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
    claimed = claim_folder(root, ME)
    assert [path.stat().st_mode & 0o077 for path in (root, claimed.folder)] == [0, 0]


def test_a_folder_that_another_replaces_meanwhile_is_not_shared(root, monkeypatch):
    claim_folder(root, {**ME, "model": "old"}).release()
    siblings, theirs = [], []

    class Slow(warm_restart.Lock):
        def __init__(self, path):
            super().__init__(path)
            if not siblings and path.name == "lock":
                work = lambda: theirs.append(claim_folder(root, ME))  # noqa: E731
                siblings.append(threading.Thread(target=work))
                siblings[0].start()
                siblings[0].join(timeout=1.0)

    monkeypatch.setattr(warm_restart, "Lock", Slow)
    mine = claim_folder(root, ME)
    siblings[0].join(timeout=30.0)
    assert theirs[0].folder != mine.folder
    assert names(root) == ["shelf-00", "shelf-01"]


def test_the_turn_at_the_folders_is_not_waited_for_without_end(root):
    root.mkdir(mode=0o700)
    turn = warm_restart.take_turn(root)
    with pytest.raises(WarmRestartError, match="locked by another process"):
        warm_restart.take_turn(root, wait_s=0.0)
    turn.release()
    claim_folder(root, ME)
