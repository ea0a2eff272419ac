"""The messages by which a gateway asks an endpoint picker, and what they say. Pure.

They are Envoy's `envoy.service.ext_proc.v3` as far as the Gateway API Inference Extension uses it
(its endpoint picker protocol 1.0.0): the fields below are read and written, all others left out. No
package with Envoy's own messages is needed: on the wire a field is its number and type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kappa.protocol import ENDPOINT_HEADER
from kappa_router.gateway.spec import SUBSET_HEADER

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
FULL_DUPLEX, NONE = 4, 0
"""How bodies come (`ProcessingMode.BodySendMode`): as they come, to be sent back; not at all."""
PART_BYTES = 62_000
"""Of a body that is sent back; some gateways take no more than 64 KiB at a time."""
SUBSET = "envoy.lb.subset_hint", SUBSET_HEADER
SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
"""Namespace and key: the servers that alone may be chosen, and the one that answers."""

# Fields by message: number and type; a star: repeated. A map is a repeated message on the wire.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Value": {
        "string_value": (3, "string"),
        "struct_value": (5, "Struct"),
        "list_value": (6, "ListValue"),
    },
    "ListValue": {"values": (1, "*Value")},
    "Struct": {"fields": (1, "*Field")},
    "Field": {"key": (1, "string"), "value": (2, "Value")},
    "Metadata": {"filter_metadata": (1, "*Namespace")},
    "Namespace": {"key": (1, "string"), "value": (2, "Struct")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "Protocol": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "Protocol"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    # Envoy's StreamedBodyResponse has the fields of a body.
    "BodyMutation": {"streamed_response": (3, "HttpBody")},
    "Common": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "Response": {"response": (1, "Common")},
    "HttpStatus": {"code": (1, "int32")},
    "Immediate": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "Response"),
        "response_headers": (2, "Response"),
        "request_body": (3, "Response"),
        "response_body": (4, "Response"),
        "request_trailers": (5, "HttpTrailers"),
        "response_trailers": (6, "HttpTrailers"),
        "immediate_response": (7, "Immediate"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
_SCALARS = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3
# `HeaderAppendAction`: whatever stood there goes.
_OVERWRITE = 2


def _made() -> dict[str, Any]:
    """A class for each message."""
    package = "kappa.ext_proc"
    file = descriptor_pb2.FileDescriptorProto(name=package, package=package, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, given) in fields.items():
            kind = given.removeprefix("*")
            made = message.field.add(
                name=field, number=number, type=_SCALARS.get(kind, _MESSAGE),
                label=_REPEATED if kind != given else _OPTIONAL,
            )  # fmt: skip
            if kind not in _SCALARS:
                made.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in _MESSAGES
    }


MESSAGES = _made()
_Answer = MESSAGES["ProcessingResponse"]


def told_in(message: Any) -> tuple[str, Any]:
    """The part of an HTTP request that a `ProcessingRequest` brings: its field's name, and it;
    no name if there is none."""
    for field, value in message.ListFields():
        return (field.name, value) if 2 <= field.number <= 7 else ("", None)
    return "", None


def headers_in(told: Any) -> dict[str, str]:
    """Headers, and pseudo-headers, by lower-case names; the first of one name."""
    found: dict[str, str] = {}
    for one in told.headers.headers:
        text = one.raw_value.decode("latin-1") if one.raw_value else one.value
        found.setdefault(one.key.lower(), text)
    return found


def endpoints_in(message: Any, place: tuple[str, str]) -> list[str] | None:
    """The endpoints that a message's metadata names at a place, `SUBSET` or `SERVED`; None if it
    has none there."""
    namespace, key = place
    for space in message.metadata_context.filter_metadata:
        for field in space.value.fields if space.key == namespace else ():
            if field.key == key:
                given = [field.value.string_value]
                given += [one.string_value for one in field.value.list_value.values]
                parts = (part.strip() for text in given for part in text.split(","))
                return [part for part in parts if part]
    return None


def goes_on(headers: Mapping[str, str], removed: list[str]) -> Any:
    """The answer about a request's head: its `ENDPOINT_HEADER`, as header and as metadata, and what
    else its server is sent, and is not."""
    endpoints = {"key": ENDPOINT_HEADER, "value": {"string_value": headers[ENDPOINT_HEADER]}}
    space = {"key": "envoy.lb", "value": {"struct_value": {"fields": [endpoints]}}}
    common = {"header_mutation": _mutation(headers, removed), "clear_route_cache": True}
    return _Answer(request_headers={"response": common}, dynamic_metadata={"fields": [space]})


def shown(headers: Mapping[str, str]) -> Any:
    """The answer about an answer's head, with headers for the client."""
    return _Answer(response_headers={"response": {"header_mutation": _mutation(headers, [])}})


def streamed(field: str, body: bytes, *, is_last: bool) -> Any:
    """A part of a body that is sent back as it came; field: `request_body` or `response_body`."""
    part = {"streamed_response": {"body": body, "end_of_stream": is_last}}
    return _Answer(**{field: {"response": {"body_mutation": part}}})


def parts(body: bytes, *, is_last: bool) -> Iterator[Any]:
    """A request's body as it is sent back; is_last: no trailers follow."""
    most = max(len(body), 1)
    for at in range(0, most, PART_BYTES):
        end = at + PART_BYTES
        yield streamed("request_body", body[at:end], is_last=is_last and end >= most)


def unchanged(field: str) -> Any:
    """The answer that leaves that part of a request or answer as it is."""
    return _Answer(**{field: {}})


def refused(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """The answer that the client gets instead of a server's."""
    return _Answer(
        immediate_response={
            "status": {"code": status},
            "headers": _mutation(headers, []),
            "body": body,
        }
    )


def _mutation(headers: Mapping[str, str], removed: list[str]) -> dict[str, Any]:
    added = [
        {
            "header": {"key": name, "raw_value": value.encode("latin-1", errors="replace")},
            "append_action": _OVERWRITE,
        }
        for name, value in headers.items()
    ]
    return {"set_headers": added, "remove_headers": removed}
