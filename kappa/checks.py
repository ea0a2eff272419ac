"""Refusing numbers that cannot be, with the field, the value and what to give instead."""

from __future__ import annotations

import math


def refusal(owner: object, field: str, value: object, remedy: str) -> ValueError:
    """The error for a field of a record; `owner` is the record, or its class's name."""
    name = owner if isinstance(owner, str) else type(owner).__name__
    return ValueError(f"{name}.{field} is {value!r}: {remedy}")


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
