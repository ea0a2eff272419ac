"""What a load test leaves on disk, written as it happens: records.jsonl, decisions.jsonl, run.json.

Every ended request is one line, appended with one write: a run that is killed loses no line, at
most the end of the last. `Journal.resume` drops that, and requests that were stopped, so that they
are sent again and no other is. Decisions come later than the requests they belong to; they wait in
a file of their own and are put into the records when the run ends, or when a report reads them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec

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
"""Kinds of errors that `Record.error` may hold besides the empty string, and what they mean."""


class JournalError(ValueError):
    """The folder cannot be used so; the message says which file, why and what to do."""


class RequestRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What became of one request. Times in seconds since the run began, on one monotonic clock.

    session, turn (from 0), tenant: whose request it was; attempt: from 0, above it a retry.
    scheduled_s: when it was due, which is its session's arrival, or its predecessor's end plus the
    pause; latency counts from here, also if sending was late (coordinated omission). sent_s: when
    the bytes were handed over (of the last attempt); first_token_s, last_token_s: arrival of the
    first and last chunk with output, None without one; ended_s: end of the answer, or of the
    attempt to get one.
    input_tokens, output_tokens: as requested; generated_tokens: as reported in the endpoint's
    usage, else chunks with output; prompt_tokens: as reported in usage, else None. cached_tokens,
    new_tokens: as expected with an unlimited cache. gaps_s: between chunks with output.
    status: HTTP status, 0 without an answer; error: one of `ERROR_KINDS` or empty; error_detail:
    for people, at most a line; retried: the errors of the attempts before, in order.
    request_id, node, paced, reason, ratio, crit, predicted_ttft_s: from the response headers of our
    cluster; empty or None elsewhere. predicted, actual: the decision from `GET /v1/decisions`, with
    queue_s, load_s, compute_s, ttft_s and token counts; None where it was not reported.
    """

    session: str
    turn: int
    tenant: str = ""
    attempt: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    new_tokens: int = 0
    gaps_s: list[float] = []
    status: int = 0
    error: str = ""
    error_detail: str = ""
    retried: list[str] = []
    request_id: str = ""
    node: str = ""
    paced: bool = False
    reason: str = ""
    ratio: float | None = None
    crit: float | None = None
    predicted_ttft_s: float | None = None
    predicted: dict[str, Any] | None = None
    actual: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.session, self.turn

    @property
    def ttft_s(self) -> float | None:
        """Seconds from when it was due to its first chunk with output; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per later token, by tokens and not by chunks; None for one token or none."""
        later = self.generated_tokens - 1
        if self.first_token_s is None or self.last_token_s is None or later < 1:
            return None
        return (self.last_token_s - self.first_token_s) / later


class RequestDecision(msgspec.Struct):
    """What our cluster predicted of a request, and what became of that (`GET /v1/decisions`)."""

    request_id: str
    predicted: dict[str, Any]
    actual: dict[str, Any]


# -- writing --------------------------------------------------------------------------------------


class Journal:
    """The open files of one run, from `create` or `resume`.

    done: turns already answered, by session; elapsed_s: when the last of them ended, in seconds
    since the run began.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
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
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RUN).exists() or (folder / RECORDS).exists():
                raise JournalError(
                    f"{folder} holds a run already: give another --out, or --resume {folder}"
                )
            journal = cls(folder, run)
            journal.note()
            return journal

    @classmethod
    def resume(cls, folder: Path, options: Mapping[str, Any]) -> Journal:
        """Go on with the run in `folder`.

        Raises:
            JournalError: there is none, it is damaged, or its options were others.
        """
        run = read_run(folder)
        _require_same(folder, run.get(OPTIONS) or {}, options)
        done: dict[str, int] = {}
        elapsed_s = 0.0

        def kept(record: RequestRecord) -> RequestRecord | None:
            nonlocal elapsed_s
            if record.error == "cancelled":
                return None
            done[record.session] = max(done.get(record.session, 0), record.turn + 1)
            elapsed_s = max(elapsed_s, record.ended_s)
            return record

        with file_errors(folder):
            _rewrite(folder / RECORDS, kept)
            _merge_decisions(folder)
            journal = cls(folder, run)
        journal.done, journal.elapsed_s = done, elapsed_s
        return journal

    def write(self, record: RequestRecord) -> None:
        _append(self._records, record)

    def write_decision(self, decision: RequestDecision) -> None:
        if self._decisions < 0:
            self._decisions = _appending(self.folder / DECISIONS)
        _append(self._decisions, decision)

    def note(self, **facts: Any) -> None:
        """Put facts into run.json; a run that goes on later keeps them."""
        self.run.update(facts)
        write_whole(self.folder / RUN, msgspec.json.format(msgspec.json.encode(self.run)) + b"\n")

    def close(self) -> None:
        """Close the files and put the decisions into the records. Idempotent."""
        for file in (self._records, self._decisions):
            if file >= 0:
                os.close(file)
        self._records = self._decisions = -1
        _merge_decisions(self.folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for one run at a time; the system lets go of it however the process ends.

    Raises:
        JournalError: another run writes into it, or it is none.
    """
    with file_errors(folder):
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another run is writing into it: wait for its end"
            raise JournalError(f"{folder}: {why}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(place)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file: its new content is complete, or the old one stays."""
    new = path.with_name(f".{path.name}.part")
    new.write_bytes(data)
    os.replace(new, path)


def _require_same(folder: Path, before: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for name in sorted({*before, *options}):
        if before.get(name) != options.get(name):
            raise JournalError(
                f"{folder} is a run with {name} {before.get(name)!r}, not {options.get(name)!r}: "
                "resume it with the same options, or begin another with --out"
            )


def _merge_decisions(folder: Path) -> None:
    path = folder / DECISIONS
    if path.exists():
        with _joining(path) as join:
            _rewrite(folder / RECORDS, join)
        path.unlink()


def _rewrite(path: Path, change: Callable[[RequestRecord], RequestRecord | None]) -> None:
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


def _appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _append(file: int, entry: RequestRecord | RequestDecision) -> None:
    """One write each: a line is in the file or it is not. A disk that is full is an error."""
    line = msgspec.json.encode(entry) + b"\n"
    written = os.write(file, line)
    if written < len(line):
        # Half a line would spoil the next one, if there is one.
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(f"only {written} of {len(line)} bytes could be written: is the disk full?")


# -- reading --------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        JournalError: there is none, or it is damaged.
    """
    path = folder / RUN
    try:
        with file_errors(path):
            if not path.exists():
                raise JournalError(f"{folder} holds no run: there is no {RUN}")
            run = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise JournalError(f"{path}: not JSON: {error}") from None
    if not isinstance(run, dict):
        raise JournalError(f"{path}: expected an object, found {type(run).__name__}")
    return run


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records of a journal, one at a time; a last line without its end is left out.

    Raises:
        JournalError: a line that is no record, naming file and line; or no leave to read.
    """
    for number, _, line in _lines(path):
        yield _decoded(line, _record, f"{path}:{number}")


def read_joined(folder: Path) -> Iterator[RequestRecord]:
    """A run's records with the decisions on them; raises as `read_records`."""
    with _joining(folder / DECISIONS) as join:
        yield from map(join, read_records(folder / RECORDS))


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
    """Turn an OSError into a JournalError that names the place."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"{place}: {doing}{error.strerror or error}") from None


_record = msgspec.json.Decoder(RequestRecord).decode
_decision = msgspec.json.Decoder(RequestDecision).decode


def _decoded(line: bytes, decode: Callable[[bytes], T], place: str) -> T:
    try:
        return decode(line)
    except (ValueError, TypeError) as error:
        raise JournalError(f"{place}: not a record: {error}") from None


@contextmanager
def _joining(path: Path) -> Iterator[Callable[[RequestRecord], RequestRecord]]:
    """A function that puts a request's decision into its record, looked up where it lies in the
    file: many runs' decisions together are larger than memory should be. The last one counts."""
    places: dict[str, int] = {}
    for number, place, line in _lines(path):
        places[_decoded(line, _decision, f"{path}:{number}").request_id] = place
    with path.open("rb") if places else nullcontext() as file:

        def join(record: RequestRecord) -> RequestRecord:
            place = places.get(record.request_id) if record.request_id else None
            if place is not None and file is not None:
                file.seek(place)
                decision = _decision(file.readline())
                record.predicted, record.actual = decision.predicted, decision.actual
            return record

        yield join


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number, place, line) of each whole line; none if there is no file."""
    place = 0
    with file_errors(path), path.open("rb") if path.exists() else nullcontext(()) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, place, line
            place += len(line)
