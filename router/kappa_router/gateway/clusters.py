"""Envoy's clusters: the servers with what an attempt at each needs, deciders and faces. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kappa.protocol import ENDPOINT_HEADER, TO_SECRET_HEADER
from kappa_router.gateway.access_log import ANSWER
from kappa_router.gateway.spec import (
    ADMITTER_HEADER,
    AGAIN,
    FIRST,
    SLOT_HEADER,
    TAIL_BYTES,
    TOLD_HEADER,
    DeciderSlot,
    GatewaySpec,
)

Json = dict[str, Any]

TYPES = "type.googleapis.com/envoy."
SERVERS, DECIDER, FACE, EVENTS = "servers", "decider", "face", "events"
# Where Envoy keeps what the decider's answer says of the request, out of any server's sight.
DECIDED = "envoy.filters.http.ext_authz"
# Of an endpoint's metadata: headers for it alone, and that requests without a list may go there.
OF_SERVER, OPEN = "kappa", "open"
_LEAST = "least_request", "LeastRequest"
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# uvicorn closes a connection that was idle for 5 s; a request on its way then would be lost.
_SERVER_IDLE_S = 4.0
# A decider that cannot be reached is asked again after so long, unless there is no other.
_EJECTED_S, _LOOKED_S = 1.0, 0.2
# A network may pause for so long; and more is more than Linux takes.
_LEAST_LOST_S, _MOST_LOST_S = 5.0, 3600.0
# The decider's answer may hold 1 MB for the worker's gate.
_ANSWER_HEADERS_KB = 1088


def seconds(value: float) -> str:
    """A duration as protobuf's JSON has it."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def extension(name: str, kind: str, **config: Any) -> Json:
    """A typed extension; kind: its message without `envoy.`."""
    return {"name": name, "typed_config": {"@type": TYPES + kind, **config}}


def lua(name: str, script: str, **constants: str | int) -> Json:
    """A filter that runs a script of this folder, with constants that stand before it."""
    lines = [f"local {key} = {_literal(value)}" for key, value in constants.items()]
    source = (Path(__file__).parent / script).read_text(encoding="utf-8")
    code = {"inline_string": "\n".join([*lines, source])}
    kind = "extensions.filters.http.lua.v3.Lua"
    return extension(name, kind, default_source_code=code)


def _literal(value: str | int) -> str:
    return f"[==[{value}]==]" if isinstance(value, str) else str(value)


def clusters(spec: GatewaySpec, away: str) -> list[Json]:
    """All of a front door's; away: the body of an answer while a decider is not there."""
    slots = spec.slots
    return [
        _servers(spec, away),
        _any_of(spec, DECIDER, [one.decider_socket for one in slots], _by_the_admitter()),
        _any_of(spec, FACE, [one.face_socket for one in slots], _least_asked()),
        # Each decider by itself, for questions that no other can answer.
        *(_local(spec, of_slot(DECIDER, one), [one.decider_socket]) for one in slots),
        *(_local(spec, of_slot(EVENTS, one), [one.events_socket]) for one in slots),
    ]


def of_slot(name: str, slot: DeciderSlot) -> str:
    """The cluster of one decider."""
    return f"{name}-{slot.number}"


def _any_of(spec: GatewaySpec, name: str, sockets: Sequence[Path], policy: Json) -> Json:
    """Processes of ours of which each does; one that cannot be reached is left out for a little.
    What it answers, 503 among it, says nothing against it."""
    ejection: Json = {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 1,
        "interval": seconds(_LOOKED_S),
        "base_ejection_time": seconds(_EJECTED_S),
        "max_ejection_time": seconds(_EJECTED_S),
        "max_ejection_percent": 100,
    }
    for unjudged in ("consecutive_5xx", "success_rate", "local_origin_success_rate"):
        ejection[f"enforcing_{unjudged}"] = 0
    return _local(spec, name, sockets) | {
        "load_balancing_policy": policy,
        "outlier_detection": ejection,
        # Where none can be reached any is tried.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
    }


def _by_the_admitter() -> Json:
    """About a body the decider that let it come."""
    source = {"header": ADMITTER_HEADER}
    return _policy(
        "override_host", "OverrideHost", override_host_sources=[source],
        fallback_policy=_least_asked(),
    )  # fmt: skip


def _least_asked() -> Json:
    """The one with the fewest questions open of all, which one that hangs is not for long."""
    return _policy(*_LEAST, selection_method="FULL_SCAN")


def _local(spec: GatewaySpec, name: str, sockets: Sequence[Path]) -> Json:
    """Processes of ours behind Unix sockets."""
    endpoints = [{"endpoint": {"address": {"pipe": {"path": str(one)}}}} for one in sockets]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": seconds(spec.bounds.connect_s),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": _breakers(spec),
        "typed_extension_protocol_options": {
            _HTTP: {
                "@type": f"type.googleapis.com/{_HTTP}",
                "common_http_protocol_options": {"max_response_headers_kb": _ANSWER_HEADERS_KB},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
    }


def _breakers(spec: GatewaySpec) -> Json:
    """As many as clients may have: the decider or the overload manager refuses more."""
    most = spec.bounds.connections
    return {
        "thresholds": [
            {"max_connections": most, "max_pending_requests": most, "max_requests": most,
             "max_retries": most}
        ]
    }  # fmt: skip


def _servers(spec: GatewaySpec, away: str) -> Json:
    """Every server, followed from a watched file. A request goes to those of the decider's list, in
    order, and without a list nowhere, or, with `least_request`, to those that are `OPEN`."""
    file = spec.endpoints_file
    return {
        "name": SERVERS,
        "type": "EDS",
        "connect_timeout": seconds(spec.bounds.connect_s),
        "eds_cluster_config": {
            "service_name": SERVERS,
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {
                    "path": str(file),
                    "watched_directory": {"path": str(file.parent)},
                },
            },
        },
        "load_balancing_policy": _by_the_list(),
        # What else changed of an endpoint, such as that it drains, must not wait.
        "common_lb_config": {
            "update_merge_window": "0s",
            "healthy_panic_threshold": {"value": 0},
        },
        "circuit_breakers": _breakers(spec),
        **_until_lost(spec.bounds.lost_s),
        **_transport(spec),
        "typed_extension_protocol_options": {
            _HTTP: {
                "@type": f"type.googleapis.com/{_HTTP}",
                "common_http_protocol_options": {"idle_timeout": seconds(_SERVER_IDLE_S)},
                "explicit_http_config": {"http_protocol_options": {}},
                "http_filters": _attempt_filters(spec, away),
            }
        },
    }


def _until_lost(lost_s: float) -> Json:
    """End connections to a machine that is gone: when for `lost_s` none of their bytes (Linux'
    TCP_USER_TIMEOUT), and no probe, was acknowledged."""
    lost_s = min(max(lost_s, _LEAST_LOST_S), _MOST_LOST_S)
    unacknowledged = {"level": 6, "name": 18, "int_value": round(1000 * lost_s)}
    probes = {
        "keepalive_time": max(round(lost_s / 2), 1),
        "keepalive_interval": max(round(lost_s / 6), 1),
        "keepalive_probes": 3,
    }
    return {
        "upstream_bind_config": {"socket_options": [{**unacknowledged, "state": "STATE_PREBIND"}]},
        "upstream_connection_options": {"tcp_keepalive": probes},
    }


def _by_the_list() -> Json:
    others = _policy(
        "subset",
        "Subset",
        fallback_policy="NO_FALLBACK",
        subset_selectors=[{"keys": [OPEN]}],
        subset_lb_policy=_policy(*_LEAST),
    )
    source = {"metadata": {"key": DECIDED, "path": [{"key": ENDPOINT_HEADER}]}}
    return _policy(
        "override_host", "OverrideHost", override_host_sources=[source], fallback_policy=others
    )


def _policy(name: str, message: str, **config: Any) -> Json:
    kind = f"extensions.load_balancing_policies.{name}.v3.{message}"
    made = extension(f"envoy.load_balancing_policies.{name}", kind, **config)
    return {"policies": [{"typed_extension_config": made}]}


def _transport(spec: GatewaySpec) -> Json:
    """TLS to the endpoints that say so, each by its own name."""
    if spec.ca is None:
        return {}
    verified = {"trusted_ca": {"filename": str(spec.ca)}}
    tls = extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        auto_host_sni=True,
        auto_sni_san_validation=True,
        common_tls_context={"validation_context": verified},
    )
    plain = extension(
        "envoy.transport_sockets.raw_buffer",
        "extensions.transport_sockets.raw_buffer.v3.RawBuffer",
    )
    return {
        "transport_socket_matches": [
            {"name": "tls", "match": {"tls": True}, "transport_socket": tls},
            {"name": "plain", "match": {}, "transport_socket": plain},
        ]
    }


def _attempt_filters(spec: GatewaySpec, away: str) -> list[Json]:
    """The filters of each attempt, once its server is chosen."""
    answer_s = spec.bounds.decide_s if spec.foreign else spec.bounds.silent_s
    again = lua(
        "again", "again.lua", AGAIN=AGAIN, ANSWER_MS=round(answer_s * 1000), AWAY=away,
        SLOT_HEADER=SLOT_HEADER, OF_SLOT=f"{DECIDER}-",
    )  # fmt: skip
    if spec.foreign:
        of_server = {"x-kappa-to-key": "key", "x-kappa-to-prefix": "prefix"}
        more = [lua("server", "server.lua")]
    else:
        of_server, more = {TO_SECRET_HEADER: "secret"}, []
    # A mutation stays for the next attempt, so what another server was sent goes first.
    mutations: list[Json] = []
    for header, key in of_server.items():
        value = f"%UPSTREAM_METADATA({OF_SERVER}:{key})%"
        mutations += [{"remove": header}, {"append": {"header": {"key": header, "value": value}}}]
    headers = extension(
        "of_server",
        "extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": mutations},
    )
    codec = extension(
        "envoy.filters.http.upstream_codec",
        "extensions.filters.http.upstream_codec.v3.UpstreamCodec",
    )
    return [again, headers, *more, codec]


def tails(spec: GatewaySpec) -> list[Json]:
    """The filter by which the decider hears of a foreign server's answer."""
    if not spec.foreign:
        return []
    constants: dict[str, str | int] = {
        "FIRST": FIRST, "TAIL_BYTES": TAIL_BYTES, "TOLD_HEADER": TOLD_HEADER, "ANSWER": ANSWER,
        "FROM_HEADER": spec.from_header.lower(), "SLOT_HEADER": SLOT_HEADER,
        "OF_SLOT": f"{DECIDER}-",
    }  # fmt: skip
    return [lua("answer", "answer.lua", **constants)]
