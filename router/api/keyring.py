"""The keys file of a running ingress: new keys are known, removed ones refused, slips survived."""

from __future__ import annotations

import asyncio
import os
import time

import structlog

from kappa.keys import KeysUnreadableError, read_digests
from kappa.protocol import MAX_TENANTS
from router.api.auth import Tenants

log = structlog.get_logger(__name__)

_SETTLED_S = 0.5

_Stamp = tuple[int, int, int]


class Keyring:
    """The tenants as an ingress knows them now: the table of its start, and the keys file as it is.

    The file is looked at, not watched: at most every `check_s` seconds, by the request that comes
    then, so nothing runs beside; it is read on a thread. While it cannot be read, is faulty, or
    holds no key any more, the keys that it held last stay valid, and the log says so: a slip must
    not lock everybody out. A file that is just being written is not taken before it has stayed the
    same for a moment.
    """

    def __init__(self, tenants: Tenants, path: str | None = None, check_s: float = 2.0) -> None:
        """`tenants`: the table at deployment, with the file's keys as they were then."""
        self._tenants, self._path, self._check_s = tenants, path, check_s
        self._next_s = float("-inf")
        self._stamp: _Stamp | None = None
        self._changing: _Stamp | None = None
        self._fault = ""
        self.reloads = 0
        self.faults = 0
        # Before anybody is served: a key that was taken out must not be valid again by a restart.
        self.look(float("-inf"))

    def current(self) -> Tenants:
        """The tenants as they were at the last look."""
        return self._tenants

    async def refresh(self, now_s: float | None = None) -> None:
        """Look at the file if that is due; `now_s` is of the monotonic clock."""
        if self._path is None:
            return
        now_s = time.monotonic() if now_s is None else now_s
        if now_s >= self._next_s:
            self._next_s = now_s + self._check_s  # others do not wait for this look
            await asyncio.to_thread(self.look, now_s)

    def look(self, now_s: float) -> None:
        """Look at the file, and take its keys if it has changed."""
        if self._path is None:
            return
        self._next_s = now_s + self._check_s
        try:
            stamp, is_young = _stamp(self._path)
        except OSError as error:
            self._failed(f"keys_file {self._path}: cannot be read: {error.strerror}")
            return
        if stamp == self._stamp:
            return
        if is_young and self._stamp is not None and stamp != self._changing:
            self._changing, self._next_s = stamp, now_s + _SETTLED_S
            return
        self._take(self._path, stamp)

    def _take(self, path: str, stamp: _Stamp) -> None:
        first, before = self._stamp is None, self._tenants
        try:
            by_digest = read_digests(path)
            tenants = before.with_file(by_digest)
            _check(path, before, tenants)
        except KeysUnreadableError as error:
            # Rights, or a machine out of files: it may be readable next time, though unchanged.
            self._failed(str(error))
            return
        except ValueError as error:
            # Read once more only when it has changed again.
            self._stamp = stamp
            self._failed(str(error))
            return
        self._stamp, self._fault, self._tenants = stamp, "", tenants
        self.reloads += 1
        if not first:
            log.warning("keys_reloaded", path=path, keys=len(by_digest))

    def _failed(self, why: str) -> None:
        self.faults += 1
        if why != self._fault:
            self._fault = why
            log.error("keys_not_reloaded", reason=why, remedy="the keys read before stay valid")


def _stamp(path: str) -> tuple[_Stamp, bool]:
    """What tells one state of a file from another, and whether it was written a moment ago.

    A time of writing that lies in the future (the clock was set back) counts as a moment ago.
    """
    status = os.stat(path)
    is_young = time.time() - status.st_mtime < _SETTLED_S
    return (status.st_mtime_ns, status.st_size, status.st_ino), is_young


def _check(path: str, before: Tenants, after: Tenants) -> None:
    """Refuse a file that would take every key away, or names too many tenants.

    Raises:
        ValueError: with what to do.
    """
    had, has = (len(table.by_digest.keys() - table.fixed) for table in (before, after))
    if had and not has:
        raise ValueError(
            f"keys_file {path}: holds no key, and held {had}: all of its tenants would be locked "
            "out. Leave one in it, or restart without keys_file"
        )
    tenants = len(after.all())
    if tenants > MAX_TENANTS:
        raise ValueError(
            f"keys_file {path}: there would be {tenants} tenants; at most {MAX_TENANTS} are kept "
            "apart"
        )
