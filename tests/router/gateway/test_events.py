"""The access log as Envoy sends it: which entries are taken, and what of them."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from structlog.testing import capture_logs

from kappa_router.gateway import events
from kappa_router.gateway.access_log import FOREIGN_RECORD, LogEntry
from kappa_router.gateway.events import StreamEnd
from kappa_router.gateway.spec import ATTEMPTS, REQUESTS
from tests.router.gateway.door import ends_heard


def entry(request_id="r", status=200, flags="-", upstream="10.0.0.1:8000", **more):
    return {
        "id": request_id, "status": status, "flags": flags, "sent_bytes": 77, "duration_ms": 1250,
        "upstream": upstream, "log": "DownstreamEnd", **more,
    }  # fmt: skip


def message(name, *entries):
    return msgspec.msgpack.encode([name, [[1_764_000_000, one] for one in entries]])


@asynccontextmanager
async def following(folder, ended=None, cut=int):
    """The socket, a connection to it, and what it heard: ends, failed attempts, ids in flight."""
    ends, failed, going = [], [], []
    async with ends_heard(folder / "e", ended or ends.append, failed.append, going.append, cut):
        reader, writer = await asyncio.open_unix_connection(folder / "e")
        yield (reader, writer), (ends, failed, going)
        writer.close()


async def heard(connection, *parts):
    """Send the bytes, each at its own time, and wait until they are taken."""
    reader, writer = connection
    for part in parts:
        writer.write(part)
        await writer.drain()
        for _ in range(3):
            await asyncio.sleep(0)
    writer.write_eof()
    async with asyncio.timeout(10):
        assert await reader.read() == b""


def test_entry_has_the_fields_that_envoy_writes():
    assert set(FOREIGN_RECORD) == set(LogEntry.__struct_encode_fields__)


async def test_ends_are_heard_with_all_that_is_known(tmp_path):
    async with following(tmp_path) as (connection, (ends, _, _)):
        unsent = entry("s", None, "DC", None)
        await heard(connection, message(REQUESTS, entry(), unsent))
    gone = ("DC",)
    assert ends == [
        StreamEnd("r", 200, frozenset(), 77, 1.25, "10.0.0.1:8000"),
        StreamEnd("s", 0, frozenset(gone), 77, 1.25, ""),
    ]
    assert not ends[0].client_gone and ends[1].client_gone


async def test_ends_of_failed_attempts_are_heard_apart(tmp_path):
    async with following(tmp_path) as (connection, (ends, failed, _)):
        lost = entry("r", 0, "UC,URX", "[::1]:80")
        await heard(connection, message(ATTEMPTS, lost), message(ATTEMPTS, entry("s", 503)))
        assert not ends and [one.request_id for one in failed] == ["r", "s"]
        assert failed[0].upstream == "[::1]:80" and failed[0].broken and not failed[1].broken


async def test_requests_that_go_on_are_no_ends(tmp_path):
    async with following(tmp_path) as (connection, (ends, _, going)):
        goes_on = entry("r", log="DownstreamPeriodic")
        await heard(connection, message(REQUESTS, goes_on, entry("s")))
        assert going == ["r"] and [one.request_id for one in ends] == ["s"]


async def test_ends_of_undecided_requests_are_left_out(tmp_path):
    async with following(tmp_path) as (connection, found):
        await heard(connection, message(REQUESTS, entry(None)), message(REQUESTS, entry("")))
        assert found == ([], [], [])


async def test_end_that_cannot_be_taken_costs_no_other(tmp_path):
    taken = []

    def ended(end):
        if end.request_id == "bad":
            raise KeyError(end.request_id)
        taken.append(end.request_id)

    async with following(tmp_path, ended) as (connection, _):
        await heard(connection, message(REQUESTS, entry("a"), entry("bad"), entry("b")))
    assert taken == ["a", "b"]


@pytest.mark.parametrize(("name", "cuts"), [(REQUESTS, 1), (ATTEMPTS, 0)])
async def test_ends_are_cut_when_their_connection_breaks(tmp_path, name, cuts):
    cut = []
    async with following(tmp_path, cut=lambda: cut.append(name)) as (connection, (ends, failed, _)):
        await heard(connection, message(name, entry("r")))
        assert len(ends or failed) == 1 and len(cut) == cuts


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
async def test_messages_are_taken_however_they_are_cut(tmp_path, size):
    sent = b"".join(message(REQUESTS, entry(f"r{n}"), entry(f"s{n}")) for n in range(3))
    async with following(tmp_path) as (connection, (ends, _, _)):
        await heard(connection, *(sent[i : i + size] for i in range(0, len(sent), size)))
    assert [end.request_id for end in ends] == ["r0", "s0", "r1", "s1", "r2", "s2"]


async def test_malformed_message_costs_no_other(tmp_path):
    broken = message(REQUESTS, entry("a"))[:-5]
    with capture_logs() as logs:
        async with following(tmp_path) as (connection, (ends, _, _)):
            await heard(connection, broken + message(REQUESTS, entry("b")))
    assert [end.request_id for end in ends] == ["b"]
    assert [line["event"] for line in logs] == ["ends_malformed"]


async def test_message_beyond_the_bound_ends_its_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_MAX_MESSAGE_BYTES", 100)
    with capture_logs() as logs:
        async with following(tmp_path) as ((reader, writer), (ends, _, _)):
            writer.write(message(REQUESTS, *(entry(f"r{n}") for n in range(9)))[:-1])
            async with asyncio.timeout(10):
                assert await reader.read() == b""
    assert not ends and [line["event"] for line in logs] == ["ends_malformed"]


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("UF", "unreached"),
        ("UH", "unreached"),
        ("UR", "broken"),
        ("SI", "late"),
        ("UT", "late"),
        ("DR", "client_gone"),
        ("URX", None),
    ],
)
async def test_ends_flags_say_what_went_wrong(flag, what):
    end = StreamEnd("r", 503, frozenset({flag}))
    kinds = ("unreached", "broken", "late", "client_gone")
    assert [kind for kind in kinds if getattr(end, kind)] == ([what] if what else [])
