"""Messages of Envoy's access-log service, as far as they are read: `envoy.service.accesslog.v3`.

Made here by protobuf's own runtime instead of taken from a package of all of Envoy's messages: the
one on the package index also brings older files of `opentelemetry.proto` and `google.api`, which
overwrite those of OpenTelemetry and gRPC. Protobuf skips fields that a message does not name, so a
part of each is enough; numbers are Envoy's, which it never changes. They stand in a pool and a
package of their own, so they never meet others of the same name.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    wrappers_pb2,
)

_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "kappa.envoy.accesslog.v3"
_DURATION, _UINT32 = ".google.protobuf.Duration", ".google.protobuf.UInt32Value"

FLAGS: dict[str, int] = {
    "failed_local_healthcheck": 1, "no_healthy_upstream": 2, "upstream_request_timeout": 3,
    "local_reset": 4, "upstream_remote_reset": 5, "upstream_connection_failure": 6,
    "upstream_connection_termination": 7, "upstream_overflow": 8, "no_route_found": 9,
    "delay_injected": 10, "fault_injected": 11, "rate_limited": 12, "rate_limit_service_error": 14,
    "downstream_connection_termination": 15, "upstream_retry_limit_exceeded": 16,
    "stream_idle_timeout": 17, "invalid_envoy_request_headers": 18,
    "downstream_protocol_error": 19, "upstream_max_stream_duration_reached": 20,
    "response_from_cache_filter": 21, "no_filter_config_found": 22, "duration_timeout": 23,
    "upstream_protocol_error": 24, "no_cluster_found": 25, "overload_manager": 26,
    "dns_resolution_failure": 27, "downstream_remote_reset": 28,
}  # fmt: skip
"""Envoy's response flags and their numbers in `ResponseFlags`."""

# Of each message its fields: number and type, a name being that of another message.
_MESSAGES: dict[str, dict[str, tuple[int, int | str]]] = {
    "SocketAddress": {"address": (2, _FIELD.TYPE_STRING), "port_value": (3, _FIELD.TYPE_UINT32)},
    "Address": {"socket_address": (1, "SocketAddress")},
    "ResponseFlags": {name: (number, _FIELD.TYPE_BOOL) for name, number in FLAGS.items()},
    "AccessLogCommon": {
        "time_to_first_upstream_rx_byte": (9, _DURATION),
        "upstream_remote_address": (13, "Address"),
        "response_flags": (16, "ResponseFlags"), "duration": (23, _DURATION),
        "upstream_request_attempt_count": (24, _FIELD.TYPE_UINT32),
        "intermediate_log_entry": (27, _FIELD.TYPE_BOOL),
    },
    "HTTPRequestProperties": {"request_headers": (13, "map")},
    "HTTPResponseProperties": {
        "response_code": (1, _UINT32), "response_body_bytes": (3, _FIELD.TYPE_UINT64),
    },
    "HTTPAccessLogEntry": {
        "common_properties": (1, "AccessLogCommon"), "request": (3, "HTTPRequestProperties"),
        "response": (4, "HTTPResponseProperties"),
    },
    "Identifier": {"log_name": (2, _FIELD.TYPE_STRING)},
    "HTTPAccessLogEntries": {"log_entry": (1, "many HTTPAccessLogEntry")},
    "StreamAccessLogsMessage": {
        "identifier": (1, "Identifier"), "http_logs": (2, "HTTPAccessLogEntries"),
    },
    "StreamAccessLogsResponse": {},
}  # fmt: skip


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="kappa/envoy_access_log.proto", package=_PACKAGE, syntax="proto3",
        dependency=[duration_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name],
    )  # fmt: skip
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            made = message.field.add(name=field, number=number, label=_FIELD.LABEL_OPTIONAL)
            if isinstance(kind, int):
                made.type = kind
                continue
            made.type = _FIELD.TYPE_MESSAGE
            if kind.startswith("many ") or kind == "map":
                made.label = _FIELD.LABEL_REPEATED
            kind = kind.removeprefix("many ")
            if kind == "map":
                _add_map(message, field)
                kind = f"{name}.RequestHeadersEntry"
            made.type_name = kind if kind.startswith(".") else f".{_PACKAGE}.{kind}"
    return file


def _add_map(message: descriptor_pb2.DescriptorProto, field: str) -> None:
    """A map from text to text, which is a repeated message of a key and a value."""
    entry = message.nested_type.add(name="".join(map(str.title, field.split("_"))) + "Entry")
    entry.options.map_entry = True
    for number, part in enumerate(("key", "value"), start=1):
        text, label = _FIELD.TYPE_STRING, _FIELD.LABEL_OPTIONAL
        entry.field.add(name=part, number=number, type=text, label=label)


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    for known in (duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(_file())
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES)
    return {one.name: message_factory.GetMessageClass(one) for one in found}


_MADE = _classes()
HTTPAccessLogEntry: Any = _MADE["HTTPAccessLogEntry"]
StreamAccessLogsMessage: Any = _MADE["StreamAccessLogsMessage"]
StreamAccessLogsResponse: Any = _MADE["StreamAccessLogsResponse"]
