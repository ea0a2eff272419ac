"""A gateway that asks an endpoint picker: an Envoy set up as gateways of the Gateway API Inference
Extension do for an InferencePool."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from kappa.host import free_ports
from kappa_benchmarks.serving.processes import until_served
from kappa_router.gateway.clusters import TYPES, Json, extension
from kappa_router.gateway.ext_proc import SERVICE
from kappa_router.gateway.process import find_envoy

AnswersMode = Literal["FULL_DUPLEX_STREAMED", "STREAMED", "NONE"]
DUPLEX: AnswersMode = "FULL_DUPLEX_STREAMED"
DESTINATION = "x-gateway-destination-endpoint"
_HOST, _START_S = "127.0.0.1", 20.0
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
# A stream that breaks before the picker's first word is opened at another one.
_AGAIN = {
    "retry_on": "connect-failure,refused-stream,reset,unavailable", "num_retries": 2,
    "retry_host_predicate": [
        extension("envoy.retry_host_predicates.previous_hosts",
                  "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate")
    ],
    "host_selection_retry_max_attempts": 3,
}  # fmt: skip
# A picker that does not serve is asked nothing: it says so, or refuses a connection.
_GUARDED = {
    "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
    "health_checks": [{
        "interval": "1s", "no_traffic_interval": "1s", "timeout": "1s",
        "unhealthy_threshold": 1, "healthy_threshold": 1,
        "grpc_health_check": {"service_name": SERVICE},
    }],
    "outlier_detection": {
        "split_external_local_origin_errors": True, "consecutive_local_origin_failure": 1,
        "base_ejection_time": "1s", "max_ejection_percent": 50,
    },
}  # fmt: skip


def _policy(name: str, message: str, **config: Any) -> Json:
    kind = f"extensions.load_balancing_policies.{name}.v3.{message}"
    made = extension(f"envoy.load_balancing_policies.{name}", kind, **config)
    return {"policies": [{"typed_extension_config": made}]}


def bootstrap(
    ports: Sequence[int], pickers: Sequence[int], servers: Sequence[int], answers: str
) -> Json:
    """Envoy's configuration. ports: its own and that of its administration; answers: the mode in
    which pickers see their bodies."""
    here = {"namespace": "envoy.lb", "key": DESTINATION}
    path = [{"key": here["key"]}]
    served = [{"key": "x-gateway-destination-endpoint-served"}]
    picked = _policy(
        "override_host", "OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": path}},
                               {"header": DESTINATION}],
        selected_host_key={"key": "envoy.lb", "path": served},
        fallback_policy=_policy("round_robin", "RoundRobin"),
    )  # fmt: skip
    mode = {
        "request_header_mode": "SEND", "response_header_mode": "SEND",
        "request_body_mode": DUPLEX, "response_body_mode": answers,
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND" if answers == DUPLEX else "SKIP",
    }  # fmt: skip
    spaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    ask = extension(
        "envoy.filters.http.ext_proc", "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "retry_policy": _AGAIN},
        processing_mode=mode, message_timeout="30s",
        metadata_options={
            "forwarding_namespaces": spaces,
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )  # fmt: skip
    router = extension("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")
    retried = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503], "num_retries": 2,
    }  # fmt: skip
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retried},
    }
    manager = {
        "@type": TYPES
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": [ask, router],
        "route_config": {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "name": "gateway",
        "address": _address(ports[0]),
        "per_connection_buffer_limit_bytes": 32 << 20,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [
        _cluster("picker", pickers) | {"typed_extension_protocol_options": _HTTP2} | _GUARDED,
        _cluster("pool", servers) | {"load_balancing_policy": picked},
    ]
    return {
        "admin": {"address": _address(ports[1])},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _address(port: int) -> Json:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, ports: Sequence[int]) -> Json:
    ends = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]},
    }


@contextlib.contextmanager
def gateway(
    pickers: Sequence[int], servers: Sequence[int], folder: Path, answers: AnswersMode = DUPLEX
) -> Iterator[tuple[str, int]]:
    """A gateway before pickers and servers, by their ports: its url, and its process' id. Raises
    TimeoutError."""
    ports = free_ports(_HOST, 2)
    file = folder / "gateway.json"
    file.write_text(json.dumps(bootstrap(ports, pickers, servers, answers)))
    command = (str(find_envoy()), "-c", str(file), "--concurrency", "1", "--disable-hot-restart")
    with subprocess.Popen([*command, "-l", "error"]) as running:
        try:
            until_served(f"http://{_HOST}:{ports[1]}/ready", _START_S, running)
            yield f"http://{_HOST}:{ports[0]}", running.pid
        finally:
            running.kill()
