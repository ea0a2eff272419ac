"""Refusing records that cannot be, with the field, the value and what to give instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def refusal(owner: object, field: str, value: object, remedy: str) -> ValueError:
    """The error for a field of a record."""
    return ValueError(f"{type(owner).__name__}.{field} is {value!r}: {remedy}")


def check_positive(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not finite and above zero."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value > 0):
            raise refusal(owner, name, value, "give a finite number above zero")


def check_not_negative(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not finite and zero or more."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value >= 0):
            raise refusal(owner, name, value, "give a finite number, zero or more")


def check_share(owner: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is no share in (0, 1]."""
    for name in names:
        value = getattr(owner, name)
        if not 0.0 < value <= 1.0:
            raise refusal(owner, name, value, "give a share in (0, 1]")


def record_from(cls: type[T], data: Mapping[str, Any], what: str, remedy: str = "") -> T:
    """A dataclass from a mapping of its fields, defaults filled in.

    Raises:
        ValueError: an unknown or a missing key, named; or what the class itself refuses.
    """
    known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in known]
    unknown = sorted(set(data) - set(names))
    if unknown:
        problem = f"unknown keys {unknown}: {remedy or 'remove them'}"
        raise ValueError(f"{what}: {problem}; known are {', '.join(names)}")
    missing = [field.name for field in known if field.name not in data and _required(field)]
    if missing:
        problem = f"lacks {missing}: {remedy or 'add them'}"
        raise ValueError(f"{what}: {problem}; known are {', '.join(names)}")
    return cls(**data)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
