"""The access log as Envoy sends it: which entries are taken, and what of them."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from router.gateway.access_log import (
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from router.gateway.events import Ends, StreamEnd
from router.gateway.spec import ATTEMPTS, REQUESTS

CALL = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"


def entry(request_id="r", status=200, flags=(), upstream=("10.0.0.1", 8000), **more):
    made = HTTPAccessLogEntry()
    if request_id is not None:
        made.request.request_headers["x-kappa-to-id"] = request_id
    made.response.response_code.value = status
    made.response.response_body_bytes = 77
    common = made.common_properties
    common.duration.FromMilliseconds(1250)
    common.time_to_first_upstream_rx_byte.FromMilliseconds(250)
    common.upstream_request_attempt_count = more.get("attempts", 1)
    common.intermediate_log_entry = more.get("intermediate", False)
    if upstream is not None:
        common.upstream_remote_address.socket_address.address = upstream[0]
        common.upstream_remote_address.socket_address.port_value = upstream[1]
    for flag in flags:
        setattr(common.response_flags, flag, True)
    return made


def message(name, *entries):
    made = StreamAccessLogsMessage()
    if name:
        made.identifier.log_name = name
    made.http_logs.log_entry.extend(entries)
    return made


@asynccontextmanager
async def following(folder, ended=None, cut=int):
    """The service, a stream to it, and what it heard: ends, failed attempts, ids in flight."""
    ends, failed, going = [], [], []
    async with (
        Ends(folder / "e", ended or ends.append, failed.append, going.append, cut),
        grpc.aio.insecure_channel(f"unix:{folder / 'e'}") as channel,
    ):
        method = channel.stream_unary(
            CALL, StreamAccessLogsMessage.SerializeToString, StreamAccessLogsResponse.FromString
        )
        yield method, (ends, failed, going)


async def heard(method, *messages):
    """Send the messages and wait until they are taken."""
    call = method()
    for one in messages:
        await call.write(one)
    await call.done_writing()
    async with asyncio.timeout(10):
        await call


async def test_ends_are_heard_with_all_that_is_known(tmp_path):
    async with following(tmp_path) as (method, (ends, _, _)):
        gone = ("downstream_connection_termination",)
        await heard(method, message(REQUESTS, entry(attempts=2), entry("s", 0, gone, None)))
    assert ends == [
        StreamEnd(
            "r", 200, frozenset(), 77, 1.25, 0.25, "10.0.0.1:8000", 2
        ),
        StreamEnd("s", 0, frozenset(gone), 77, 1.25, 0.25, "", 1),
    ]  # fmt: skip
    assert not ends[0].client_gone and ends[1].client_gone


async def test_ends_of_failed_attempts_are_heard_apart(tmp_path):
    async with following(tmp_path) as (method, (ends, failed, _)):
        lost = entry("r", 0, ("upstream_connection_termination",), ("::1", 80))
        await heard(method, message(ATTEMPTS, lost), message("", entry("s", 503)))
        assert not ends and [one.request_id for one in failed] == ["r", "s"]
        assert failed[0].upstream == "[::1]:80" and failed[0].broken and not failed[1].broken


async def test_requests_that_go_on_are_no_ends(tmp_path):
    async with following(tmp_path) as (method, (ends, _, going)):
        await heard(method, message(REQUESTS, entry("r", intermediate=True), entry("s")))
        assert going == ["r"] and [one.request_id for one in ends] == ["s"]


async def test_ends_of_what_nobody_decided_are_left_out(tmp_path):
    async with following(tmp_path) as (method, found):
        await heard(method, message(REQUESTS, entry(None)), message("", entry("")))
        await heard(method, message("else", entry("r")))
        assert found == ([], [], [])


async def test_an_end_that_cannot_be_taken_costs_no_other(tmp_path):
    taken = []

    def ended(end):
        if end.request_id == "bad":
            raise KeyError(end.request_id)
        taken.append(end.request_id)

    async with following(tmp_path, ended) as (method, _):
        await heard(method, message(REQUESTS, entry("a"), entry("bad"), entry("b")))
    assert taken == ["a", "b"]


@pytest.mark.parametrize(("name", "cuts"), [(REQUESTS, 1), (ATTEMPTS, 0)])
async def test_ends_are_cut_when_their_stream_breaks(tmp_path, name, cuts):
    cut = asyncio.Queue()
    async with following(tmp_path, cut=lambda: cut.put_nowait(name)) as (method, (ends, failed, _)):
        call = method()
        await call.write(message(name, entry("r")))
        async with asyncio.timeout(10):
            while not (ends or failed):
                await asyncio.sleep(0.01)
        assert cut.empty()
        call.cancel()
        if cuts:
            async with asyncio.timeout(10):
                assert await cut.get() == REQUESTS
    assert cut.empty()


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("upstream_connection_failure", "unreached"),
        ("no_healthy_upstream", "unreached"),
        ("upstream_remote_reset", "broken"),
        ("stream_idle_timeout", "late"),
        ("upstream_request_timeout", "late"),
        ("downstream_remote_reset", "client_gone"),
        ("upstream_retry_limit_exceeded", None),
    ],
)
async def test_an_ends_flags_say_what_went_wrong(flag, what):
    end = StreamEnd("r", 503, frozenset({flag}))
    kinds = ("unreached", "broken", "late", "client_gone")
    assert [kind for kind in kinds if getattr(end, kind)] == ([what] if what else [])
