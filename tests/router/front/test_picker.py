"""The endpoint picker: what a gateway says and hears in one request, each point of the protocol
(Gateway API Inference Extension, endpoint picker protocol 1.0.0), and gateways that do
otherwise."""

import asyncio
import json
import ssl

import aiohttp
import grpc
import pytest

from kappa.settings.front import load_front_settings
from kappa_benchmarks.serving.gateway import DESTINATION
from kappa_router.front.gateway import picking
from kappa_router.gateway.ext_proc import SERVED, SERVICE
from kappa_router.gateway.process import EnvoyError
from tests.router.front.conftest import chat
from tests.router.front.gie import BODY, before, headers_of, health, metadata
from tests.router.front.offering import FakeServer, stream_of
from tests.router.gateway.certificates import pair
from tests.router.patience import until

TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
STREAM = {":status": "200", "content-type": "text/event-stream"}


def two():
    return FakeServer(), FakeServer()


def returned(heard):
    return heard.request_body.response.body_mutation.streamed_response


async def body_back(talk):
    """The request's body as it is sent back."""
    parts = [returned(await talk.hear())]
    while not parts[-1].end_of_stream:
        parts.append(returned(await talk.hear()))
    return parts


# -- the request ---------------------------------------------------------------------------------


async def test_endpoints_stand_in_header_and_in_metadata():
    async with before(*two()) as picker:
        picked, heard = await picker.conversation().picked()
        (space,) = heard.dynamic_metadata.fields
        (field,) = space.value.struct_value.fields
        assert (space.key, field.key) == ("envoy.lb", DESTINATION)
        assert field.value.string_value == ",".join(picked)
        assert heard.request_headers.response.clear_route_cache


async def test_endpoints_are_all_servers_in_order():
    async with before(*two()) as picker:
        picked, _ = await picker.conversation().picked()
        assert sorted(picked) == sorted(picker.at)


@pytest.mark.parametrize("size", [0, 61_999, 62_000, 300_000])
async def test_body_comes_back_in_parts_as_it_was(size):
    async with before(*two()) as picker:
        body, talk = json.dumps(chat("x" * size)).encode(), picker.conversation()
        await talk.picked(body[:1000], body[1000:])
        parts = await body_back(talk)
        assert b"".join(part.body for part in parts) == body
        assert max(len(part.body) for part in parts) <= 62_000


async def test_trailers_of_a_request_end_its_body():
    async with before(*two()) as picker:
        talk = picker.conversation()
        await talk.head()
        await talk.say(request_body={"body": BODY})
        await talk.say(request_trailers={})
        assert (await talk.hear()).HasField("request_headers")
        part = returned(await talk.hear())
        assert (part.body, part.end_of_stream) == (BODY, False)
        assert (await talk.hear()).HasField("request_trailers")


async def test_request_without_a_body_is_answered_at_its_head():
    async with before(*two()) as picker:
        talk = picker.conversation()
        await talk.head(end_of_stream=True, **{":method": "GET", ":path": "/v1/models"})
        assert (await talk.hear()).request_headers.response.clear_route_cache


@pytest.mark.parametrize("as_text", [False, True])
async def test_only_endpoints_of_the_subset_are_picked(as_text):
    async with before(*two()) as picker:
        for at in picker.at:
            subset = f"{at},10.0.0.9:1" if as_text else [at, "10.0.0.9:1"]
            picked, _ = await picker.conversation().picked(subset=subset)
            assert picked == [at]


@pytest.mark.parametrize("subset", [[], ["10.0.0.9:1"]])
async def test_subset_without_a_known_endpoint_is_503(subset):
    async with before(*two()) as picker:
        talk = picker.conversation()
        await talk.head(subset=subset)
        await talk.body(BODY)
        status, error = await talk.refused()
        assert (status, error["code"]) == (503, "no_worker")
        assert "the gateway allows" in error["message"]


async def test_client_chooses_no_subset_by_a_header():
    async with before(*two()) as picker:
        given = {f"{DESTINATION}-subset": picker.at[0], DESTINATION: "10.0.0.9:1"}
        picked, _ = await picker.conversation().picked(**given)
        assert sorted(picked) == sorted(picker.at)


async def test_no_ready_endpoint_is_503_until_one_is_back():
    servers = two()
    async with before(*servers) as picker:
        for server in servers:
            await server.stop()
        await until(lambda: picker.live.choosable == 0)
        assert await health(picker.channel, "readiness") == 2
        talk = picker.conversation()
        await talk.head()
        await talk.body(BODY)
        assert (await talk.refused())[0] == 503
        for server in servers:
            await server.start()
        await until(lambda: picker.live.choosable)
        await picker.conversation().picked()


async def test_request_over_the_limit_is_429_with_its_reason():
    async with before(*two(), router={"max_queue": 1}) as picker:
        await (kept := picker.conversation()).picked()
        talk = picker.conversation()
        await talk.head()
        await talk.body(BODY)
        status, error = await talk.refused()
        assert (status, error["code"]) == (429, "queue_full")
        kept.cancel()
        await picker.settled()
        await picker.conversation().picked()


async def test_request_without_a_known_key_is_401():
    tenants = {"by_key": {"a-key-of-some-length": "t"}, "unknown": "refuse"}
    async with before(*two(), tenants=tenants) as picker:
        talk = picker.conversation()
        await talk.head()
        await talk.body(BODY)
        assert (await talk.refused())[0] == 401
        key = {"authorization": "Bearer a-key-of-some-length"}
        _, heard = await picker.conversation().picked(**key)
        removed = heard.request_headers.response.header_mutation.remove_headers
        assert "authorization" in removed


# -- the answer ----------------------------------------------------------------------------------


async def answered(talk, *parts, served=None):
    """Send an answer as its server does; what comes back of it."""
    await body_back(talk)
    more = metadata(*SERVED, served) if served else {}
    await talk.say(response_headers=headers_of(STREAM), **more)
    heard = [await talk.hear()]
    for at, part in enumerate(parts, 1):
        await talk.say(response_body={"body": part, "end_of_stream": at == len(parts)})
        heard.append(await talk.hear())
    return heard


async def test_answer_passes_and_ends_its_request():
    async with before(*two()) as picker:
        talk, parts = picker.conversation(), [TOKEN, TOKEN, stream_of(FakeServer())]
        await talk.picked(**{"x-request-id": "one"})
        head, *bodies = await answered(talk, *parts)
        shown = head.response_headers.response.header_mutation.set_headers
        assert {"x-request-id", "x-kappa-node"} <= {one.header.key for one in shown}
        back = [one.response_body.response.body_mutation.streamed_response for one in bodies]
        assert [one.body for one in back] == parts
        assert [one.end_of_stream for one in back] == [False, False, True]
        await picker.settled()
        record = picker.live.records["one"]
        assert record.end == "done"
        assert record.ttft_s is not None


async def test_served_endpoint_is_where_the_request_counts():
    async with before(*two()) as picker:
        talk = picker.conversation()
        (first, second), _ = await talk.picked(**{"x-request-id": "one"})
        await answered(talk, TOKEN, served=second)
        record = picker.live.records["one"]
        assert record.decision.worker == "ab"[picker.at.index(second)]
        assert first != second


async def test_client_that_leaves_ends_its_request():
    async with before(*two()) as picker:
        await (early := picker.conversation()).picked(**{"x-request-id": "early"})
        await (late := picker.conversation()).picked(**{"x-request-id": "late"})
        await answered(late, TOKEN, TOKEN[:4])
        await body_back(early)
        await early.say(response_headers=headers_of(STREAM))
        early.cancel()
        await picker.settled()
        ends = [picker.live.records[name].end for name in ("early", "late")]
        assert ends == ["client_gone", "done"]


async def test_answer_kept_from_the_picker_ends_with_the_stream():
    async with before(*two()) as picker:
        talk = picker.conversation()
        modes = {"request_body_mode": 4, "response_body_mode": 0}
        head = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "one"}
        await talk.say(request_headers=headers_of(head), protocol_config=modes)
        await talk.body(BODY)
        await talk.hear()
        await body_back(talk)
        await talk.say(response_headers=headers_of(STREAM))
        await talk.hear()
        await talk.done()
        await picker.settled()
        assert picker.live.records["one"].end == "done"


# -- gateways and clients that do otherwise ------------------------------------------------------


async def test_half_a_body_leaves_nothing_behind():
    async with before(*two()) as picker:
        for leave in ("cancel", "done"):
            talk = picker.conversation()
            await talk.head()
            await talk.say(request_body={"body": BODY[:10]})
            left = getattr(talk, leave)()
            if leave == "done":
                await left
        await picker.conversation().picked()
        assert len(picker.live.router.flights) == 1


async def test_body_over_the_bound_is_413():
    async with before(*two(), router={"max_body_bytes": 1024}) as picker:
        talk = picker.conversation()
        await talk.head()
        await talk.say(request_body={"body": b"x" * 1025})
        assert (await talk.refused())[0] == 413
        talk = picker.conversation()
        await talk.head(**{"content-length": "1000000"})
        assert (await talk.refused())[0] == 413
        talk = picker.conversation()
        await talk.head(**{"content-length": "10"})
        await talk.say(request_body={"body": b"x" * 11})
        assert (await talk.refused())[0] == 413
        await picker.conversation().picked()


async def test_body_that_does_not_come_is_408():
    async with before(*two(), access={"body_timeout_s": 1.5}) as picker:
        talk = picker.conversation()
        await talk.head()
        assert (await talk.refused())[0] == 408
        await picker.conversation().picked()


async def test_gateway_that_takes_nothing_back_is_given_up():
    large = json.dumps(chat("word " * 8_000_000)).encode()
    async with before(*two(), router={"request_timeout_s": 1.0}) as picker:
        talk = picker.conversation()
        await talk.head(**{"x-request-id": "one"})
        for at in range(0, len(large), 1 << 16):
            part = large[at : at + (1 << 16)]
            end = at + len(part) == len(large)
            await talk.say(request_body={"body": part, "end_of_stream": end})
        await until(lambda: "one" in picker.live.records)
        await picker.settled()
        assert picker.live.records["one"].end != "done"


@pytest.mark.parametrize(
    "more", [{"protocol_config": {"request_body_mode": 2}}, {"observability_mode": True}]
)
async def test_gateway_of_another_mode_is_told_the_remedy(more):
    async with before(*two()) as picker:
        talk = picker.conversation()
        await talk.say(request_headers=headers_of({":path": "/v1/completions"}), **more)
        status, error = await talk.refused()
        assert status == 503
        assert "FULL_DUPLEX_STREAMED" in error["message"]


async def test_messages_out_of_order_are_an_invalid_argument():
    async with before(*two()) as picker:
        for first in ({}, {"request_body": {"body": b"x"}}, {"response_headers": {}}):
            talk = picker.conversation()
            await talk.say(**first)
            assert await talk.code() == grpc.StatusCode.INVALID_ARGUMENT
        talk = picker.conversation()
        await talk.head()
        await talk.say(response_headers={})
        assert await talk.code() == grpc.StatusCode.INVALID_ARGUMENT
        await picker.conversation().picked()


# -- health, and our own paths -------------------------------------------------------------------


async def test_health_has_the_services_of_the_protocol():
    async with before(*two()) as picker:
        for service in ("", "liveness", "readiness", SERVICE):
            assert await health(picker.channel, service) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(picker.channel, "other")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_our_own_paths_are_answered_beside():
    async with before(*two()) as picker, aiohttp.ClientSession(picker.here.url) as http:
        answer = await http.get("/v1/nodes")
        assert len((await answer.json())["backends"]) == 2
        assert (await http.get("/ready")).status == 200


async def test_picker_drains_after_its_watch_was_cancelled():
    async with before(*two()) as picker:
        watch = asyncio.create_task(picker.here.gateway.died())
        talk = picker.conversation()
        await talk.picked()
        watch.cancel()
        stopping = asyncio.create_task(picker.here.gateway.stop(30.0))
        await answered(talk, TOKEN)
        await stopping
        await picker.here.gateway.died()


async def test_picker_that_ends_says_so_and_takes_what_comes():
    async with before(*two()) as picker:
        talk = picker.conversation()
        await talk.picked()
        stopping = asyncio.create_task(picker.here.gateway.stop(30.0))
        await asyncio.sleep(0)
        assert await health(picker.channel, "readiness") == 2
        assert await health(picker.channel, "liveness") == 1
        late = picker.conversation()
        await late.picked()
        await answered(talk, TOKEN)
        assert not stopping.done()
        await answered(late, TOKEN)
        await stopping


async def test_picker_that_was_not_asked_takes_what_comes_at_its_end():
    async with before(*two()) as picker:
        stopping = asyncio.create_task(picker.here.gateway.stop(30.0))
        await asyncio.sleep(0)
        assert await health(picker.channel, "readiness") == 2
        late = picker.conversation()
        await late.picked()
        await answered(late, TOKEN)
        await stopping


async def test_certificate_is_shown_at_both_ports(tmp_path):
    tls = pair(tmp_path)
    settings = load_front_settings(
        None, backends=[{"url": "http://127.0.0.1:9", "profile": "h100-pcie5"}], epp={"port": 0},
        http={"port": 0, "tls": {"cert": str(tls.cert), "key": str(tls.key)}},
    )  # fmt: skip
    trusted = grpc.ssl_channel_credentials(tls.cert.read_bytes())
    async with picking(settings) as here:
        at = f"localhost:{here.gateway.port}"
        async with grpc.aio.secure_channel(at, trusted) as channel:
            assert await health(channel, "liveness") == 1
        context = ssl.create_default_context(cafile=str(tls.cert))
        async with aiohttp.ClientSession() as http:
            assert (await http.get(f"{here.url}/health", ssl=context)).status == 200


async def test_certificate_that_is_none_is_named(tmp_path):
    tls = pair(tmp_path)
    tls.cert.write_text("no certificate")
    settings = load_front_settings(
        None, backends=[{"url": "http://127.0.0.1:9", "profile": "h100-pcie5"}], epp={"port": 0},
        http={"port": 0, "tls": {"cert": str(tls.cert), "key": str(tls.key)}},
    )  # fmt: skip
    with pytest.raises(EnvoyError, match=r"http\.tls"):
        async with picking(settings):
            pass


async def test_port_that_is_taken_is_named():
    async with before(FakeServer()) as picker:
        with pytest.raises(OSError, match=r"cannot listen on .*epp\.port"):
            async with before(FakeServer(), epp={"port": picker.here.gateway.port}):
                pass


HERE = {"url": "http://a:1", "profile": "h100-pcie5"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backends": [HERE | {"url": "https://a:1"}]}, "has TLS"),
        ({"backends": [HERE | {"url": "http://a:1/x"}]}, "a path"),
        ({"backends": [HERE | {"data_parallel_size": 2}]}, "give each rank a port"),
        ({"http": {"decider_away": "least_request"}}, "failureMode"),
        ({"present": "http://b:1"}, "no balancer"),
    ],
)
def test_settings_that_a_gateway_cannot_keep_are_refused(given, says):
    there = {"backends": [HERE], "epp": {}, **given}
    with pytest.raises(ValueError, match=says):
        load_front_settings(None, **there)


async def test_streams_are_open_at_the_same_time():
    async with before(*two()) as picker:
        talks = [picker.conversation() for _ in range(20)]
        # Of bodies without a length at most four may be awaited at a time.
        length = {"content-length": str(len(BODY))}
        picked = await asyncio.gather(*(talk.picked(**length) for talk in talks))
        assert {ends[0] for ends, _ in picked} <= set(picker.at)
        assert len(picker.live.router.flights) == 20
