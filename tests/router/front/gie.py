"""A gateway of the Gateway API Inference Extension: a real Envoy that asks a picker, and its
ext-proc messages as a test writes them."""

import asyncio
import contextlib
import json
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import grpc.aio

from kappa.host import free_port
from kappa.settings.front import load_front_settings
from kappa_router.front.gateway import picking
from kappa_router.gateway.clusters import TYPES, extension
from kappa_router.gateway.ext_proc import MESSAGES, SERVICE, SUBSET
from kappa_router.gateway.process import find_envoy
from tests.router.front.conftest import QUICK, chat
from tests.router.front.offering import serving
from tests.router.patience import PATIENCE_S, until

DUPLEX = "FULL_DUPLEX_STREAMED"
DESTINATION = "x-gateway-destination-endpoint"
BODY = json.dumps(chat(stream=True)).encode()
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def policy(name, message, **config):
    kind = f"extensions.load_balancing_policies.{name}.v3.{message}"
    made = extension(f"envoy.load_balancing_policies.{name}", kind, **config)
    return {"policies": [{"typed_extension_config": made}]}


def bootstrap(port, admin, picker, servers, answers=DUPLEX):
    """Envoy's configuration as gateways make it from an InferencePool; answers: the mode in which
    the picker sees their bodies."""
    here = {"namespace": "envoy.lb", "key": DESTINATION}
    path = [{"key": here["key"]}]
    served = [{"key": "x-gateway-destination-endpoint-served"}]
    picked = policy(
        "override_host", "OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": path}},
                               {"header": DESTINATION}],
        selected_host_key={"key": "envoy.lb", "path": served},
        fallback_policy=policy("round_robin", "RoundRobin"),
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
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}}, processing_mode=mode,
        message_timeout="30s",
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
        "address": address(port),
        "per_connection_buffer_limit_bytes": 32 << 20,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [
        cluster("picker", [picker]) | {"typed_extension_protocol_options": _HTTP2},
        cluster("pool", servers) | {"load_balancing_policy": picked},
    ]
    return {
        "admin": {"address": address(admin)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def address(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name, ports):
    ends = [{"endpoint": {"address": address(port)}} for port in ports]
    return {
        "name": name,
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]},
    }


@contextlib.asynccontextmanager
async def gateway(picker, servers, answers=DUPLEX):
    """A gateway before a picker and servers, by their ports; its url."""
    port, admin = free_port("127.0.0.1"), free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "envoy.json"
        file.write_text(json.dumps(bootstrap(port, admin, picker, servers, answers)))
        running = await asyncio.create_subprocess_exec(
            find_envoy(), "-c", file, "--concurrency", "1", "--disable-hot-restart",
            "-l", "error", "--use-dynamic-base-id",
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as http:

                async def listens():
                    assert running.returncode is None
                    with contextlib.suppress(aiohttp.ClientError):
                        return (await http.get(f"http://127.0.0.1:{admin}/ready")).status == 200

                async with asyncio.timeout(PATIENCE_S):
                    while not await listens():
                        await asyncio.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.kill()
            await running.wait()


class Conversation:
    """The gateway's side of one request."""

    def __init__(self, call):
        self._call = call

    async def say(self, **fields):
        await self._call.write(MESSAGES["ProcessingRequest"](**fields))

    async def hear(self):
        async with asyncio.timeout(PATIENCE_S):
            heard = await self._call.read()
        return None if heard is grpc.aio.EOF else heard

    async def head(self, subset=None, end_of_stream=False, **headers):
        """Send the head of a chat, with such headers besides."""
        given = {":method": "POST", ":path": "/v1/chat/completions", **headers}
        more = {} if subset is None else metadata(*SUBSET, subset)
        await self.say(request_headers=headers_of(given, end_of_stream), **more)

    async def body(self, *parts):
        for at, part in enumerate(parts, 1):
            await self.say(request_body={"body": part, "end_of_stream": at == len(parts)})

    async def picked(self, *parts, **given):
        """Send a whole request; the endpoints that are picked for it."""
        await self.head(**given)
        await self.body(*(parts or (BODY,)))
        heard = await self.hear()
        (picked,) = [
            one.header.raw_value.decode()
            for one in heard.request_headers.response.header_mutation.set_headers
            if one.header.key == DESTINATION
        ]
        return picked.split(","), heard

    async def refused(self):
        """The status and the error that the client gets, after which the stream ends."""
        heard = (await self.hear()).immediate_response
        assert await self.hear() is None
        return heard.status.code, json.loads(heard.body)["error"]

    async def done(self):
        await self._call.done_writing()

    def cancel(self):
        self._call.cancel()

    async def code(self):
        return await self._call.code()


def headers_of(given, end_of_stream=False):
    rows = [{"key": key, "raw_value": value.encode()} for key, value in given.items()]
    return {"headers": {"headers": rows}, "end_of_stream": end_of_stream}


def metadata(namespace, key, endpoints):
    """Metadata with a list, as of a subset, or a text."""
    value = {"string_value": endpoints}
    if not isinstance(endpoints, str):
        value = {"list_value": {"values": [{"string_value": one} for one in endpoints]}}
    space = {"key": namespace, "value": {"fields": [{"key": key, "value": value}]}}
    return {"metadata_context": {"filter_metadata": [space]}}


@contextlib.asynccontextmanager
async def asking(port):
    """A way to open conversations with the picker at a port, and its channel."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        process = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["ProcessingResponse"].FromString,
        )
        yield (lambda: Conversation(process())), channel


async def health(channel, service):
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=MESSAGES["HealthCheckResponse"].FromString,
    )
    return (await check(MESSAGES["HealthCheckRequest"](service=service))).status


@contextlib.asynccontextmanager
async def before(*servers, **sections):
    """A picker before servers that it starts: what runs, and a way to open conversations."""
    profiles = ("h100-pcie5", "gh200-c2c")
    async with serving(*servers):
        backends = [
            {"url": one.url, "profile": profile, "name": name}
            for one, profile, name in zip(servers, profiles, "ab", strict=False)
        ]
        given = {"epp": {"port": 0}, "http": {"port": 0}, "probe": QUICK, **sections}
        settings = load_front_settings(None, backends=backends, **given)
        async with picking(settings) as here, asking(here.gateway.port) as (open_one, channel):
            await until(
                lambda: here.front.live.choosable == len(servers) == len(here.scene.endpoints)
            )
            yield SimpleNamespace(
                here=here, live=here.front.live, channel=channel, conversation=open_one,
                at=[f"127.0.0.1:{one.port}" for one in servers],
                settled=partial(until, lambda: not here.front.live.router.flights),
            )  # fmt: skip
