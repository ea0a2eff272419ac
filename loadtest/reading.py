"""Reads what a load test left on disk: run.json, records.jsonl and decisions.jsonl.

The run may have been killed: the last line of its records may be cut, and the decisions that the
cluster told may still lie in a file of their own. Anything that is no record is an error that names
file and line. Called by the journal, the report, and whoever else looks into a run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadtest.record import Record

RECORDS = "records.jsonl"
DECISIONS = "decisions.jsonl"
RUN = "run.json"


class JournalError(ValueError):
    """The folder cannot be used as asked; the message says which file, why and what to do."""


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        JournalError: there is none, or it is damaged.
    """
    path = folder / RUN
    try:
        run = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise JournalError(f"{folder} holds no run: there is no {RUN}") from None
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise JournalError(f"{path}: not JSON: {error}") from None
    if not isinstance(run, dict):
        raise JournalError(f"{path}: expected an object, found {type(run).__name__}")
    return run


def read_records(path: Path) -> Iterator[Record]:
    """The records of a journal, one at a time; a last line without its end is left out.

    Raises:
        JournalError: a line that is no record, naming file and line; or no leave to read.
    """
    for number, _, line in _lines(path):
        try:
            yield Record.from_dict(msgspec.json.decode(line))
        except (ValueError, TypeError) as error:
            raise JournalError(f"{path}:{number}: {error}") from None


class Records:
    """A run's records with the decisions told of them, read anew whenever they are iterated over.

    was_cut: whether the last line had no end, as when its writer was killed; it is left out.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORDS
        self._decisions = folder / DECISIONS
        self.was_cut = _is_cut(self.path)

    def __iter__(self) -> Iterator[Record]:
        """Every record, in the file's order; raises as `read_records`."""
        with Told(self._decisions) as told:
            for record in read_records(self.path):
                yield told.put_into(record)


class Told:
    """Decisions that are not in their records yet, looked up where they lie; a context manager.

    The last of a request counts. Raises JournalError as `read_records`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, int] = {}

    def __enter__(self) -> Told:
        for number, place, line in _lines(self._path):
            try:
                self._places[msgspec.json.decode(line, type=_Decision).request_id] = place
            except msgspec.DecodeError as error:
                raise JournalError(f"{self._path}:{number}: {error}") from None
        self._file = self._path.open("rb") if self._places else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def put_into(self, record: Record) -> Record:
        """The same record, with what was told of it."""
        place = self._places.get(record.request_id) if record.request_id else None
        if place is not None and self._file is not None:
            self._file.seek(place)
            decision = msgspec.json.decode(self._file.readline(), type=_Decision)
            record.predicted, record.actual = decision.predicted, decision.actual
        return record


class _Decision(msgspec.Struct):
    request_id: str
    predicted: dict[str, Any]
    actual: dict[str, Any]


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number, place, line) of each whole line; none if there is no file."""
    place = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, place, line
                place += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None


def _is_cut(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
