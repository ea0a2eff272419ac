"""Lines of a text file, plain or gzipped, with their numbers; and checked fields of JSON lines.

The readers of text formats share these, so that every damaged file is reported alike: file, line,
reason.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from workload.errors import WorkloadError
from workload.shapes import require_tokens

Record = dict[str, Any]

_BLANKS = re.compile(r"[ \t\r\n]*")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1; a name ending in `.gz` is unpacked.

    Raises:
        WorkloadError: if the file is absent, cut short or not text.
    """
    number = 0
    try:
        with _open_text(path) as lines:
            for line in lines:
                number += 1
                yield number, line
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}:{number + 1}: not UTF-8 ({error.reason})") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"{path}:{number + 1}" if number else str(path)
        raise WorkloadError(f"{where}: {reason}") from error


def whole_text(path: Path) -> str:
    """The whole of a UTF-8 file, unpacked as `numbered_lines` does."""
    return "".join(line for _, line in numbered_lines(path))


def json_items(path: Path) -> Iterator[Any]:
    """The items of the JSON list that a file holds, one at a time.

    Raises:
        WorkloadError: if the file is absent or damaged, or holds no list; what comes before the
            damage is given first.
    """
    text = whole_text(path)
    decoder = json.JSONDecoder()
    try:
        place = _skip(text, 0)
        if text[place : place + 1] != "[":
            found_here = type(decoder.raw_decode(text, place)[0]).__name__
            raise WorkloadError(f"{path}: expected a list, found {found_here}")
        place = _skip(text, place + 1)
        last = text[place : place + 1]
        while last != "]":
            item, place = decoder.raw_decode(text, place)
            yield item
            place = _skip(text, place)
            last = text[place : place + 1]
            if last not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
            if last == ",":
                place = _skip(text, place + 1)
        rest = _skip(text, place + 1)
        if rest < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, column {error.colno})"
        ) from error
    except RecursionError:
        raise WorkloadError(f"{path}: not JSON of this format (nested too deep)") from None


def _skip(text: str, place: int) -> int:
    """Past white space."""
    match = _BLANKS.match(text, place)
    return place if match is None else match.end()


def json_object(line: str) -> Record:
    """The JSON object that a line holds; ValueError says why there is none."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError:
        raise ValueError("not JSON of any known format (nested too deep)") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    return record


def text_field(record: Record, field: str) -> str:
    """The string in a field; ValueError otherwise."""
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} must be a string, found {found(record, field)}")
    return value


def tokens_field(record: Record, field: str, least: int = 0) -> int:
    """The length in tokens in a field, at least `least`; ValueError otherwise."""
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"field {field!r} must be an integer, found {found(record, field)}")
    return require_tokens(f"field {field!r}", value, least)


def number_field(record: Record, field: str) -> float:
    """The finite number, zero or more, in a field; ValueError otherwise."""
    value = record.get(field)
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"field {field!r} must be a finite number, found {found(record, field)}")
    if number < 0:
        raise ValueError(f"field {field!r} must not be negative, found {value}")
    return number


def found(record: Record, field: str) -> str:
    """What a field holds, short enough for a message."""
    return repr(record[field])[:40] if field in record else "nothing"


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
