"""The tenants as an ingress knows them now: the table of its start, and the keys file as it stands.

The file is looked at, not watched: at most every `check_s` seconds, by the request that comes then,
so nothing runs beside. A key that was taken out is refused from the next look on, one that was
added is known. While the file cannot be read, the keys that it held last stay valid, and the log
says so: a slip in an editor must not lock everybody out.
"""

from __future__ import annotations

import os
import time

import structlog

from kappa.settings.keys_file import KeysUnreadableError, read_digests
from router.access.tenants import Tenants

log = structlog.get_logger(__name__)

_Stamp = tuple[int, int, int]


class Keyring:
    """Tenants with a keys file behind them, or without one."""

    def __init__(self, tenants: Tenants, path: str | None = None, check_s: float = 2.0) -> None:
        """`tenants`: the table at deployment, with the file's keys as they were then."""
        self._tenants, self._path, self._check_s = tenants, path, check_s
        self._looked_s = float("-inf")
        self._stamp: _Stamp | None = None
        self._fault = ""
        self.reloads = 0
        self.faults = 0

    def current(self, now_s: float | None = None) -> Tenants:
        """The tenants, at most `check_s` seconds old; `now_s` is of the monotonic clock."""
        if self._path is None:
            return self._tenants
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._looked_s >= self._check_s:
            self._looked_s = now_s
            self._look(self._path)
        return self._tenants

    def _look(self, path: str) -> None:
        try:
            status = os.stat(path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            by_digest = read_digests(path)
            if self._tenants.refuse and not (by_digest or self._tenants.fixed):
                raise ValueError(f"keys_file {path}: holds no key; nobody could be served")
        except OSError as error:
            self._failed(f"keys_file {path}: cannot be read: {error.strerror}")
            return
        except KeysUnreadableError as error:
            # Rights, or a machine out of files: it may be readable next time, though unchanged.
            self._failed(str(error))
            return
        except ValueError as error:
            # Read once more only when it has changed again.
            self._stamp = stamp
            self._failed(str(error))
            return
        first = self._stamp is None
        self._stamp, self._fault = stamp, ""
        self._tenants = self._tenants.with_file(by_digest)
        self.reloads += 1
        if not first:
            log.warning("keys_reloaded", path=path, keys=len(by_digest))

    def _failed(self, why: str) -> None:
        self.faults += 1
        if why != self._fault:
            self._fault = why
            log.error("keys_not_reloaded", reason=why, remedy="the keys read before stay valid")
