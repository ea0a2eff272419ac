"""A request's JSON body, read no further than its reader needs it. Pure.

One compiled pass, without the interpreter's lock, bounds a body and finds the fields of its top
level; only wanted values become Python objects, long ones in parts. Both HTTP faces read so.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kappa.compiled import COMPILES, compiled

# Decoding 4 MB of `[],` whole takes 1.1 s, and 0.3 s with the cyclic collector off, which visits
# every container again and again (AMD EPYC, one core). So their number is bounded.
MAX_CONTAINERS = 100_000
"""Lists and objects in a body. A conversation of 4,096 messages with tool calls has some 30,000."""
MAX_VALUES = 2_000_000
"""Values in a body beyond the first of each list and object: token ids, above all."""
MAX_NESTING = 128
MAX_FIELDS = 1_000
"""Fields of the top level."""
PART_BYTES = 1 << 15
"""Longer lists and objects are decoded in parts, since a call holds the interpreter's lock."""
_STRIDE = 32
# The list of messages, a message, its content, a part; each is scanned again.
_SPLIT_LEVELS = 4 if COMPILES else 0

UNREAD = msgspec.UNSET
"""Stands for a value that was not wanted."""

_FINE, _MALFORMED, _NO_BRACKET, _CONTAINERS, _VALUES, _NESTING, _FIELDS = range(7)
_EXCESSIVE = {
    _CONTAINERS: f"has more than {MAX_CONTAINERS} lists and objects: join small parts into fewer",
    _VALUES: f"has more than {MAX_VALUES} values: send them in several requests",
    _NESTING: f"is nested deeper than {MAX_NESTING}: flatten it",
    _FIELDS: f"has more than {MAX_FIELDS} fields at its top level: leave out what is not needed",
}
_LIST, _OBJECT, _QUOTE, _BACKSLASH, _COMMA, _COLON, _NULL = map(ord, '[{"\\,:n')
_BLANK, _QUOTED, _OPENS, _CLOSES, _SEPARATES, _NAMES = range(1, 7)
# Of each byte outside of quotes.
_KINDS = np.zeros(256, dtype=np.uint8)
for _kind, _bytes in enumerate((b" \t\n\r", b'"', b"[{", b"]}", b",", b":"), start=_BLANK):
    _KINDS[list(_bytes)] = _kind
_decode_text = msgspec.json.Decoder(str).decode


class MalformedError(ValueError):
    """A text is not valid JSON; the message says why. field: a wanted one that holds the fault."""

    field: str | None = None


class NoObjectError(ValueError):
    """A body is not a JSON object."""


class ExcessiveError(ValueError):
    """A text exceeds a bound; the message names the bound and the remedy."""


class Shape(NamedTuple):
    """The lists and objects of a JSON text, and how deep they are nested."""

    containers: int
    nesting: int


def read_object(body: bytes, wanted: Container[str]) -> dict[str, Any]:
    """The fields of a JSON object: `wanted` ones decoded, others None if they are null, else
    `UNREAD`; of the latter only quotes, brackets and commas are checked. The last of one name
    counts.

    Raises:
        NoObjectError: the body does not begin as an object.
        ExcessiveError: it exceeds a bound.
        MalformedError: it is not valid JSON, as far as it is read.
    """
    data = np.frombuffer(body, dtype=np.uint8)
    rows = np.empty((MAX_FIELDS + 1, 4), dtype=np.int64)
    found, first, runs, _, _ = _outline(data, 0, len(body), 0, rows)
    if found == _NO_BRACKET or (first < len(body) and body[first] != _OBJECT):
        raise NoObjectError
    _check(found)
    fields: dict[str, Any] = {}
    for begin, colon, value, end in rows[:runs].tolist():
        name = _name(data, begin, colon, value, end)
        if name in wanted:
            try:
                fields[name] = _decoded(data, value, end, _SPLIT_LEVELS)
            except (ValueError, RecursionError) as error:
                fault = MalformedError(f"{_reason(error)} in {name}")
                fault.field = name
                raise fault from None
        else:
            fields[name] = None if body[value] == _NULL else UNREAD
    return fields


def shape_of(text: bytes) -> Shape:
    """The shape of a JSON list or object, of which nothing is made. Raises MalformedError, also
    for a text that is neither, and ExcessiveError."""
    data = np.frombuffer(text, dtype=np.uint8)
    rows = np.empty((2, 4), dtype=np.int64)
    fault, _, _, containers, nesting = _outline(data, 0, len(text), len(text) + 1, rows)
    _check(fault)
    return Shape(containers, nesting)


def _check(fault: int) -> None:
    if fault in _EXCESSIVE:
        raise ExcessiveError(_EXCESSIVE[fault])
    if fault != _FINE:
        raise MalformedError("a quote, bracket, comma or value is missing, or one too many")


def _name(data: NDArray[np.uint8], begin: int, colon: int, value: int, end: int) -> str:
    if colon < 0 or value == end:
        raise MalformedError("a field has no name or no value")
    try:
        return _decode_text(data.data[begin:colon])
    except ValueError as error:
        raise MalformedError(f"{_reason(error)} in a field's name") from None


def _reason(error: Exception) -> str:
    """A decoder's message, without its offset, which counts from the beginning of a part."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ").partition(" (byte")[0]


def _decoded(data: NDArray[np.uint8], begin: int, end: int, levels: int) -> Any:
    """The value that stands there, of which `levels` levels are decoded in parts."""
    opening, view = data[begin], data.data[begin:end]
    is_long = end - begin > PART_BYTES and opening in (_LIST, _OBJECT)
    if not is_long or not levels:
        return msgspec.json.decode(view)
    rows = np.empty((2 * (end - begin) // PART_BYTES + 3, 4), dtype=np.int64)
    fault, _, runs, _, _ = _outline(data, begin, end, PART_BYTES, rows)
    _check(fault)
    values: list[Any] = []
    fields: dict[str, Any] = {}
    for start, colon, value, stop in rows[:runs].tolist():
        is_single = stop - start > 2 * PART_BYTES
        if opening == _LIST and is_single:
            values.append(_decoded(data, start, stop, levels - 1))
        elif opening == _LIST:
            values += msgspec.json.decode(b"".join((b"[", data.data[start:stop], b"]")))
        elif is_single:
            name = _name(data, start, colon, value, stop)
            fields[name] = _decoded(data, value, stop, levels - 1)
        else:
            fields |= msgspec.json.decode(b"".join((b"{", data.data[start:stop], b"}")))
    return values if opening == _LIST else fields


# -- the compiled pass ------------------------------------------------------------------------

_without_lock = partial(compiled, nogil=True)


@_without_lock
def _past_blanks(data: NDArray[np.uint8], i: int, end: int) -> int:
    while i < end and _KINDS[data[i]] == _BLANK:
        i += 1
    return i


# Without a compiler: a text up to its last quote; what stands before the next sign that counts, at
# the level that is followed and deeper.
_TEXT = re.compile(rb'(?:[^"\\]++|\\.?)*+', re.DOTALL)
_NEAR = re.compile(rb'[^"\[\]{},:]*+')
_DEEP = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_WHOLE_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def _text_end_by_pattern(data: NDArray[np.uint8], i: int, end: int) -> int:
    return cast(re.Match[bytes], _TEXT.match(data.data, i, end)).end()


def _skip_by_pattern(
    data: NDArray[np.uint8], i: int, end: int, depth: int, seen: NDArray[np.int64]
) -> int:
    if depth == 1:
        return cast(re.Match[bytes], _NEAR.match(data.data, i, end)).end()
    stop = cast(re.Match[bytes], _DEEP.match(data.data, i, end)).end()
    seen[2] += _WHOLE_TEXT.sub(b"", data.data[i:stop]).count(b",")
    return stop


@partial(_without_lock, plain=_text_end_by_pattern)
def _text_end(data: NDArray[np.uint8], i: int, end: int) -> int:
    """The quote that ends a text, or no less than `end`."""
    while i < end:
        near = min(i + _STRIDE, end)
        while i < near and data[i] != _QUOTE and data[i] != _BACKSLASH:
            i += 1
        if i < near:
            if data[i] == _QUOTE:
                return i
            i += 2
            continue
        plain = True
        while plain and i + _STRIDE <= end:
            for k in range(i, i + _STRIDE):  # In vector instructions, since it has no exit.
                plain &= (data[k] != _QUOTE) & (data[k] != _BACKSLASH)
            i += _STRIDE if plain else 0
    return end


@partial(_without_lock, plain=_skip_by_pattern)
def _skip(data: NDArray[np.uint8], i: int, end: int, depth: int, seen: NDArray[np.int64]) -> int:
    """The next sign that counts, or `end`; commas deeper than the level followed are counted."""
    while i < end:
        kind = _KINDS[data[i]]
        if kind == _SEPARATES and depth > 1:
            seen[2] += 1
        elif kind > _BLANK and (kind != _NAMES or depth == 1):
            return i
        i += 1
    return i


@_without_lock
def _element(
    data: NDArray[np.uint8], i: int, end: int, opened: NDArray[np.uint8], seen: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Follow one element of the list or object that `opened[0]` opens; `seen` counts containers,
    their nesting, and commas, so far.

    Returns:
        A fault, or `_FINE`; its colon, -1 without; the comma or the bracket after it.
    """
    depth, colon = 1, -1
    while True:
        i = _skip(data, i, end, depth, seen)
        if seen[2] > MAX_VALUES:
            return _VALUES, colon, i
        if i >= end:
            return _MALFORMED, colon, end
        kind = _KINDS[data[i]]
        if kind == _QUOTED:
            i = _text_end(data, i + 1, end)
        elif kind == _OPENS:
            if depth == MAX_NESTING:
                return _NESTING, colon, i
            opened[depth] = data[i]
            depth += 1
            seen[0] += 1
            seen[1] = max(seen[1], depth)
            if seen[0] > MAX_CONTAINERS:
                return _CONTAINERS, colon, i
        elif kind == _NAMES:
            colon = i if colon < 0 else colon
        elif kind == _SEPARATES:
            seen[2] += 1
            if seen[2] > MAX_VALUES:
                return _VALUES, colon, i
            return _FINE, colon, i
        elif kind == _CLOSES:
            # It is the second character after the one that opens.
            if data[i] != opened[depth - 1] + 2:
                return _MALFORMED, colon, i
            if depth == 1:
                return _FINE, colon, i
            depth -= 1
        i += 1


@_without_lock
def _enter(run: NDArray[np.int64], begin: int, colon: int, value: int, end: int) -> None:
    run[0], run[1], run[2], run[3] = begin, colon, value, end


@_without_lock
def _outline(
    data: NDArray[np.uint8], begin: int, end: int, least: int, runs: NDArray[np.int64]
) -> tuple[int, int, int, int, int]:
    """Follow the list or object that stands there to its end.

    Its elements are entered in `runs` of `least` bytes and less than twice as many; a longer
    element is a run by itself, and may leave a shorter one before it, as the end may. A row says
    where a run begins, where the colon of a single element is and where its value begins (else -1),
    and where the run ends.

    Returns:
        A fault, or `_FINE`; where its bracket is; the runs; the containers; how deep they nest.
    """
    first = _past_blanks(data, begin, end)
    if first == end or _KINDS[data[first]] != _OPENS:
        return _NO_BRACKET, first, 0, 0, 0
    opened = np.empty(MAX_NESTING, dtype=np.uint8)
    opened[0] = data[first]
    seen = np.array([1, 1, 0])
    count, run, element, is_last = 0, first + 1, first + 1, False
    while not is_last:
        fault, colon, stop = _element(data, element, end, opened, seen)
        if fault != _FINE:
            return fault, first, 0, 0, 0
        is_last = data[stop] != _COMMA
        if _past_blanks(data, element, stop) == stop:
            if not is_last or element > first + 1:
                return _MALFORMED, first, 0, 0, 0
        elif count + 2 > len(runs):
            return _FIELDS, first, 0, 0, 0
        else:
            if run < element and stop - element >= least:
                _enter(runs[count], run, -1, -1, element - 1)
                count, run = count + 1, element
            if is_last or stop - run >= least:
                value = -1 if run < element or colon < 0 else _past_blanks(data, colon + 1, stop)
                _enter(runs[count], run, colon if value >= 0 else -1, value, stop)
                count, run = count + 1, stop + 1
        element = stop + 1
    if _past_blanks(data, element, end) < end:
        return _MALFORMED, first, 0, 0, 0
    return _FINE, first, count, seen[0], seen[1]
