"""Reads what the decider sent with a request, as `vllm_xargs` of a body or
`SamplingParams.extra_args`. No value may end an engine: one that cannot be read counts as not
sent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kappa.protocol import CHARGES_KEY, PLAN_KEY, REQUEST_ID_KEY, TENANT_KEY, WEIGHT_KEY, Charge

DEFAULT_TENANT = "default"
# No prompt and no answer is longer; a client may name any number.
_MAX_TOKENS = 2**31 - 1
# A number beyond it is nonsense, and may be an int that no float can hold.
_MAX_NUMBER = 2.0**63


def request_id_of(sampling_params: Any) -> str:
    """The decider's request id; "" if none."""
    return str((getattr(sampling_params, "extra_args", None) or {}).get(REQUEST_ID_KEY, ""))


def plan_of(sampling_params: Any) -> str:
    """The planner that a request names for its own prefix; "" if none."""
    return str((getattr(sampling_params, "extra_args", None) or {}).get(PLAN_KEY, ""))


def tenant_of(metadata: Mapping[str, Any] | None) -> str:
    """A request's tenant; "" if it is not named, or not by a string."""
    tenant = (metadata or {}).get(TENANT_KEY)
    return tenant if isinstance(tenant, str) else ""


def charges_of(
    metadata: Mapping[str, Any], tenant: str
) -> tuple[dict[str, Charge], dict[str, float]]:
    """What other workers charged whom, and this tenant's weight."""
    weight: Any = metadata.get(WEIGHT_KEY)
    weights = {tenant: float(weight)} if _is_number(weight) and weight > 0 else {}
    try:
        sent = json.loads(metadata.get(CHARGES_KEY) or "{}")
        charges = {str(name): Charge(*seconds) for name, seconds in sent.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}, weights
    return {t: c for t, c in charges.items() if all(_is_number(s) and s >= 0 for s in c)}, weights


def token_count(value: Any) -> int:
    """Tokens, 0 to 2^31 - 1."""
    # Bounded before `int`, which refuses infinity; NaN is not above zero.
    return int(min(value, _MAX_TOKENS)) if isinstance(value, int | float) and value > 0 else 0


def seconds_of(value: Any) -> float:
    """A prediction, finite and at least 0."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _MAX_NUMBER
