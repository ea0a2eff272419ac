"""A request of vLLM's as one of an engine of ours. Fields that our engines cannot serve (log
probabilities, penalties, grammars, …) are refused by name rather than ignored. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from kappa.protocol import APPROX_KEY
from kappa_engine.sampling import Sampling
from kappa_engine.sequence import EngineRequest
from kappa_workers.request_metadata import DEFAULT_TENANT, plan_of, request_id_of, tenant_of

# Fields with a meaning here, or only to vLLM's front end; all others must have their defaults.
_KNOWN = frozenset((
    "n", "temperature", "top_p", "seed", "max_tokens", "ignore_eos", "extra_args",
    "stop", "stop_token_ids", "include_stop_str_in_output", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "output_kind", "stream_interval", "skip_clone",
    "output_text_buffer_length", "flat_logprobs",
))  # fmt: skip
_UNSET = SamplingParams()
_HARMLESS = {"top_k": -1, "logit_bias": {}}
# By the names that clients know them by.
_FIELDS = {"structured_outputs": "response_format"}
_MOST_TOKENS = 1 << 24


def refuse_unknown(params: SamplingParams, called: str) -> None:
    """Raise `VLLMValidationError` for fields that the engine, named by `called`, cannot serve."""
    for name in params.__struct_fields__:
        if name in _KNOWN or name.startswith("_"):
            continue
        value = getattr(params, name)
        if value not in (getattr(_UNSET, name), _HARMLESS.get(name)):
            field = _FIELDS.get(name, name)
            raise VLLMValidationError(
                f"{field}: {called} does not do this; use vllm for it", parameter=field
            )


def engine_request(
    tokens: Sequence[int], params: SamplingParams, salt: str | None, priority: int
) -> EngineRequest:
    """The engine's request of a prompt and vLLM's parameters.

    Raises:
        ValueError: a number that sampling has no meaning for.
    """
    stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    extra = params.extra_args or {}
    return EngineRequest(
        tokens=tokens,
        max_tokens=_MOST_TOKENS if params.max_tokens is None else params.max_tokens,
        sampling=Sampling(params.temperature, params.top_p, params.seed, frozenset(stops)),
        tenant=tenant_of(extra) or DEFAULT_TENANT,
        priority=priority,
        planner=plan_of(params) or None,
        salt=salt or "",
        name=request_id_of(params),
        approx=bool(extra.get(APPROX_KEY)),
    )
