"""Envoy's configuration for one front door, as data that a person can read. Pure.

A request's way: names that only we may set are taken off it; its path is one of the listed or 404;
the decider is asked about its head if its body is large or of unknown length, then about the whole
request; it goes to the first server of the decider's list that takes it; its end is told to the
decider. `process` writes it, has Envoy check it and starts Envoy with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kappa.protocol import ENDPOINT_HEADER, RETRY_HEADER, TO_ID_HEADER
from kappa_router.api import errors
from kappa_router.gateway.access_log import FOREIGN_RECORD, RECORD
from kappa_router.gateway.clusters import (
    DECIDED,
    DECIDER,
    EVENTS,
    FACE,
    OPEN,
    SERVERS,
    TYPES,
    Json,
    clusters,
    extension,
    of_slot,
    seconds,
    tails,
)
from kappa_router.gateway.replies import local_replies
from kappa_router.gateway.spec import (
    ADMIT,
    ADMITTER_HEADER,
    ATTEMPTS,
    DECIDE,
    GOES_ON_S,
    OF_ENVOY,
    REQUESTS,
    SLOT_HEADER,
    DeciderSlot,
    GatewaySpec,
    Tls,
)

# Never taken from a client.
_OURS = ("x-kappa-to-", "x-gateway-destination-", "x-envoy-")
# A content-length below 100 kB.
_SMALL = {"google_re2": {}, "regex": "[0-9]{1,5}"}
_BUFFER_BYTES = 256 << 10
# Of ends that wait for a decider that starts again.
_LOG_BYTES = 1 << 20
# With pauses that double, two seconds together in the mean: Envoy's main thread leaves out the
# deciders that cannot be reached, and runs late on a busy machine.
_QUESTIONS_MORE = 10
_RETRY_ON = (
    "connect-failure,refused-stream,reset-before-request,retriable-headers,retriable-status-codes"
)
_HCM = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_STATS = ("http.front.", "cluster.servers.", "listener_manager.", "server.", "overload.")
# Of an answer to `ADMIT` and `DECIDE`: what goes to the server, and what to the client.
_TO_SERVER = (
    {"prefix": "x-kappa-to-"},
    {"exact": "x-request-id"},
    *({"exact": name} for name in OF_ENVOY),
)
_OF_REFUSALS = "content-type|retry-after|www-authenticate|x-request-id|x-ratelimit-.*"
_TO_CLIENT = "x-request-id|x-ratelimit-.*|x-kappa-([^t].*|t[^o].*|to[^-].*)"


def bootstrap(spec: GatewaySpec) -> Json:
    """The whole configuration of an Envoy."""
    return {
        "node": {"id": "kappa", "cluster": "kappa"},
        "admin": {"address": {"pipe": {"path": str(spec.admin_socket), "mode": 0o600}}},
        "static_resources": {
            "listeners": [_listener(spec)],
            "clusters": clusters(spec, errors.DECIDER_AWAY().text()),
        },
        "overload_manager": _overload(spec),
        "stats_config": {
            "stats_matcher": {"inclusion_list": {"patterns": [{"prefix": s} for s in _STATS]}}
        },
    }


def certificate(tls: Tls) -> Json:
    """The pair as a file of its own that Envoy follows: a new pair is taken when it is moved into
    the place of the old one."""
    return {
        "resources": [
            {
                "@type": TYPES + "extensions.transport_sockets.tls.v3.Secret",
                "name": "front",
                "tls_certificate": {
                    "certificate_chain": {"filename": str(tls.cert)},
                    "private_key": {"filename": str(tls.key)},
                    "watched_directory": {"path": str(tls.cert.parent)},
                },
            }
        ]
    }


def _listener(spec: GatewaySpec) -> Json:
    chain: Json = {"filters": [{"name": "http", "typed_config": _manager(spec)}]}
    if spec.tls is not None:
        chain |= {
            "transport_socket": _tls(spec.certificate_file),
            "transport_socket_connect_timeout": seconds(spec.bounds.header_s),
        }
    return {
        "name": "front",
        "address": {"socket_address": {"address": spec.host, "port_value": spec.port}},
        # What has arrived while `ADMIT` is answered must be less than half of the body's bound:
        # at more Envoy never reads on.
        "per_connection_buffer_limit_bytes": min(_BUFFER_BYTES, spec.bounds.body_bytes // 4),
        "filter_chains": [chain],
    }


def _tls(file: Path) -> Json:
    source = {"resource_api_version": "V3", "path_config_source": {"path": str(file)}}
    return extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context={
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificate_sds_secret_configs": [{"name": "front", "sds_config": source}],
        },
    )


def _manager(spec: GatewaySpec) -> Json:
    """The HTTP connection manager."""
    bounds = spec.bounds
    return {
        "@type": TYPES + _HCM,
        "stat_prefix": "front",
        "codec_type": "AUTO",
        "server_name": "kappa",
        "use_remote_address": True,
        # Our own id, which the decider gives a request, is the client's where that is fit.
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "max_request_headers_kb": max(1, -(-bounds.header_bytes // 1024)),
        "request_headers_timeout": seconds(bounds.header_s),
        # From the first byte to the last, with the answer to `ADMIT` in between.
        "request_timeout": seconds(bounds.header_s + bounds.body_s),
        "stream_idle_timeout": seconds(bounds.silent_s),
        "common_http_protocol_options": {
            "idle_timeout": seconds(bounds.idle_s),
            "max_headers_count": bounds.headers,
        },
        "http2_protocol_options": {
            "max_concurrent_streams": 100,
            "initial_stream_window_size": _BUFFER_BYTES,
            "initial_connection_window_size": 4 * _BUFFER_BYTES,
        },
        # No path may become another on the way: one that is not listed as it came is a 404.
        "normalize_path": False,
        "merge_slashes": False,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "early_header_mutation_extensions": [_without_ours()],
        "local_reply_config": local_replies(bounds),
        "access_log": [_log(REQUESTS, one, foreign=spec.foreign) for one in spec.slots],
        "access_log_options": {"access_log_flush_interval": seconds(GOES_ON_S)},
        "http_filters": [*_ask(spec), *tails(spec), _router(spec)],
        "route_config": {"virtual_hosts": [_host(spec)]},
    }


def _without_ours() -> Json:
    removed = [
        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}
        for prefix in _OURS
    ]
    return extension(
        "envoy.http.early_header_mutation.header_mutation",
        "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=removed,
    )


def _log(name: str, slot: DeciderSlot, *filters: Json, foreign: bool = False) -> Json:
    """Tells a decider what the filters pass of the requests that it decided."""
    made = extension(
        "envoy.access_loggers.fluentd",
        "extensions.access_loggers.fluentd.v3.FluentdAccessLogConfig",
        cluster=of_slot(EVENTS, slot),
        tag=name,
        stat_prefix=name,
        record=dict(FOREIGN_RECORD if foreign else RECORD),
        # While a failed attempt is not known, the decider's answer about the next one waits.
        buffer_flush_interval="0.005s" if name == ATTEMPTS else "0.02s",
        buffer_size_bytes=_LOG_BYTES,
        retry_options={"backoff_options": {"base_interval": "0.02s", "max_interval": "0.5s"}},
    )
    exact = {"exact": str(slot.number)}
    its = {"header_filter": {"header": {"name": SLOT_HEADER, "string_match": exact}}}
    return made | {"filter": {"and_filter": {"filters": [its, *filters]}} if filters else its}


def _failed() -> Json:
    """Passes attempts that Envoy, or a server, says to have failed."""
    worst = {"default_value": 429, "runtime_key": "kappa.failed"}
    status = {"status_code_filter": {"comparison": {"op": "GE", "value": worst}}}
    return {"or_filter": {"filters": [{"response_flag_filter": {}}, status]}}


# -- the decider --------------------------------------------------------------------------------


def _ask(spec: GatewaySpec) -> list[Json]:
    """The two questions: about the head alone, where the body would cost much, and the whole."""
    added = {"allowed_client_headers_on_success": {"patterns": [_regex(_TO_CLIENT)]}}
    whole = {"max_request_bytes": spec.bounds.body_bytes}
    # Were the first to add headers to the client's answer, too, each would stand there twice.
    return [
        _only_large(_question(spec, "admit", ADMIT, to_client={})),
        _question(spec, "decide", DECIDE, to_client=added, with_request_body=whole),
    ]


def _question(spec: GatewaySpec, name: str, path: str, to_client: Json, **config: Any) -> Json:
    longest = seconds(spec.bounds.decide_s)
    answer = {
        "allowed_upstream_headers": {"patterns": list(_TO_SERVER)},
        "allowed_client_headers": {"patterns": [_regex(_OF_REFUSALS)]},
        **to_client,
        "dynamic_metadata_from_headers": {
            "patterns": [{"exact": name} for name in (ENDPOINT_HEADER, TO_ID_HEADER, SLOT_HEADER)]
        },
    }
    service = {
        "server_uri": {
            "uri": f"http://{DECIDER}",
            "cluster": DECIDER,
            "timeout": longest,
        },
        "path_prefix": path,
        "authorization_response": answer,
        # Another decider is asked at once; one that starts again is waited for, a little. The
        # longest pause, which so few retries never reach, is also how long Envoy lets each try
        # last.
        "retry_policy": {
            "retry_on": "connect-failure,reset",
            "num_retries": _QUESTIONS_MORE,
            "retry_back_off": {"base_interval": "0.004s", "max_interval": longest},
            **_elsewhere(),
        },
    }
    return extension(
        name,
        "extensions.filters.http.ext_authz.v3.ExtAuthz",
        transport_api_version="V3",
        allowed_headers={"patterns": [_regex(".*")]},
        http_service=service,
        clear_route_cache=spec.decider_away == "least_request",
        failure_mode_allow=spec.decider_away == "least_request",
        status_on_error={"code": 503},
        **config,
    )


def _elsewhere() -> Json:
    """Have each retry go to a host that was not tried, while there is any."""
    kind = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "retry_host_predicate": [extension("envoy.retry_host_predicates.previous_hosts", kind)],
        "host_selection_retry_max_attempts": 16,
    }


def _only_large(question: Json) -> Json:
    """The question where the body is not known to be small."""
    header = "type.googleapis.com/envoy.type.matcher.v3.HttpRequestHeaderMatchInput"
    length = {"name": "length", "typed_config": {"@type": header, "header_name": "content-length"}}
    skip = extension("skip", "extensions.filters.common.matcher.action.v3.SkipFilter")
    small = {
        "predicate": {"single_predicate": {"input": length, "value_match": {"safe_regex": _SMALL}}},
        "on_match": {"action": skip},
    }
    return extension(
        question["name"],
        "extensions.common.matching.v3.ExtensionWithMatcher",
        extension_config=question,
        xds_matcher={"matcher_list": {"matchers": [small]}},
    )


def _router(spec: GatewaySpec) -> Json:
    kind = "extensions.filters.http.router.v3.Router"
    return extension(
        "envoy.filters.http.router", kind, suppress_envoy_headers=True,
        upstream_log=[_log(ATTEMPTS, one, _failed()) for one in spec.slots],
    )  # fmt: skip


# -- paths --------------------------------------------------------------------------------------


def _host(spec: GatewaySpec) -> Json:
    decided = [route for path in spec.decided for route in _decided(spec, path)]
    own = [_own(path) for path in spec.own]
    nowhere = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 404},
        "typed_per_filter_config": _unasked(),
    }
    return {
        "name": "front",
        "domains": ["*"],
        "include_request_attempt_count": True,
        "include_is_timeout_retry_header": True,
        "response_headers_to_remove": [RETRY_HEADER],
        "routes": [*decided, *own, nowhere],
    }


def _decided(spec: GatewaySpec, path: str) -> list[Json]:
    """The way to the servers. With `least_request` there are two: with a list and without."""
    # Keys are the decider's; what a foreign server says must be readable.
    removed = ["accept-encoding"] if spec.foreign else ["authorization", "x-api-key", "cookie"]
    removed += ["proxy-authorization", ADMITTER_HEADER]
    chosen = {
        "match": {"path": path},
        "route": _to_servers("reset," + _RETRY_ON, hedged=not spec.foreign),
        "request_headers_to_remove": removed,
    }
    if spec.decider_away == "refuse":
        return [chosen]
    listed = {
        "filter": DECIDED,
        "path": [{"key": ENDPOINT_HEADER}],
        "value": {"present_match": True},
    }
    chosen["match"] = {"path": path, "dynamic_metadata": [listed]}
    any_open = _to_servers(_RETRY_ON) | {
        "metadata_match": {"filter_metadata": {"envoy.lb": {OPEN: True}}}
    }
    return [chosen, {**chosen, "match": {"path": path}, "route": any_open}]


def _to_servers(retry_on: str, *, hedged: bool = False) -> Json:
    """Retries follow the list, as far as `again.lua` is told that they may. hedged: Envoy asks
    about a late attempt while it goes on; whichever attempt answers first is the client's."""
    hedge = {"hedge_policy": {"hedge_on_per_try_timeout": True}} if hedged else {}
    return {
        **hedge,
        "cluster": SERVERS,
        "timeout": "0s",
        "auto_host_rewrite": True,
        "retry_policy": {
            "retry_on": retry_on,
            "retriable_headers": [{"name": RETRY_HEADER, "present_match": True}],
            "num_retries": 1,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
        },
    }


def _own(path: str) -> Json:
    # The name of a model may have two segments.
    below = _regex(re.escape(path) + "[^/]+(/[^/]+)?")
    match = (
        {"safe_regex": below["safe_regex"]}
        if path.endswith("/") and path != "/"
        else {"path": path}
    )
    return {
        "match": match,
        "route": {
            "cluster": FACE,
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure", "num_retries": 3, **_elsewhere()},
        },
        "typed_per_filter_config": _unasked(),
    }


def _unasked() -> Json:
    kind = TYPES + "extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute"
    return {name: {"@type": kind, "disabled": True} for name in ("admit", "decide")}


def _regex(pattern: str) -> Json:
    return {"safe_regex": {"regex": pattern}}


# -- bounds -------------------------------------------------------------------------------------


def _overload(spec: GatewaySpec) -> Json:
    """Refuse requests before memory ends. An HTTP/2 connection has many: those that hold the most
    memory are dropped."""
    heap, connections = "fixed_heap", "global_downstream_max_connections"
    monitors = [
        _monitor(heap, "FixedHeapConfig", max_heap_size_bytes=spec.bounds.heap_bytes),
        _monitor(
            connections,
            "DownstreamConnectionsConfig",
            kind="downstream_connections",
            max_active_downstream_connections=spec.bounds.connections,
        ),
    ]
    actions = [
        _action("shrink_heap", heap, {"threshold": {"value": 0.9}}),
        _action(
            "reset_high_memory_stream",
            heap,
            {"scaled": {"scaling_threshold": 0.92, "saturation_threshold": 0.98}},
        ),
        _action("stop_accepting_requests", heap, {"threshold": {"value": 0.95}}),
    ]
    return {
        "refresh_interval": "0.25s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "resource_monitors": monitors,
        "actions": actions,
    }


def _monitor(name: str, message: str, kind: str = "", **config: Any) -> Json:
    kind = f"extensions.resource_monitors.{kind or name}.v3.{message}"
    return extension(f"envoy.resource_monitors.{name}", kind, **config)


def _action(name: str, monitor: str, trigger: Json) -> Json:
    return {
        "name": f"envoy.overload_actions.{name}",
        "triggers": [{"name": f"envoy.resource_monitors.{monitor}", **trigger}],
    }
