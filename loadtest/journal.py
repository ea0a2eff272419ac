"""Writes what a load test did as it happens: records.jsonl, decisions.jsonl and run.json.

Every ended request is one line, appended with one write: a run that is killed loses no line, at
most the end of the last. `resume` drops that, and requests that were stopped, so that they are sent
again and no other is. Decisions come later than the requests they belong to; they wait in a file of
their own and are put into the records when the run ends. Called by `kappa replay`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from loadtest.reading import (
    DECISIONS,
    RECORDS,
    RUN,
    JournalError,
    Told,
    read_records,
    read_run,
)
from loadtest.record import Record

ASKED = "asked"
"""The part of run.json that two runs must agree on to be parts of one."""


class Journal:
    """The open files of one run. `done`: turns already answered, by session; `elapsed_s`: when the
    last of them ended, in seconds since the run began."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """For `create` and `resume`."""
        self.folder, self.run = folder, run
        self.done: dict[str, int] = {}
        self.elapsed_s = 0.0
        self._records = _appending(folder / RECORDS)
        self._decisions = -1

    @classmethod
    def create(cls, folder: Path, run: dict[str, Any]) -> Journal:
        """Begin a run in a folder that holds none.

        Raises:
            JournalError: it does, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RUN).exists() or (folder / RECORDS).exists():
                raise JournalError(
                    f"{folder} holds a run already: give another --out, or --resume {folder}"
                )
            _replace(folder / RUN, msgspec.json.format(msgspec.json.encode(run)))
            return cls(folder, run)
        except OSError as error:
            raise JournalError(f"{folder}: {error.strerror or error}") from None

    @classmethod
    def resume(cls, folder: Path, asked: Mapping[str, Any]) -> Journal:
        """Go on with the run in `folder`.

        Raises:
            JournalError: there is none, it is damaged, or something else was asked of it.
        """
        run = read_run(folder)
        _require_same(folder, run.get(ASKED) or {}, asked)
        done: dict[str, int] = {}
        elapsed_s = 0.0

        def kept(record: Record) -> Record | None:
            nonlocal elapsed_s
            if record.error == "cancelled":
                return None
            done[record.session] = max(done.get(record.session, 0), record.turn + 1)
            elapsed_s = max(elapsed_s, record.ended_s)
            return record

        try:
            _rewrite(folder / RECORDS, kept)
            merge_decisions(folder)
            journal = cls(folder, run)
        except OSError as error:
            raise JournalError(f"{folder}: {error.strerror or error}") from None
        journal.done, journal.elapsed_s = done, elapsed_s
        return journal

    def write(self, record: Record) -> None:
        """Keep a request that has ended."""
        _write(self._records, msgspec.json.encode(record) + b"\n")

    def write_decision(
        self, request_id: str, predicted: dict[str, Any], actual: dict[str, Any]
    ) -> None:
        """Keep what the cluster told of a request."""
        if self._decisions < 0:
            self._decisions = _appending(self.folder / DECISIONS)
        line = {"request_id": request_id, "predicted": predicted, "actual": actual}
        _write(self._decisions, msgspec.json.encode(line) + b"\n")

    def note(self, **facts: Any) -> None:
        """Put facts into run.json; a run that goes on later keeps them."""
        self.run.update(facts)
        _replace(self.folder / RUN, msgspec.json.format(msgspec.json.encode(self.run)))

    def close(self) -> None:
        """Close the files and put the decisions into the records. Idempotent."""
        for file in (self._records, self._decisions):
            if file >= 0:
                os.close(file)
        self._records = self._decisions = -1
        merge_decisions(self.folder)


def merge_decisions(folder: Path) -> None:
    """Put decisions.jsonl into records.jsonl, and remove it. The last line of a request counts."""
    path = folder / DECISIONS
    if not path.exists():
        return
    with Told(path) as told:
        _rewrite(folder / RECORDS, told.put_into)
    path.unlink()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder for one run at a time; the system lets go of it however the process ends.

    Raises:
        JournalError: another run writes into it, or it is none.
    """
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalError(f"{folder}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(
                f"{folder}: another run is writing into it: wait for its end"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(place)


def _require_same(folder: Path, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name in sorted({*before, *asked}):
        if before.get(name) != asked.get(name):
            raise JournalError(
                f"{folder} is a run with {name} {before.get(name)!r}, not {asked.get(name)!r}: "
                "resume it with the same options, or begin another with --out"
            )


def _rewrite(path: Path, change: Callable[[Record], Record | None]) -> None:
    """Pass every record through `change`, which leaves it out by None; all of it or nothing."""
    if not path.exists():
        return
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for record in read_records(path):
            changed = change(record)
            if changed is not None:
                file.write(msgspec.json.encode(changed) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data + b"\n")
    os.replace(new, path)


def _appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(file: int, line: bytes) -> None:
    """One write each: a line is in the file or it is not. A disk that is full is an error."""
    written = os.write(file, line)
    if written < len(line):
        # Half a line would spoil the next one, if there is one.
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(f"only {written} of {len(line)} bytes could be written: is the disk full?")
