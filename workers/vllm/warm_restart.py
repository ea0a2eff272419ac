"""Warm restarts: a new worker takes over the host tier of the one before it. With
`engine.handover_dir` a worker keeps its host tier in files of a folder there, in shared memory, and
holds the folder's lock as long as it lives; a successor claims a free folder with the same
identity. A folder of another model, size, version or boot is emptied."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kappa.host import Lock

log = structlog.get_logger(__name__)

RECORDS, IDENTITY, LOCK, ENGINE_LOCK = "records", "identity.json", "lock", "engine.lock"
_MAX_FOLDERS = 64
_POLL_S = 0.2
_SETTLED_S = 60.0
_ENGINE_WAIT_S = 15.0
# Others look through the folders for moments only, even where they remove some.
_ROOT_WAIT_S = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class WarmRestartError(RuntimeError):
    """No folder can be had; the message names it and the remedy."""


@dataclass(slots=True)
class TierFolder:
    """A folder of blocks that is this worker's alone, empty or as a predecessor left it."""

    folder: Path
    lock: Lock

    def release(self) -> None:
        """Leave it to a successor; what lies there stays."""
        self.lock.release()


def claim_folder(
    root: Path,
    identity: Mapping[str, Any],
    wait_s: float = 0.0,
    settled_s: float = _SETTLED_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> TierFolder:
    """A folder below `root`: one that a predecessor with this identity left, or an empty one. While
    such a predecessor still holds its folder, wait for it `wait_s` at most: one that claimed it
    `settled_s` ago, younger ones are siblings. Free folders that this pool left in another form are
    removed: memory that nobody could use.

    Raises:
        WarmRestartError: the folder cannot be used.
    """
    wanted = {**identity, "boot": _boot()}
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o077:
            raise WarmRestartError(
                f"engine.handover_dir {root}: others may read it, and KV cache is as good as text: "
                "give a folder that is yours alone (mode 700)"
            )
        until_s = now_s() + wait_s
        while True:
            turn = take_turn(root)
            try:
                found, busy = _search(root, wanted, settled_s)
                if found is None and (not busy or now_s() >= until_s):
                    found = _new_folder(root, wanted)
            finally:
                turn.release()
            if found is not None:
                return found
            sleep(_POLL_S)
    except OSError as error:
        raise WarmRestartError(
            f"engine.handover_dir {root}: {error.strerror}; give a folder in shared memory that "
            "this user may write, such as /dev/shm/kappa"
        ) from None


def engine_lock(folder: Path, wait_s: float = _ENGINE_WAIT_S) -> Lock:
    """Held by the engine itself: an old one may outlive its replica by a moment, and still write.

    Raises:
        WarmRestartError: it is still held after `wait_s`.
    """
    lock = Lock(folder / ENGINE_LOCK)
    if not lock.take(wait_s):
        lock.release()
        raise WarmRestartError(f"{folder}: another engine still writes there after {wait_s:g} s")
    return lock


def take_turn(root: Path, wait_s: float = _ROOT_WAIT_S) -> Lock:
    """One worker at a time looks through the folders: what one removes another may be opening, and
    what one is making looks like nobody's.

    Raises:
        WarmRestartError: another does so for longer than `wait_s`.
    """
    turn = Lock(root)
    if not turn.take(wait_s):
        turn.release()
        raise WarmRestartError(
            f"engine.handover_dir {root}: locked by another process for {wait_s:g} s; end that, "
            "or name another folder"
        )
    return turn


def _search(
    root: Path, wanted: Mapping[str, Any], settled_s: float
) -> tuple[TierFolder | None, bool]:
    """A free folder of that identity, if there is one; and whether others hold such folders, for
    that long."""
    busy = False
    for folder in sorted(root.glob("shelf-*")):
        lock, found = Lock(folder / LOCK), _identity(folder)
        if not lock.take():
            lock.release()
            old = time.time() - (folder / LOCK).stat().st_mtime >= settled_s
            busy = busy or (old and found == wanted)
            continue
        if found == wanted:
            os.utime(folder / LOCK)
            log.info("host_tier_adopted", folder=str(folder))
            return TierFolder(folder, lock), busy
        # Nobody can want one of this pool as it was, or of an earlier run of the machine. Another
        # pool's may be waiting for a worker that restarts.
        if found.get("boot") != wanted["boot"] or found.get("pool") == wanted.get("pool"):
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()
    return None, busy


def _new_folder(root: Path, wanted: Mapping[str, Any]) -> TierFolder:
    for number in range(_MAX_FOLDERS):
        folder = root / f"shelf-{number:02d}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        lock = Lock(folder / LOCK)
        if not lock.take():
            lock.release()
            continue
        (folder / IDENTITY).write_text(json.dumps(wanted, sort_keys=True), encoding="utf-8")
        return TierFolder(folder, lock)
    raise WarmRestartError(f"engine.handover_dir {root}: {_MAX_FOLDERS} workers use it already")


def _identity(folder: Path) -> dict[str, Any]:
    """Empty if it cannot be read."""
    try:
        found = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _boot() -> str:
    """Names this run of the machine: after a crash of it files may be there in part only."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
