"""Envoy's own answers, in the shape that the client of a path expects. Pure.

Answers of the decider pass as they are. Everything else that Envoy makes up, from malformed HTTP to
servers that are gone, becomes one of the faults of `kappa_router.api.errors`.
"""

from __future__ import annotations

from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.gateway.clusters import Json, extension
from kappa_router.gateway.spec import Bounds, veiled

# Paths with errors in Anthropic's shape.
_MESSAGES = 'request.path.startsWith("/v1/messages")'
_PASSED = 'response.code_details in ["ext_authz_denied", "lua_response"]'
# With which it refuses requests that are not the client's fault.
_OF_DECIDER = (500, 502, 503, 504)


def local_replies(bounds: Bounds) -> Json:
    """`local_reply_config`: the first of its mappers that fits is applied."""
    mappers = [_unveiled(status) for status in _OF_DECIDER] + [{"filter": where(_PASSED)}]
    for condition, fault in _faults(bounds):
        mappers.append(_mapper(f"{condition} && {_MESSAGES}", fault, fault.message_body()))
        mappers.append(_mapper(condition, fault, fault.body()))
    return {"mappers": mappers}


def _faults(bounds: Bounds) -> list[tuple[str, ApiError]]:
    """Conditions (CEL) and the error that each stands for, the more specific first."""
    by_code: list[tuple[str, ApiError]] = [
        ("response.code == 404", errors.NO_SUCH_PATH()),
        (
            'response.code_details == "request_header_timeout"',
            errors.HEADERS_TOO_SLOW(limit_s=bounds.header_s),
        ),
        ("response.code == 408", errors.BODY_TOO_SLOW(limit_s=bounds.header_s + bounds.body_s)),
        ("response.code == 413", errors.BODY_TOO_LARGE(limit_bytes=bounds.body_bytes)),
        (
            "response.code == 431",
            errors.HEADERS_TOO_LARGE(
                what="too many or too long headers",
                limit=f"{bounds.headers} headers and {bounds.header_bytes} bytes",
            ),
        ),
        ('response.code_details == "ext_authz_error"', errors.DECIDER_AWAY()),
        ('response.code_details.startsWith("overload")', errors.DOOR_OVERLOADED()),
        ('response.code_details == "no_healthy_upstream"', errors.NO_SERVER_LEFT()),
        ("response.code == 504", errors.NO_ANSWER_IN_TIME(limit_s=bounds.silent_s)),
        ("response.code >= 500", errors.SERVER_FAILED()),
    ]
    return [*by_code, ("response.code >= 400", errors.BAD_HTTP(why="%RESPONSE_CODE_DETAILS%"))]


def _mapper(condition: str, fault: ApiError, body: Json) -> Json:
    added = [{"header": {"key": key, "value": text}} for key, text in fault.headers().items()]
    return {
        "filter": where(condition),
        "body_format_override": {"json_format": body, "content_type": "application/json"},
        "headers_to_add": added,
    }


def _unveiled(status: int) -> Json:
    return {
        "filter": where(f"{_PASSED} && response.code == {veiled(status)}"),
        "status_code": status,
    }


def where(condition: str) -> Json:
    """The filter of those requests for which a condition (CEL) holds."""
    kind = "extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    name = "envoy.access_loggers.extension_filters.cel"
    return {"extension_filter": extension(name, kind, expression=condition)}
