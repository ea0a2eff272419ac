"""Errors in the shape that OpenAI clients understand, and what each of them says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_KINDS = {403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success: HTTP status, message, OpenAI's code and parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.code, self.param, self.retry_after_s = code, param, retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return _KINDS.get(self.status, other)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": _encodable(self.message),
                "type": self.kind,
                "param": None if self.param is None else _encodable(self.param),
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least one, and how to authenticate, where it helps."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _encodable(text: str) -> str:
    """Half of a surrogate pair, quoted back to the client, cannot be encoded as it is."""
    return text.encode(errors="backslashreplace").decode()


# -- access and limits ------------------------------------------------------------------------


def invalid_api_key(*, given: bool) -> ApiError:
    """The key itself is not repeated."""
    unknown = "The API key is not known here."
    missing = "No API key was sent; send 'Authorization: Bearer KEY'."
    return ApiError(401, unknown if given else missing, code="invalid_api_key")


def operator_only(path: str) -> ApiError:
    return ApiError(
        403, f"{path} is for operators: name the key's tenant in tenants.operators.",
        code="operator_only",
    )  # fmt: skip


def headers_too_large(what: str) -> ApiError:
    return ApiError(431, f"The request has {what}.", code="headers_too_large")


def body_too_slow(limit_s: float) -> ApiError:
    return ApiError(
        408, f"The request body did not arrive within {limit_s:g} s.", code="body_too_slow"
    )


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than the limit of {limit_bytes} bytes.",
        code="body_too_large",
    )  # fmt: skip


def bodies_outstanding(who: str, limit: int) -> ApiError:
    """As many bodies as may be are on their way, and its sender has its share of them."""
    return ApiError(
        429,
        f"{limit} requests wait for their bodies, the limit, and {who} has its share of them: send "
        "bodies without pauses, and try again when one has arrived.",
        code="bodies_outstanding", retry_after_s=1.0,
    )  # fmt: skip


def over_rate(tenant: str, what: str, per_minute: float, wait_s: float) -> ApiError:
    """A tenant has used what a minute allows it; `what` is `requests` or `tokens`."""
    return ApiError(
        429,
        f"Tenant {tenant} has used its {per_minute:g} {what} per minute; "
        f"try again in {wait_s:.3g} s.",
        code="rate_limit_exceeded", param=what, retry_after_s=wait_s,
    )  # fmt: skip


def request_over_limit(tenant: str, tokens: int, per_minute: float) -> ApiError:
    """Waiting would not help."""
    return ApiError(
        400,
        f"The request may come to {tokens} tokens with its prompt and max_tokens; tenant {tenant} "
        f"is allowed {per_minute:g} a minute: shorten the prompt or lower max_tokens.",
        code="request_over_limit", param="max_tokens",
    )  # fmt: skip


def too_many_at_once(tenant: str, limit: int) -> ApiError:
    return ApiError(
        429, f"Tenant {tenant} has {limit} requests open, its limit; try again when one has ended.",
        code="too_many_concurrent", retry_after_s=1.0,
    )  # fmt: skip


def queue_full(limit: int, retry_after_s: float) -> ApiError:
    return ApiError(
        429, f"The cluster has {limit} requests in flight, its limit; try again later.",
        code="queue_full", retry_after_s=retry_after_s,
    )  # fmt: skip


def overloaded(reason: str, retry_after_s: float) -> ApiError:
    """Refused early, because it would have been served too late."""
    return ApiError(
        429, f"Refused: {reason}; try again later.", code="overloaded", retry_after_s=retry_after_s
    )


def deadline_passed(allowed_s: float) -> ApiError:
    """The client has no more use for the answer."""
    return ApiError(
        504, f"The answer did not begin within the request's deadline of {allowed_s:g} s.",
        code="deadline_exceeded",
    )  # fmt: skip


def deadline_unmeetable(allowed_s: float, needed_s: float, late_s: float) -> ApiError:
    """Refused before it waits, since its answer is predicted to begin too late."""
    return ApiError(
        429,
        f"The answer would begin {needed_s:.3g} s from now, {late_s:.3g} s after the request's "
        f"deadline of {allowed_s:g} s; try again later, or allow more.",
        code="deadline_unmeetable", retry_after_s=late_s,
    )  # fmt: skip


# -- what is asked for ------------------------------------------------------------------------


def unknown_model(model: str, known: list[str]) -> ApiError:
    return ApiError(
        404, f"The model {model!r} does not exist; this cluster serves {', '.join(known)}.",
        code="model_not_found", param="model",
    )  # fmt: skip


def unknown_request(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"No request {request_id[:80]!r} is remembered here: it is another tenant's, another "
        "ingress replica's, too long ago, or was never seen.",
        code="request_not_found", param="request_id",
    )  # fmt: skip


def invalid_json(why: object) -> ApiError:
    return ApiError(400, f"The request body is not valid JSON: {why}.", code="invalid_json")


def validation_error(faults: list[Mapping[str, Any]]) -> ApiError:
    """A schema's first fault: where and why, without repeating the client's text."""
    fault: Mapping[str, Any] = faults[0] if faults else {"msg": "invalid request"}
    if fault.get("type") == "json_invalid":
        return invalid_json(fault.get("ctx", {}).get("error", "not JSON"))
    where = ".".join(str(part) for part in fault.get("loc", ()) if part != "body") or "body"
    return bad_field(where, str(fault.get("msg")))


def unreadable_body(error: Exception) -> ApiError:
    """A schema raised something of its own instead of listing faults."""
    param = getattr(error, "parameter", None)
    return ApiError(
        400, f"The request body is not valid: {error}", code="invalid_value",
        param=str(param) if param else None,
    )  # fmt: skip


def bad_field(where: str, why: str) -> ApiError:
    """A field's value is out of bounds; `where` is its place, of names that are ours."""
    return ApiError(400, f"{where}: {why}.", code="invalid_value", param=where)


def refused_field(name: str, remedy: str) -> ApiError:
    """A field that no client may set here."""
    return ApiError(
        400, f"{name}: is not accepted here; {remedy}.", code="unsupported_parameter", param=name
    )


def unknown_field(name: str) -> ApiError:
    """As OpenAI says it; the name is the client's text and no parameter for the log."""
    return ApiError(
        400, f"Unrecognized request argument supplied: {name[:80]}; leave it out.",
        code="unknown_parameter",
    )  # fmt: skip


def no_plans_here() -> ApiError:
    """A load plan was asked for, of an engine that has none."""
    return ApiError(
        400, "x-kappa-plan: the chosen worker's engine takes no load plans; serve with "
        "'engine: torch', or leave the header out.", code="no_load_plans", param="x-kappa-plan",
    )  # fmt: skip


# -- prompts ----------------------------------------------------------------------------------


def context_too_long(prompt_tokens: int, max_tokens: int, limit_tokens: int) -> ApiError:
    needed = f"{prompt_tokens} in the prompt"
    if max_tokens > 0:
        needed += f" and {max_tokens} to generate"
    return ApiError(
        400,
        f"This model's context is {limit_tokens} tokens, the request needs "
        f"{prompt_tokens + max(max_tokens, 1)} ({needed}).",
        code="context_length_exceeded", param="messages",
    )  # fmt: skip


def prompt_too_long(text_bytes: int, token_bytes: int, limit_tokens: int) -> ApiError:
    """Too many bytes for the context whatever its tokens are, so it was not tokenized."""
    return ApiError(
        400,
        f"This model's context is {limit_tokens} tokens; the prompt's {text_bytes} bytes are at "
        f"least {-(-text_bytes // token_bytes)}: shorten it.",
        code="context_length_exceeded", param="messages",
    )  # fmt: skip


def footprint_too_large(
    prompt_tokens: int, max_tokens: int, blocks: int, device_blocks: int
) -> ApiError:
    """No worker's device could ever hold the request's KV cache."""
    return ApiError(
        400,
        f"The request's KV cache takes {blocks} blocks ({prompt_tokens} tokens in the prompt and "
        f"{max(max_tokens, 1)} to generate), the largest device cache here has {device_blocks}: "
        "shorten the prompt or lower max_tokens.",
        code="footprint_too_large", param="max_tokens" if max_tokens > 0 else "messages",
    )  # fmt: skip


def prompt_not_tokenized(prompt_bytes: int, limit_s: float) -> ApiError:
    """Tokenizing was ended; nothing says that another try would do better."""
    return ApiError(
        400,
        f"The prompt ({prompt_bytes} bytes) could not be tokenized within {limit_s:.3g} s and the "
        "memory that its length allows: shorten it.",
        code="prompt_not_tokenized", param="messages",
    )  # fmt: skip


def not_tokenized_in_time(limit_s: float) -> ApiError:
    """It waited behind others' prompts."""
    return ApiError(504, f"The prompt was not tokenized within {limit_s:g} s.", code="timeout")


def tokenizer_not_started() -> ApiError:
    """The process that tokenizes long prompts is not there."""
    return ApiError(
        503, "The tokenizer for long prompts did not start; try again later.",
        code="tokenizer_not_started", retry_after_s=5.0,
    )  # fmt: skip


def unsupported_prompt() -> ApiError:
    return ApiError(
        400, "The prompt cannot be rendered: this engine takes text chats, one text prompt, or "
        "token ids.", code="unsupported_prompt", param="messages",
    )  # fmt: skip


# -- workers and engines ----------------------------------------------------------------------


def no_worker(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503, f"No healthy worker: {reason}", code="no_worker", retry_after_s=retry_after_s
    )


def no_token_in_time(limit_s: float) -> ApiError:
    return ApiError(504, f"No token within {limit_s:g} s.", code="timeout")


def engine_failed() -> ApiError:
    """Details are in the log under the request id."""
    return ApiError(500, "The engine failed on this request.", code="engine")


def grammar_failed() -> ApiError:
    """The engine could not compile what is to constrain the answer."""
    return ApiError(
        400, "The schema, regular expression or grammar that constrains the answer could not be "
        "compiled, or took too long; simplify it.", code="invalid_grammar",
    )  # fmt: skip


def engine_lost(request_id: str, retry_after_s: float) -> ApiError:
    """An engine died with this request alone in it, so no other is given it unasked."""
    return ApiError(
        503, f"The engine died while request {request_id} was alone in it; it was not passed on to "
        "another. It may be sent once more.", code="engine_died", retry_after_s=retry_after_s,
    )  # fmt: skip


def killed_an_engine() -> ApiError:
    """This content was in two engines that died; sending it again would not help."""
    return ApiError(
        422, "Two engines died while they served this request: the same content is refused for ten "
        "minutes. Change it, or give its x-request-id to whoever runs this cluster.",
        code="killed_an_engine",
    )  # fmt: skip


def from_engine(error: Any) -> ApiError:
    """An engine's `ErrorResponse` as ours."""
    info = getattr(error, "error", error)
    status = int(getattr(info, "code", 500) or 500)
    return ApiError(status, str(getattr(info, "message", info)))
