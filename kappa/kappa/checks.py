"""Checks of records and files: errors name the field, the value and what to give instead."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

T = TypeVar("T")


def refusal(owner: object, field: str, value: object, remedy: str) -> ValueError:
    """The error for a field of a record."""
    return ValueError(f"{type(owner).__name__}.{field} is {value!r}: {remedy}")


def _check(owner: object, names: tuple[str, ...], good: Callable[[Any], bool], give: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not good(value):
            raise refusal(owner, name, value, f"give {give}")


def check_positive(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not finite and above zero."""
    _check(owner, names, lambda v: math.isfinite(v) and v > 0, "a finite number above zero")


def check_not_negative(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not finite and zero or more."""
    _check(owner, names, lambda v: math.isfinite(v) and v >= 0, "a finite number, zero or more")


def check_at_least(owner: object, **least: int) -> None:
    """Raise ValueError for the first of these fields that is below its bound."""
    for name, bound in least.items():
        if (value := getattr(owner, name)) < bound:
            raise refusal(owner, name, value, f"give {bound} or more")


def check_share(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is no share in (0, 1]."""
    _check(owner, names, lambda v: 0.0 < v <= 1.0, "a share in (0, 1]")


def unknown_name(what: str, name: str, known: Iterable[str], remedy: str) -> ValueError:
    """The error for an unknown name; it lists the known ones and suggests the nearest."""
    known = sorted(known)
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"no {what} named {name!r}.{hint} Known: {', '.join(known)}; {remedy}.")


def record_from(cls: type[T], data: Mapping[str, Any], what: str, remedy: str = "") -> T:
    """A dataclass from a mapping of its fields, defaults filled in.

    Raises:
        ValueError: an unknown or a missing key, named; or what the class itself refuses.
    """
    known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in known]
    if unknown := sorted(set(data) - set(names)):
        problem = f"unknown keys {unknown}: {remedy or 'remove them'}"
        raise ValueError(f"{what}: {problem}; known are {', '.join(names)}")
    required = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in data]:
        problem = f"lacks {missing}: {remedy or 'add them'}"
        raise ValueError(f"{what}: {problem}; known are {', '.join(names)}")
    return cls(**data)


def steered_percent(mode: str) -> float:
    """Percent of conversations that our router steers in `shadow`, `canary:N` (0 < N < 100) or
    `on`; ValueError for any other mode."""
    percents = {"shadow": 0.0, "on": 100.0}
    name, _, share = mode.partition(":")
    with contextlib.suppress(ValueError):
        if name == "canary" and 0 < float(share) < 100:
            percents[mode] = float(share)
    if mode not in percents:
        raise ValueError(f"mode {mode!r}: give shadow, canary:N with 0 < N < 100 (percent), or on")
    return percents[mode]


def http_parts(url: str) -> SplitResult | None:
    """The parts of an http(s) URL with a host; None if the text is not one."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    return parts if usable else None


def read_json_object(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` names it in errors, as in "node profile".

    Raises:
        ValueError: it cannot be read, is no JSON, or is no object.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the {what}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds {type(data).__name__}; a {what} is a JSON object")
    return data
