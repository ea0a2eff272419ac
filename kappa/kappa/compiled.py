"""Loops over arrays as machine code, for work that every request repeats.

A decision on a few workers costs numpy some forty calls of a microsecond each, however short the
arrays are; one compiled loop costs as much as two of them, and reads like the formula. Where numba
is not installed (the extra `fast`) the same loops run as Python, with the same results, slower.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np

try:
    from numba import config, njit
    from numba.core.caching import (
        InTreeCacheLocator,
        UserProvidedCacheLocator,
        UserWideCacheLocator,
    )
except ImportError:
    njit = None
    InTreeCacheLocator = UserProvidedCacheLocator = UserWideCacheLocator = object

F = TypeVar("F", bound=Callable[..., Any])
COMPILES = njit is not None
"""Whether numba is here."""
_PLACES = "_WhereSet", "_BesideSource", "_InUsersCache"


def compiled(function: F, *, nogil: bool = False, plain: F | None = None) -> F:
    """`function` compiled by numba, at its first call with arguments of given types.

    nogil: it runs without the interpreter's lock. plain: what runs without numba in its place, as
    it is, where a loop over bytes or tokens would take too long in Python.

    Division by zero gives infinity or NaN, as with arrays; indices are not checked. The function
    may call compiled functions of other files and use their constants. Machine code is kept for
    the next process, beside the source or in the user's cache, until one of the files that it is
    made of changes. Where neither can be written each process compiles, which takes seconds.
    """
    if not COMPILES:
        return plain or _uncompiled(function)
    before = config.CACHE_LOCATOR_CLASSES
    config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{name}" for name in _PLACES)
    try:
        made = njit(cache=True, error_model="numpy", nogil=nogil)(function)
    except RuntimeError:
        made = njit(error_model="numpy", nogil=nogil)(function)
    finally:
        config.CACHE_LOCATOR_CLASSES = before
    return cast(F, made)


def _uncompiled(function: F) -> F:
    """`function` in Python with arguments as compiled code sees them: fields of records are
    attributes, and a float divided by zero is infinite or NaN."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*map(_as_compiled, arguments))

    # As what numba compiles has it; a function's type knows no attributes.
    call.py_func = function  # type: ignore[attr-defined]
    return cast(F, call)


class _Record(np.void):
    """A record with its fields as attributes; numpy's own takes five times as long."""

    __getattr__ = np.void.__getitem__
    __setattr__ = np.void.__setitem__


class _Records(np.ndarray[Any, Any]):
    """An array of such records, with columns as attributes."""

    __getattr__ = np.ndarray.__getitem__


_as_records = functools.lru_cache(lambda dtype: np.dtype((_Record, dtype)))


def _as_compiled(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return np.float64(value)
    if kind is tuple:
        return tuple(map(_as_compiled, value))
    if kind is np.ndarray and value.dtype.names:
        return value.view(_as_records(value.dtype), _Records)
    if kind is np.void:
        return np.asarray(value).view(_as_records(value.dtype))[()]
    return value


def interpreted(function: F, **instead: Any) -> F:
    """The Python form of a compiled function and of those that it calls.

    It is quicker for a few numbers than entering compiled code, and takes any object. instead: used
    in place of names that the functions know; with numpy's `maximum` as `max` they take arrays.
    """
    plain = getattr(function, "py_func", None)
    if plain is None:
        return function
    code = plain.__code__
    names = {name: interpreted(plain.__globals__.get(name), **instead) for name in code.co_names}
    used = {name: value for name, value in names.items() if value is not None} | instead
    return cast(F, FunctionType(code, used, code.co_name, plain.__defaults__))


class _Stamp:
    """A cache key over all files that a function is made of.

    numba looks at the age of the function's own file; functions and constants of others are frozen
    into the machine code as well.
    """

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        super().__init__(function, path)  # type: ignore[call-arg]  # A mixin before a locator.
        self._files = {path, *_frozen(function.__globals__, set())}

    def get_source_stamp(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self._files):
            digest.update(Path(path).read_bytes())
        return digest.hexdigest()


# Where `NUMBA_CACHE_DIR` says; in `__pycache__`, where it may be written; in the user's cache.
_WhereSet = type("_WhereSet", (_Stamp, UserProvidedCacheLocator), {})
_BesideSource = type("_BesideSource", (_Stamp, InTreeCacheLocator), {})
_InUsersCache = type("_InUsersCache", (_Stamp, UserWideCacheLocator), {})


def _frozen(names: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """Files with compiled functions that `names` refers to, directly or through others."""
    for value in list(names.values()):
        of = value.__name__ if isinstance(value, ModuleType) else None
        of = getattr(getattr(value, "py_func", None), "__module__", of)
        module = sys.modules.get(of or "")
        if of and module and of not in seen and getattr(module, "compiled", None) is compiled:
            seen.add(of)
            if module.__file__:
                yield module.__file__
            yield from _frozen(vars(module), seen)
