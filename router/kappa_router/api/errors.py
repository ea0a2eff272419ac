"""Every error of the HTTP face in one table: status, OpenAI's code, what it says and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from kappa_router import json_body

_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPICS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error", 504: "timeout_error", **_TYPES,
}  # fmt: skip


class ApiError(Exception):
    """An answer other than success: HTTP status, message, OpenAI's code and parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.code, self.param, self.retry_after_s = code, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body in OpenAI's shape."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": _encodable(self.message),
            "type": _TYPES.get(self.status, other),
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def message_body(self) -> dict[str, Any]:
        """The JSON body in Anthropic's shape."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPICS.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": _encodable(self.message)}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least one, and how to authenticate, where it helps."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def text(self) -> str:
        """`body` as JSON."""
        return json.dumps(self.body())


def _encodable(text: str) -> str:
    """Half of a surrogate pair, quoted back to the client, cannot be encoded as it is."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of error; called with the values that its message names, it makes the error."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def __call__(self, *, retry_after_s: float | None = None, **values: object) -> ApiError:
        """retry_after_s: when it makes sense to come back, where that is known now."""
        wait_s = self.retry_after_s if retry_after_s is None else retry_after_s
        return ApiError(self.status, self.message.format(**values), self.code, self.param, wait_s)


# fmt: off
# -- access and limits ------------------------------------------------------------------------

UNKNOWN_KEY = Fault(401, "invalid_api_key", "The API key is not known here.")
NO_KEY = Fault(401, "invalid_api_key", "No API key was sent; send 'Authorization: Bearer KEY'.")
OPERATOR_ONLY = Fault(
    403, "operator_only",
    "{path} is for operators: name the key's tenant in tenants.operators.")
FOREIGN_TENANT = Fault(
    403, "foreign_tenant",
    "x-gateway-inference-fairness-id names another tenant than the request's own, {tenant}: leave "
    "it out, or have the operator list that tenant in tenants.speaks_for.{tenant}.",
    "x-gateway-inference-fairness-id")
HEADERS_TOO_LARGE = Fault(
    431, "headers_too_large", "The request has {what}; at most {limit} are read.")
BODY_TOO_SLOW = Fault(408, "body_too_slow", "The request body did not arrive within {limit_s:g} s.")
BODY_TOO_LARGE = Fault(
    413, "body_too_large", "The request body is larger than the limit of {limit_bytes} bytes.")
BODIES_OUTSTANDING = Fault(
    429, "bodies_outstanding",
    "{limit} requests wait for their bodies, the limit, and {who} has its share of them: send "
    "bodies without pauses, and try again when one has arrived.",
    retry_after_s=1.0)
REQUESTS_OVER_RATE = Fault(
    429, "rate_limit_exceeded",
    "Tenant {tenant} has used its {per_minute:g} requests per minute; try again in {wait_s:.3g} s.",
    "requests")
TOKENS_OVER_RATE = Fault(
    429, "rate_limit_exceeded",
    "Tenant {tenant} has used its {per_minute:g} tokens per minute; try again in {wait_s:.3g} s.",
    "tokens")
REQUEST_OVER_LIMIT = Fault(
    400, "request_over_limit",
    "The request may come to {tokens} tokens with its prompt and max_tokens; tenant {tenant} is "
    "allowed {per_minute:g} a minute: shorten the prompt or lower max_tokens.",
    "max_tokens")
TOO_MANY_AT_ONCE = Fault(
    429, "too_many_concurrent",
    "Tenant {tenant} has {limit} requests open, its limit; try again when one has ended.",
    retry_after_s=1.0)
QUEUE_FULL = Fault(
    429, "queue_full", "The cluster has {limit} requests in flight, its limit; try again later.")
OVERLOADED = Fault(429, "overloaded", "Refused: {reason}; try again later.")
DEADLINE_PASSED = Fault(
    504, "deadline_exceeded",
    "The answer did not begin within the request's deadline of {allowed_s:g} s.")
DEADLINE_UNMEETABLE = Fault(
    429, "deadline_unmeetable",
    "The answer would begin {needed_s:.3g} s from now, {late_s:.3g} s after the request's "
    "deadline of {allowed_s:g} s; try again later, or allow more.")

# -- the request ------------------------------------------------------------------------------

UNKNOWN_MODEL = Fault(
    404, "model_not_found",
    "The model {model!r} does not exist; this cluster serves {served}.", "model")
UNKNOWN_REQUEST = Fault(
    404, "request_not_found",
    "No request {request_id!r} is remembered here: it is another tenant's, another decider "
    "replica's, too long ago, or was never seen.",
    "request_id")
INVALID_JSON = Fault(400, "invalid_json", "The request body is not valid JSON: {why}.")
NO_OBJECT = Fault(400, "invalid_value", "The request body is not a JSON object.")
BODY_TOO_COMPLEX = Fault(400, "body_too_complex", "The request body {why}.")
UNKNOWN_FIELD = Fault(  # The name is the client's text, and no parameter for the log.
    400, "unknown_parameter", "Unrecognized request argument supplied: {name}; leave it out.")
NO_APPROXIMATION = Fault(
    400, "approx_not_allowed",
    "x-kappa-approx: no worker here gives approximate answers of so little stated loss; leave it "
    "out, or serve with 'engine: {{kind: torch, approx: ask, sparse: {{loss: 0.06}}}}'.",
    "x-kappa-approx")
NO_LOAD_PLANS = Fault(
    400, "no_load_plans",
    "x-kappa-plan: the chosen worker's engine takes no load plans; serve with 'engine: torch', "
    "or leave the header out.",
    "x-kappa-plan")

# -- prompts ----------------------------------------------------------------------------------

CONTEXT_TOO_LONG = Fault(
    400, "context_length_exceeded",
    "This model's context is {limit_tokens} tokens, the request needs {needed} ({parts}).",
    "messages")
PROMPT_TOO_LONG = Fault(  # Whatever its tokens are, so it was not tokenized.
    400, "context_length_exceeded",
    "This model's context is {limit_tokens} tokens; the prompt's {text_bytes} bytes are at least "
    "{tokens}: shorten it.",
    "messages")
_FOOTPRINT = (
    "The request's KV cache takes {blocks} blocks ({prompt_tokens} tokens in the prompt and "
    "{max_tokens} to generate), the largest device cache here has {device_blocks}: shorten the "
    "prompt or lower max_tokens.")
ANSWER_TOO_LARGE = Fault(400, "footprint_too_large", _FOOTPRINT, "max_tokens")
PROMPT_TOO_LARGE = Fault(400, "footprint_too_large", _FOOTPRINT, "messages")
PROMPT_NOT_TOKENIZED = Fault(  # Nothing says that another try would do better.
    400, "prompt_not_tokenized",
    "The prompt ({prompt_bytes} bytes) could not be tokenized within {limit_s:.3g} s and the "
    "memory that its length allows: shorten it.",
    "messages")
NOT_TOKENIZED_IN_TIME = Fault(504, "timeout", "The prompt was not tokenized within {limit_s:g} s.")
TOKENIZER_NOT_STARTED = Fault(
    503, "tokenizer_not_started",
    "The tokenizer for long prompts did not start; try again later.", retry_after_s=5.0)
UNSUPPORTED_PROMPT = Fault(
    400, "unsupported_prompt",
    "The prompt cannot be rendered: this engine takes text chats, one text prompt, or token ids.",
    "messages")

# -- workers and engines ----------------------------------------------------------------------

INTERNAL = Fault(500, "internal", "Internal error.")
NO_WORKER = Fault(503, "no_worker", "No healthy worker: {why}")
ALONE_IN_DEAD_ENGINE = Fault(
    503, "engine_died",
    "The engine died while request {request_id} was alone in it; it was not passed on to another. "
    "It may be sent once more.")
KILLED_AN_ENGINE = Fault(
    422, "killed_an_engine",
    "Two engines died while they served this request: the same content is refused for ten "
    "minutes. Change it, or give its x-request-id to whoever runs this cluster.")

# -- the front door, before anything of ours is reached -----------------------------------------

NO_SUCH_PATH = Fault(404, "not_found", "There is no such path here; paths are compared as sent.")
NOT_SERVED = Fault(
    404, "not_served",
    "{path} is not served by this cluster, whose engines generate texts: start a server for it, as "
    "vllm serve --runner pooling, and kappa route before that.")
PATH_OF_NO_SERVER = Fault(
    404, "not_served", "No server here is for {path}: name it in serves of a backend.")
WRONG_METHOD = Fault(405, "method_not_allowed", "This path is asked by POST.")
HEADERS_TOO_SLOW = Fault(
    408, "headers_too_slow", "The request's headers did not arrive within {limit_s:g} s.")
BAD_HTTP = Fault(400, "bad_request", "The request is not HTTP as it is taken here: {why}.")
DECIDER_AWAY = Fault(
    503, "decider_away", "The router is not there at the moment; try again.", retry_after_s=1.0)
DOOR_OVERLOADED = Fault(
    503, "overloaded", "The front door is out of memory or connections; try again later.",
    retry_after_s=2.0)
GATEWAY_MISCONFIGURED = Fault(
    503, "gateway_misconfigured",
    "The gateway does not send request bodies to its endpoint picker as they come; its operator "
    "must set request_body_mode: FULL_DUPLEX_STREAMED.")
NO_SERVER_LEFT = Fault(
    503, "no_worker", "None of the workers that the request may go to can be reached; try again.",
    retry_after_s=1.0)
SERVER_FAILED = Fault(
    503, "worker_failed", "The worker ended the connection before it answered.")
NO_ANSWER_IN_TIME = Fault(504, "timeout", "Nothing was heard for {limit_s:g} s.")
# fmt: on


# -- errors that others describe --------------------------------------------------------------


def bad_field(where: str, why: str) -> ApiError:
    """A field's or header's value is out of bounds; `where` is its place, of names that are
    ours."""
    return ApiError(400, f"{where}: {why}.", "invalid_value", where)


def refused_field(name: str, remedy: str) -> ApiError:
    """A field that no client may set here."""
    return ApiError(400, f"{name}: is not accepted here; {remedy}.", "unsupported_parameter", name)


def json_object(body: bytes, wanted: Container[str]) -> dict[str, Any]:
    """As `json_body.read_object`; raises ApiError 400 for its errors."""
    try:
        return json_body.read_object(body, wanted)
    except json_body.NoObjectError:
        raise NO_OBJECT() from None
    except json_body.ExcessiveError as error:
        raise BODY_TOO_COMPLEX(why=error) from None
    except json_body.MalformedError as error:
        fault = INVALID_JSON(why=error)
        fault.param = error.field
        raise fault from None


def validation_error(fault: Mapping[str, Any]) -> ApiError:
    """A fault of a parameter as FastAPI finds it: where and why, without the client's text."""
    return bad_field(".".join(map(str, fault["loc"])), str(fault["msg"]))
