"""Checks of single JSON values: what a field of a request may hold, whichever API it belongs to.

Pure, and without recursion where a client decides how deep it goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kappa_router.api.errors import UNKNOWN_FIELD, bad_field, refused_field

Check = Callable[[str, Any], Any]
"""Takes a field's place and its value, which is not None; returns the value that goes on.

Raises ApiError 400, which names the place.
"""

Kinds = Mapping[str, tuple[Mapping[str, Check], tuple[str, ...]]]
"""Kinds of objects by their `type`: the fields of each, and those of them that it must hold."""

MAX_COUNT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_DEPTH = 64


def whole(low: int = 0, high: int = MAX_COUNT) -> Check:
    """Whole numbers, also as floats (`4.0`)."""

    def check(where: str, value: Any) -> Any:
        integral = type(value) is int or (type(value) is float and value.is_integer())
        if not integral or not low <= value <= high:
            raise bad_field(where, f"give a whole number from {low} to {high}")
        return int(value)

    return check


def digits(text: str, most: int) -> int | None:
    """The whole number that a text of at most `most` digits writes; None: it writes none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most else None


def real(low: float, high: float) -> Check:
    """Finite numbers."""

    def check(where: str, value: Any) -> Any:
        # A comparison holds for no NaN, and Python compares integers of any size exactly.
        if type(value) not in (int, float) or not low <= value <= high:
            raise bad_field(where, f"give a number from {low:g} to {high:g}")
        return value

    return check


def flag(where: str, value: Any) -> Any:
    """True or false."""
    if not isinstance(value, bool):
        raise bad_field(where, "give true or false")
    return value


def text(most_bytes: float = math.inf) -> Check:
    """Strings that can be encoded, of at most `most_bytes`."""

    def check(where: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise bad_field(where, "give a string")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:
            # JSON can hold what no tokenizer can encode.
            raise bad_field(where, "is no text: it holds half a surrogate pair") from None
        if size_bytes > most_bytes:
            raise bad_field(where, f"give at most {most_bytes} bytes")
        return value

    return check


def later(_where: str, value: Any) -> Any:
    """Any value; it is checked together with others, by `_check_schemas`, or by the schema."""
    return value


def either(text: Check, other: Check) -> Check:
    """One check for strings, another for all else."""
    return lambda where, value: (text if isinstance(value, str) else other)(where, value)


def many(check: Check, most: int, least: int = 0) -> Check:
    """Lists of entries that pass a check."""

    def check_all(where: str, value: Any) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise bad_field(where, f"give a list of {least} to {most} entries")
        return [check(f"{where}.{i}", one) for i, one in enumerate(value)]

    return check_all


def fields_of(checks: Mapping[str, Check]) -> Check:
    """Objects: of their fields those that are named, each checked if it is not null; others
    are dropped."""

    def check(where: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise bad_field(where, "give an object")
        return {
            name: None if value[name] is None else checks[name](f"{where}.{name}", value[name])
            for name in value
            if name in checks
        }

    return check


def tagged(kinds: Kinds) -> Check:
    """Objects with a `type` that names one of several kinds."""

    def check(where: str, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_field(f"{where}.type", f"give one of {', '.join(kinds)}")
        checks, needed = kinds[kind]
        kept = fields_of({"type": NAME, **checks})(where, value)
        need(kept, *needed, where=f"{where}.")
        return kept

    return check


def need(body: Mapping[str, Any], *names: str, where: str = "") -> None:
    """Raises ApiError 400 if a field is absent or null."""
    for name in names:
        if body.get(name) is None:
            raise bad_field(f"{where}{name}", "is missing")


def choice(*words: str) -> Check:
    """One of some words."""

    def check(where: str, value: Any) -> Any:
        if value not in words:
            raise bad_field(where, f"give one of {', '.join(words)}")
        return value

    return check


def json_object(where: str, value: Any) -> Any:
    """An object of any JSON that is not too deep, with finite numbers."""
    if not isinstance(value, dict):
        raise bad_field(where, "give an object")
    check_json(where, value)
    return value


class FieldClasses(NamedTuple):
    """The three classes of a body's fields: those that go on, with their checks; those that are
    refused, with a remedy and the values that mean nothing; and those that are dropped."""

    allowed: Mapping[str, Check]
    refused: Mapping[str, tuple[str, tuple[Any, ...]]]
    dropped: frozenset[str]

    @property
    def read(self) -> frozenset[str]:
        """Fields of which more than the name counts."""
        return frozenset((*self.allowed, *self.refused))

    def kept(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a body that go on, none of them null; raises ApiError 400 for one that is
        refused, or in no class."""
        kept = {}
        for name, value in body.items():
            if value is None or name in self.dropped:
                continue
            if name in self.allowed:
                kept[name] = self.allowed[name](name, value)
            elif name not in self.refused:
                raise UNKNOWN_FIELD(name=name[:80])
            elif value not in self.refused[name][1]:
                raise refused_field(name, self.refused[name][0])
        return kept


def check_json(where: str, value: Any) -> None:
    """Bound nesting, and what numbers a compiler in C++ meets, without recursion; all texts can be
    encoded."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for one in level:
            if isinstance(one, int) and abs(one) > MAX_INT64:
                raise bad_field(where, f"numbers must lie within {MAX_INT64}")
            if isinstance(one, float) and not math.isfinite(one):
                raise bad_field(where, "numbers must be finite")
            if isinstance(one, str) and not one.isascii():
                TEXT(where, one)
        held = [one for one in level if isinstance(one, dict | list)]
        if not held:
            return
        inside = ((*one, *one.values()) if isinstance(one, dict) else one for one in held)
        level = [one for values in inside for one in values]
    raise bad_field(where, TOO_DEEP)


def check_json_text(where: str, text: str) -> None:
    """As `check_json`, of what a text holds; raises ValueError if that is no JSON."""
    try:
        check_json(where, json.loads(text))
    except RecursionError:
        raise bad_field(where, TOO_DEEP) from None


TOO_DEEP = f"is nested deeper than {MAX_DEPTH}"
TEXT, NAME, WORD = text(), text(256), text(1024)
WORDS = many(WORD, 1024)
