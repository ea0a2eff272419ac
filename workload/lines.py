"""Lines of a text file, plain or gzipped, with their numbers; and checked fields of JSON lines.

The readers of text formats share these, so that every damaged file is reported alike: file, line,
reason.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from workload.errors import WorkloadError
from workload.shapes import require_tokens

Record = dict[str, Any]


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
