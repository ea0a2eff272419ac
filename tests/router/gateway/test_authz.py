"""The protocol between Envoy and the decider: questions in any pieces, one answer each."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from kappa_router.gateway import authz
from kappa_router.gateway.authz import AuthzServer, Go, Refuse
from kappa_router.gateway.spec import (
    ADMITTER_HEADER,
    SLOT_HEADER,
    TOLD_HEADER,
    DeciderSlot,
    veiled,
)
from tests.router.patience import until

GO = Go({"x-gateway-destination-endpoint": "10.0.0.1:80"}, {"x-request-id": "r"})


class ScriptedDesk:
    """Answers as it is bidden; `hold` keeps decisions waiting until it is set."""

    def __init__(self, verdict=GO):
        self.verdict, self.asked, self.told, self.lost = verdict, [], [], []
        self.hold, self.cancelled = asyncio.Event(), 0
        self.hold.set()

    async def decide(self, inquiry):
        self.asked.append(inquiry)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    async def again(self, request_id, attempt):
        self.told.append(("again", request_id, attempt))
        return self.verdict

    def first(self, request_id, told):
        self.told.append(("first", request_id, told))

    def unread(self, answer):
        self.lost.append(answer)


@asynccontextmanager
async def talking(desk, folder, max_body_bytes=1 << 20):
    """A connection to the desk: reader and writer."""
    slot = DeciderSlot(folder, 7)
    async with AuthzServer(desk.decide, desk, slot, max_body_bytes):
        reader, writer = await asyncio.open_unix_connection(str(slot.decider_socket))
        yield reader, writer
        writer.close()


async def answer_of(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")[:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.pop("content-length")))
    return int(first.split()[1]), headers, body


async def answers(desk, folder, *sent, count=1):
    """The desk's answers to what is sent piece by piece."""
    async with talking(desk, folder) as (reader, writer):
        for part in sent:
            writer.write(part)
            await asyncio.sleep(0)
        return [await answer_of(reader) for _ in range(count)]


def question(path="/decide/v1/completions?a=b", body=b"{}", method="POST", more=""):
    return (
        f"{method} {path} HTTP/1.1\r\nHost: decider\r\nX-A: 1\r\n{more}"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def closes(reader):
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_authz_asks_with_the_clients_target_headers_and_body(tmp_path):
    desk = ScriptedDesk()
    sent = {**GO.upstream, SLOT_HEADER: "7", **GO.client}
    assert await answers(desk, tmp_path, question()) == [(200, sent, b"")]
    (inquiry,) = desk.asked
    assert (inquiry.method, inquiry.target, inquiry.body) == ("POST", "/v1/completions?a=b", b"{}")
    assert inquiry.headers["x-a"] == "1" and inquiry.headers["host"] == "decider"


def test_authz_runs_on_uvloop(tmp_path):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        large = question(body=b"x" * 500_000)
        assert runner.run(answers(ScriptedDesk(), tmp_path, large))[0][0] == 200


async def test_authz_asks_without_a_body_before_it_is_buffered(tmp_path):
    desk = ScriptedDesk()
    ((_, headers, _),) = await answers(desk, tmp_path, question("/admit/v1/completions", b""))
    assert headers[ADMITTER_HEADER] == str(DeciderSlot(tmp_path, 7).decider_socket)
    assert SLOT_HEADER not in headers
    assert desk.asked[0].body is None and desk.asked[0].target == "/v1/completions"


@pytest.mark.parametrize("step", [1, 7, 64])
async def test_authz_reads_questions_in_pieces_of_any_size(tmp_path, step):
    desk = ScriptedDesk()
    sent = question(body=b"first") + question(body=b"") + question(body=b"third" * 50)
    parts = (sent[at : at + step] for at in range(0, len(sent), step))
    assert [one[0] for one in await answers(desk, tmp_path, *parts, count=3)] == [200] * 3
    assert [one.body for one in desk.asked] == [b"first", b"", b"third" * 50]


async def test_authz_reads_a_long_body_whole(tmp_path):
    desk, body = ScriptedDesk(), bytes(range(256)) * 2000
    await answers(desk, tmp_path, question(body=body))
    assert desk.asked[0].body == body


async def test_authz_answers_pipelined_questions_in_their_order(tmp_path):
    desk = ScriptedDesk()
    desk.hold.clear()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(question("/decide/a") + question("/decide/b") + question("/first/c"))
        await until(lambda: desk.asked)
        await asyncio.sleep(0.01)
        assert [one.target for one in desk.asked] == ["/a"] and not desk.told
        desk.hold.set()
        assert [(await answer_of(reader))[0] for _ in range(3)] == [200] * 3
        assert [one.target for one in desk.asked] == ["/a", "/b"]
        assert desk.told == [("first", "c", "")]


async def test_authz_closes_when_too_much_comes_before_an_answer(tmp_path):
    desk = ScriptedDesk()
    desk.hold.clear()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(question() + b"x" * (authz.MAX_HEAD_BYTES + 1))
        await closes(reader)
    await until(lambda: desk.cancelled == 1)


async def test_authz_passes_a_refusal_on_with_its_body(tmp_path):
    refusal = Refuse(429, {"retry-after": "3", "content-type": "application/json"}, b'{"e":1}')
    found = await answers(ScriptedDesk(refusal), tmp_path, question())
    assert found == [(429, dict(refusal.headers), b'{"e":1}')]


async def test_authz_veils_a_refusal_that_is_no_failure_of_its_own(tmp_path):
    desk = ScriptedDesk(Refuse(503, {}, b"no worker"))
    assert await answers(desk, tmp_path, question()) == [(veiled(503), {}, b"no worker")]


async def test_authz_sends_no_body_after_a_head_question(tmp_path):
    async with talking(ScriptedDesk(Refuse(404, {}, b"gone")), tmp_path) as (reader, writer):
        writer.write(question(method="HEAD", body=b""))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(question(method="HEAD", body=b""))
        # A body between the two would stand before the second.
        assert head.startswith(b"HTTP/1.1 404") and await reader.readuntil(b"\r\n\r\n") == head


async def test_authz_lets_no_header_begin_another(tmp_path):
    go = Go({"x-a": "1\r\nx-gateway-destination-endpoint: evil:1"}, {})
    ((status, headers, _),) = await answers(ScriptedDesk(go), tmp_path, question())
    assert status == 200 and list(headers) == ["x-a", SLOT_HEADER]


async def test_authz_answers_500_when_a_decision_crashes(tmp_path):
    desk = ScriptedDesk(KeyError("a prompt"))
    for status, _, body in await answers(desk, tmp_path, question(), question(), count=2):
        assert status == 500 and b"prompt" not in body


async def test_authz_cancels_a_decision_when_envoy_gives_it_up(tmp_path):
    desk = ScriptedDesk()
    desk.hold.clear()
    async with talking(desk, tmp_path) as (_, writer):
        writer.write(question())
        await until(lambda: desk.asked)
        writer.close()
        await until(lambda: desk.cancelled == 1)
    assert not desk.lost


async def test_authz_names_an_answer_that_envoy_did_not_read(tmp_path):
    desk = ScriptedDesk()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(question())
        await answer_of(reader)
        writer.close()
        await until(lambda: desk.lost)
    assert [one.client for one in desk.lost] == [GO.client]


async def test_authz_holds_an_answer_for_read_when_more_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(authz, "_UNREAD_S", 3600.0)
    desk = ScriptedDesk()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(question())
        await answer_of(reader)
        writer.write(b"POST /decide/next HTTP/1.1\r\ncontent-length: 5\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
    assert not desk.lost and len(desk.asked) == 1


async def test_authz_hears_of_first_tokens_and_attempts(tmp_path):
    desk = ScriptedDesk()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(question("/first/r-1", b""))
        writer.write(question("/first/r-2", b"", more=f"{TOLD_HEADER}: b\r\n"))
        writer.write(question("/again/r-3", b"", more=f"{authz.ATTEMPT_HEADER}: 2\r\n"))
        assert [(await answer_of(reader))[0] for _ in range(3)] == [200] * 3
    assert desk.told == [("first", "r-1", ""), ("first", "r-2", "b"), ("again", "r-3", 2)]


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /decide/x HTTP/2\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\nname : value\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\na: b\r\n folded: c\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /decide/x HTTP/1.1\r\ncontent-length: 1048577\r\n\r\n",
        b"GET /else/x HTTP/1.1\r\n\r\n",
        b"GET /decide HTTP/1.1\r\n\r\n",
        b"\xff" * (authz.MAX_HEAD_BYTES + 1),
        question("/again/r", b"", more=f"{authz.ATTEMPT_HEADER}: x\r\n"),
    ],
)
async def test_authz_closes_on_a_malformed_question(tmp_path, sent):
    desk = ScriptedDesk()
    async with talking(desk, tmp_path) as (reader, writer):
        writer.write(sent)
        await closes(reader)
    assert not desk.asked


async def test_authz_closes_its_connections_at_its_end(tmp_path):
    desk = ScriptedDesk()
    desk.hold.clear()
    slot = DeciderSlot(tmp_path, 7)
    async with AuthzServer(desk.decide, desk, slot, 1024):
        reader, writer = await asyncio.open_unix_connection(str(slot.decider_socket))
        writer.write(question())
        await until(lambda: desk.asked)
    await closes(reader)
    await until(lambda: desk.cancelled == 1)
    writer.close()
