"""What every section of the settings shares: strict, frozen, and the types of its values.

`checked` is for rules that pydantic would look at only once everything else is right: it reports
their faults beside the others, so that a file is mended in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kappa.keys import TENANT_NAME

TenantName = Annotated[str, Field(pattern=TENANT_NAME)]

Finite = Annotated[float, Field(allow_inf_nan=False)]

Fault = tuple[tuple[int | str, ...], str]
"""Where, from the section on, and why."""


class SettingsError(ValueError):
    """A configuration that cannot be used; the message names file, key, reason and remedy."""


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def checked(
    handler: Callable[[Any], Any], value: Any, faults: Iterable[Fault], *, rules: bool = True
) -> Any:
    """`handler(value)`, for a validator of mode "wrap"; `faults` are reported beside what it finds.

    rules: whether what `handler` finds of the whole section counts; not so where it was shown only
    a part, and would blame what is missing.

    Raises:
        ValidationError: with every fault; none of them repeats the value, which may hold a key.
    """
    found = list(faults)
    made = None
    try:
        made = handler(value)
    except ValidationError as error:
        found = [one for one in faults_in(error) if rules or one[0]] + found
    if found:
        raise ValidationError.from_exception_data("settings", [_details(*one) for one in found])
    return made


def faults_in(error: ValidationError) -> list[Fault]:
    """What pydantic found, without the values."""
    found = error.errors(include_input=False, include_url=False)
    return [(one["loc"], one["msg"]) for one in found]


def _details(loc: tuple[int | str, ...], reason: str) -> InitErrorDetails:
    kind = PydanticCustomError("settings", "{reason}", {"reason": reason})
    return InitErrorDetails(type=kind, loc=loc, input=None)
