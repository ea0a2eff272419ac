"""A load test's files, written as it runs: records.jsonl, decisions.jsonl, run.json.

Every ended request is one line, appended with one write: a run that is killed loses no line, at
most the end of the last. Our cluster reports its decisions later than requests end, so they have a
file of their own; `read_records` puts them on the records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kappa.host import Lock

T = TypeVar("T")

RECORDS, DECISIONS, RUN = "records.jsonl", "decisions.jsonl", "run.json"
OPTIONS = "asked"
"""The part of run.json that two runs must agree on to be parts of one."""

ERROR_KINDS: Mapping[str, str] = {
    "connect": "no connection, or it broke before an answer began",
    "timeout": "no end within the time allowed",
    "401": "the endpoint knows no such key",
    "429": "too many requests",
    "503": "the endpoint says that it cannot serve now",
    "http_NNN": "any other status, NNN being the status",
    "cut": "the stream ended without its end marker",
    "empty": "the stream ended without a token",
    "bad_json": "an event that is not the JSON of OpenAI's protocol",
    "protocol": "an answer that is not HTTP, or not a stream of events",
    "stream_error": "the endpoint reported an error inside the stream",
    "prompt": "the prompt could not be made; nothing was sent",
    "cancelled": "the run was stopped before the answer ended",
}
"""Kinds of errors that `RequestRecord.error` may hold besides the empty string."""


class RunFolderError(ValueError):
    """The folder cannot be used; the message gives file, reason and remedy."""


class RequestRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The outcome of one request. Times are seconds since the run began, on one monotonic clock."""

    session: str
    turn: int  # in its session, from 0
    tenant: str = ""
    priority: int | None = None  # requested class; None: none
    attempt: int = 0  # above 0: a retry
    # When it was due: its session's arrival, or its predecessor's end plus the pause. Latency
    # counts from here, also if sending was late (coordinated omission).
    scheduled_s: float = 0.0
    sent_s: float = 0.0  # the bytes of the last attempt were handed over
    # Arrival of the first and the last chunk with output; None without one.
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0  # end of the answer, or of the attempt to get one
    # As requested.
    input_tokens: int = 0
    output_tokens: int = 0
    # As in the endpoint's usage; without it chunks with output, and None.
    generated_tokens: int = 0
    prompt_tokens: int | None = None
    # As expected with an unlimited cache.
    cached_tokens: int = 0
    new_tokens: int = 0
    gaps_s: list[float] = []  # between chunks with output
    status: int = 0  # of HTTP; 0: no answer
    error: str = ""  # one of `ERROR_KINDS`; empty: none
    error_detail: str = ""  # for people, at most a line
    retried: list[str] = []  # errors of the attempts before, in order
    # From the response headers of our cluster; empty or None elsewhere.
    request_id: str = ""
    node: str = ""
    paced: bool = False
    reason: str = ""
    ratio: float | None = None
    crit: float | None = None
    predicted_ttft_s: float | None = None
    # The decision from `GET /v1/decisions`, with queue_s, load_s, compute_s, ttft_s and token
    # counts; None where it was not reported.
    predicted: dict[str, Any] | None = None
    actual: dict[str, Any] | None = None


class RequestDecision(msgspec.Struct):
    """Our cluster's prediction for a request, and the outcome (`GET /v1/decisions`)."""

    request_id: str
    predicted: dict[str, Any]
    actual: dict[str, Any]


# -- writing --------------------------------------------------------------------------------------


class RunFolder:
    """The open files of one run, from `create` or `resume`."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self.folder, self.run = folder, run
        # Turns already answered, by session, and when the last of them ended, in seconds since the
        # run began.
        self.done: dict[str, int] = {}
        self.elapsed_s = 0.0
        self._files: dict[str, int] = {}

    @classmethod
    def create(cls, folder: Path, run: dict[str, Any]) -> RunFolder:
        """Begin a run in a folder that holds none.

        Raises:
            RunFolderError: it holds one, or cannot be written.
        """
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RUN).exists() or (folder / RECORDS).exists():
                raise RunFolderError(
                    f"{folder} holds a run already: give another --out, or --resume {folder}"
                )
            opened = cls(folder, run)
            opened.note()
            return opened

    @classmethod
    def resume(cls, folder: Path, options: Mapping[str, Any]) -> RunFolder:
        """Go on with the run in `folder`, without half a line and requests that were stopped.

        Raises:
            RunFolderError: it holds no run, a damaged one, or one with other options.
        """
        opened = cls(folder, read_run(folder))
        before = opened.run.get(OPTIONS) or {}
        for name in sorted({*before, *options}):
            if before.get(name) != options.get(name):
                raise RunFolderError(
                    f"{folder} is a run with {name} {before.get(name)!r}, not "
                    f"{options.get(name)!r}: resume it with the same options, or begin another "
                    "with --out"
                )
        part = folder / f".{RECORDS}.part"
        with file_errors(folder):
            with part.open("wb") as file:
                for record in read_records(folder):
                    if record.error == "cancelled":
                        continue
                    done = opened.done.get(record.session, 0)
                    opened.done[record.session] = max(done, record.turn + 1)
                    opened.elapsed_s = max(opened.elapsed_s, record.ended_s)
                    file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, folder / RECORDS)
            (folder / DECISIONS).unlink(missing_ok=True)
        return opened

    def write(self, entry: RequestRecord | RequestDecision) -> None:
        """Append a line with one write, whole or not at all. A full disk raises OSError."""
        name = RECORDS if isinstance(entry, RequestRecord) else DECISIONS
        if name not in self._files:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[name] = os.open(self.folder / name, flags, 0o644)
        file, line = self._files[name], msgspec.json.encode(entry) + b"\n"
        written = os.write(file, line)
        if written < len(line):
            # Half a line would spoil the next one, if there is one.
            os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(
                f"only {written} of {len(line)} bytes could be written: is the disk full?"
            )

    def note(self, **facts: Any) -> None:
        """Put facts into run.json; a run that goes on later keeps them."""
        self.run.update(facts)
        write_whole(self.folder / RUN, msgspec.json.format(msgspec.json.encode(self.run)) + b"\n")

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one run at a time; the lock ends with the process.

    Raises:
        RunFolderError: another run writes into it, or it is no folder.
    """
    with file_errors(folder):
        os.scandir(folder).close()  # a lock would create a missing folder as a file
        lock = Lock(folder)
    try:
        free = True
        with suppress(OSError):  # a file system without locks
            free = lock.take()
        if not free:
            raise RunFolderError(f"{folder}: another run is writing into it: wait for its end")
        yield
    finally:
        lock.release()


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file: its new content is complete, or the old one stays."""
    new = path.with_name(f".{path.name}.part")
    new.write_bytes(data)
    os.replace(new, path)


# -- reading --------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
        RunFolderError: there is none, or it is damaged.
    """
    path = folder / RUN
    if not path.exists():
        raise RunFolderError(f"{folder} holds no run: there is no {RUN}")
    try:
        with file_errors(path):
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise RunFolderError(f"{path}: {error}") from None
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{path}: not JSON: {error}") from None


def read_records(folder: Path) -> Iterator[RequestRecord]:
    """A run's records, one at a time, with their decisions; none if there is no file.

    A last line without its end is left out. Of several decisions on a request the last one counts.
    Decisions are looked up in their file, since all of them together would take too much memory.

    Raises:
        RunFolderError: a malformed line, by file and line; or a file that cannot be read.
    """
    decisions, places = folder / DECISIONS, {}
    for place, line, where in _lines(decisions):
        places[_decoded(line, _decision, where).request_id] = place
    with decisions.open("rb") if places else nullcontext() as file:
        for _, line, where in _lines(folder / RECORDS):
            record = _decoded(line, _record, where)
            if file is not None and record.request_id in places:
                file.seek(places[record.request_id])
                found = _decision(file.readline())
                record.predicted, record.actual = found.predicted, found.actual
            yield record


def was_cut(folder: Path) -> bool:
    """Whether the last line of the records has no end, as when its writer was killed."""
    path = folder / RECORDS
    with file_errors(path):
        if not path.exists() or not path.stat().st_size:
            return False
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


@contextmanager
def file_errors(place: Path, doing: str = "") -> Iterator[None]:
    """Turn an OSError into a RunFolderError that names the place."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{place}: {doing}{error.strerror or error}") from None


_record = msgspec.json.Decoder(RequestRecord).decode
_decision = msgspec.json.Decoder(RequestDecision).decode


def _decoded(line: bytes, decode: Callable[[bytes], T], where: str) -> T:
    try:
        return decode(line)
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{where}: not a record: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """(offset, line, file and number) of each whole line."""
    offset = 0
    with file_errors(path), path.open("rb") if path.exists() else nullcontext(()) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield offset, line, f"{path}:{number}"
            offset += len(line)
