"""Loops over arrays as machine code, for what is done on every request.

A decision on a few workers costs numpy some forty calls of a microsecond each, however short the
arrays are; one compiled loop costs as much as two of them, and reads like the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, *, nogil: bool = False) -> F:
    """`function`, compiled when it is first called with arguments of these types (numba); `nogil`:
    it runs without the interpreter's lock.

    Division by zero gives infinity or NaN, as with arrays; indices are not checked. What was
    compiled is kept for the next process beside the source or in the user's cache; where there is
    no place for it each process compiles for itself, which takes seconds.

    Constants are frozen in, and numba looks only at the age of the function's own file: what it
    uses, constants and other compiled functions, must stand in that file or come as an argument.
    """
    try:
        made = njit(cache=True, error_model="numpy", nogil=nogil)(function)
    except RuntimeError:
        made = njit(error_model="numpy", nogil=nogil)(function)
    return cast(F, made)
