"""The base of every settings section: strict, frozen, with the types of its values.

Pydantic reports all faults of single values at once; `refuse` does so for faults between sections,
which are looked for when each section is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kappa.keys import TENANT_NAME
from kappa.protocol import MOST_PRIORITY

TenantName = Annotated[str, Field(pattern=TENANT_NAME)]

PriorityClass = Annotated[int, Field(ge=0, le=MOST_PRIORITY)]

Finite = Annotated[float, Field(allow_inf_nan=False)]

Fault = tuple[tuple[int | str, ...], str]
"""(place from the section on, reason)."""


class SettingsError(ValueError):
    """A configuration that cannot be used; the message names file, key, reason and remedy."""


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_by(reader: Callable[[str], object]) -> AfterValidator:
    """A check of texts, kept as they are; `reader` raises ValueError for one that is wrong."""

    def checked(value: str) -> str:
        reader(value)
        return value

    return AfterValidator(checked)


def _from_here(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty: name a file, or leave it out for no log")
    return str(Path(value).absolute())


LogFile = Annotated[str, AfterValidator(_from_here)] | None
"""Becomes a whole path, since workers have working folders of their own; None: no log."""


def refuse(faults: Iterable[Fault]) -> None:
    """Raise ValidationError with all faults, if there are any. Values, which may hold a key, are
    not repeated."""
    found = [
        InitErrorDetails(
            type=PydanticCustomError("settings", "{reason}", {"reason": reason}),
            loc=loc,
            input=None,
        )
        for loc, reason in faults
    ]
    if found:
        raise ValidationError.from_exception_data("settings", found)


def faults_in(error: ValidationError) -> list[Fault]:
    """The faults that pydantic found, without values."""
    found = error.errors(include_input=False, include_url=False)
    return [(one["loc"], one["msg"].removeprefix("Value error, ")) for one in found]


AnySection = TypeVar("AnySection", bound=Section)


def settings_from(
    kind: type[AnySection], path: str | Path | None = None, **overrides: Any
) -> AnySection:
    """Read settings from a YAML file (none: the defaults), then apply `overrides` on top level.

    Raises:
        SettingsError: with the file and, for each fault, its key and reason.
    """
    data: Any = {}
    where = "built-in defaults and options"
    if path is not None:
        where = str(path)
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise SettingsError(f"{where}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{where}: is not UTF-8 text: {error.reason}") from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{where}: is not YAML: {_without_text(error)}") from None
        if not isinstance(data, dict):
            raise SettingsError(
                f"{where}: expected a mapping of settings, found {type(data).__name__}"
            )
    try:
        return kind.model_validate({**data, **overrides})
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(_shown(loc)) or '(file)'}: {reason}" for loc, reason in faults_in(error)
        )
        raise SettingsError(f"{where}: {error.error_count()} fault(s)\n{faults}") from None


def settings_with(
    options: Mapping[str, Mapping[str, Any]], kind: type[AnySection], path: str | Path | None,
    **overrides: Any,
) -> AnySection:  # fmt: skip
    """`settings_from`, with options, by section, before all else. An option that is None was not
    given."""
    settings, changes = settings_from(kind, path, **overrides), dict[str, Any]()
    for section, given in options.items():
        changed = {name: value for name, value in given.items() if value is not None}
        if changed:
            there: Section | None = getattr(settings, section)
            changes[section] = {**(there.model_dump() if there else {}), **changed}
    return settings_from(kind, path, **(overrides | changes)) if changes else settings


def _shown(loc: tuple[int | str, ...]) -> list[str]:
    """The path to a fault, without a secret key as one of its parts."""
    parts = [str(part) for part in loc]
    return ["(key)" if i and parts[i - 1] == "by_key" else part for i, part in enumerate(parts)]


def _without_text(error: yaml.YAMLError) -> str:
    """Place and reason, without the line itself, which may hold a key."""
    mark = getattr(error, "problem_mark", None)
    why = getattr(error, "problem", None) or "unreadable"
    return f"{why}, line {mark.line + 1} column {mark.column + 1}" if mark else str(why)
