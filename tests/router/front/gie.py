"""An endpoint picker before servers, and what a gateway says to it, as a test writes it."""

import asyncio
import contextlib
import json
from functools import partial
from types import SimpleNamespace

import grpc.aio

from kappa.settings.front import load_front_settings
from kappa_benchmarks.serving.gateway import DESTINATION
from kappa_router.front.gateway import picking
from kappa_router.gateway.ext_proc import MESSAGES, SERVICE, SUBSET
from tests.router.front.conftest import QUICK, chat
from tests.router.front.offering import serving
from tests.router.patience import PATIENCE_S, until

BODY = json.dumps(chat(stream=True)).encode()


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
