"""The load-test client against an endpoint that misbehaves: every failure has its kind."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kappa.host import free_port
from kappa_loadtest.client import (
    Endpoint,
    EndpointError,
    EndpointSettings,
    Stream,
    StreamFault,
    base_url,
)
from kappa_loadtest.cluster import Surveyed, survey
from kappa_loadtest.run_folder import RequestRecord
from tests.loadtest.rude_endpoint import Rude, rude


async def sent(
    server: Rude | None, what: object, tenant: str = "", **options: object
) -> tuple[RequestRecord, float | None]:
    """One request with the prompt `what`."""
    url = server.url if server else closed_url()
    settings = EndpointSettings(url, "m", **options)  # type: ignore[arg-type]
    begin_s = time.monotonic()
    record = RequestRecord("s", 0, tenant)
    async with Endpoint(settings, lambda: time.monotonic() - begin_s) as endpoint:
        retry_after_s = await endpoint.send(endpoint.settings.prepare(what, 3), record)  # type: ignore[arg-type]
    return record, retry_after_s


def closed_url() -> str:
    """An address at which no server listens."""
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


async def test_a_good_answer_has_times_in_order_and_counts() -> None:
    async with rude() as server:
        record, _ = await sent(server, "well x")
    assert (record.error, record.status) == ("", 200)
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    assert 0 <= record.sent_s <= record.first_token_s <= record.last_token_s <= record.ended_s
    assert len(record.gaps_s) == 2  # three events with output, one of them without text
    assert (record.prompt_tokens, record.generated_tokens) == (7, 3)
    assert record.node == ""
    assert record.predicted_ttft_s is None


async def test_the_headers_of_our_cluster_are_read() -> None:
    async with rude() as server:
        record, _ = await sent(server, "ours x")
    assert (record.node, record.paced, record.reason) == ("pcie", True, "cached")
    assert (record.ratio, record.crit, record.predicted_ttft_s) == (12.5, 3.0, 0.25)
    assert record.request_id == "id-1"


@pytest.mark.parametrize(
    ("what", "kind", "tokens"),
    [
        ("401", "401", 0), ("429", "429", 0), ("503", "503", 0), ("500", "http_500", 0),
        ("404", "http_404", 0), ("cut", "cut", 2), ("half", "cut", 1), ("reset", "cut", 1),
        ("empty", "empty", 0), ("nothing", "cut", 0), ("garbage", "protocol", 0),
        ("json", "protocol", 0), ("badjson", "bad_json", 1), ("told", "stream_error", 1),
        ("finish", "", 2), ("drop", "connect", 0),
    ],
)  # fmt: skip
async def test_every_failure_has_its_kind(what: str, kind: str, tokens: int) -> None:
    async with rude() as server:
        record, retry_after_s = await sent(server, f"{what} x")
    assert (record.error, record.generated_tokens) == (kind, tokens)
    assert bool(record.error_detail) == bool(kind)
    assert retry_after_s == (0.2 if what in ("429", "503") else None)
    if what.isdecimal():
        assert record.error_detail == f"says {what}"
        assert record.status == int(what)


async def test_nobody_listens() -> None:
    record, _ = await sent(None, "well x")
    assert (record.error, record.status) == ("connect", 0)


async def test_answer_that_never_ends_is_a_timeout_with_its_tokens() -> None:
    async with rude() as server:
        record, _ = await sent(server, "hang x", timeout_s=2.0)
    assert (record.error, record.generated_tokens) == ("timeout", 1)


async def sent_to(answer: bytes) -> RequestRecord:
    """One request to a server that answers with these bytes."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(write, "127.0.0.1", 0)
    async with server:
        fake = Rude()
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return (await sent(fake, "well x"))[0]


async def test_an_answer_that_is_not_http() -> None:
    assert (await sent_to(b"SSH-2.0-what\r\n\r\n")).error == "protocol"


async def test_a_cancelled_request_says_so_and_keeps_what_came() -> None:
    async with rude() as server:
        settings = EndpointSettings(server.url, "m")
        record = RequestRecord("s", 0)
        async with Endpoint(settings, time.monotonic) as endpoint:
            task = asyncio.create_task(
                endpoint.send(endpoint.settings.prepare("wait x", 3), record)
            )
            await server.until_received(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert record.error == "cancelled"
    assert record.ended_s >= record.sent_s


async def test_chats_texts_and_token_ids_go_where_they_belong() -> None:
    chat = ({"role": "user", "content": "well chat"},)
    async with rude() as server:
        await sent(server, chat)
        await sent(server, "well text", ignore_eos=True, usage=False)
        await sent(server, np.array([5, 6], dtype=np.int32), max_output_tokens=2)
        await sent(server, "well words", as_chat=True)
    assert server.paths == [
        "/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/chat/completions",
    ]  # fmt: skip
    first, second, third, fourth = server.bodies
    assert first["messages"] == list(chat)
    assert first["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in first
    assert second["ignore_eos"] is True
    assert "stream_options" not in second
    assert third["prompt"] == [5, 6]
    assert [body["max_tokens"] for body in server.bodies] == [3, 3, 2, 3]
    assert fourth["messages"] == [{"role": "user", "content": "well words"}]


async def test_each_tenant_has_its_key_and_others_the_default() -> None:
    keys = {"": "k0", "red": "k1"}
    async with rude() as server:
        await sent(server, "well a", "red", keys=keys)
        await sent(server, "well b", "blue", keys=keys)
        await sent(server, "well c")
    sent_keys = [headers.get("Authorization") for headers in server.headers]
    assert sent_keys == ["Bearer k1", "Bearer k0", None]


@pytest.mark.parametrize("url", ["host:80", "ftp://x", "http://", "http://h:no", "http://h/?q=1"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(EndpointError, match="give http"):
        base_url(url)


def test_base_url_drops_the_path_and_never_repeats_a_password() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_url(url) == "http://h:1"
    with pytest.raises(EndpointError, match="give --key") as refused:
        base_url("http://me:sesame@h:1/v1")
    assert "sesame" not in str(refused.value)


Answers = dict[str, tuple[int, object]]


async def surveyed(answers: Answers) -> Surveyed:
    """What a survey finds at an endpoint with these answers by path."""

    def handler(status: int, body: object) -> object:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(body, status=status)

        return answer

    routes = {path: handler(*answer) for path, answer in answers.items()}
    async with rude(routes) as server:  # type: ignore[arg-type]
        return await survey(server.url)


def cards(*found: dict[str, object]) -> tuple[int, object]:
    return 200, {"object": "list", "data": found}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"/v1/models": cards({"id": "m", "owned_by": "someone"})}, ({}, (), False)),
        (
            {"/v1/models": cards({"id": "m"}), "/v1/nodes": (200, {"nodes": [{"node": "pcie"}]})},
            ({}, ({"node": "pcie"},), True),
        ),
        (
            {"/v1/models": cards({"id": "m", "owned_by": "vllm", "max_model_len": 4096})},
            ({"m": 4096}, (), True),
        ),
        # Nodes of somebody else's.
        (
            {"/v1/models": cards({"id": "m"}), "/v1/nodes": (200, {"nodes": ["a", "b"]})},
            ({}, (), False),
        ),
        ({"/v1/models": cards({"id": "m"}), "/version": (200, {"version": "1"})}, ({}, (), True)),
    ],
)
async def test_a_survey_recognises_a_cluster_of_ours_and_vllm(
    answers: Answers, expected: object
) -> None:
    found = await surveyed(answers)
    assert found.models == ("m",)
    assert (found.contexts, found.nodes, found.takes_ignore_eos) == expected


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {"error": {"message": "no"}}), "answers 401; give its key with --key"),
        (cards(), "serves no model"),
        ((200, {"nodes": []}), "not OpenAI's list of models"),
    ],
)
async def test_a_survey_says_what_is_wrong_and_what_helps(
    answer: tuple[int, object], why: str
) -> None:
    with pytest.raises(EndpointError, match=why):
        await surveyed({"/v1/models": answer})
    with pytest.raises(EndpointError, match="nobody answers at http://127"):
        await survey(closed_url())


async def test_a_retry_keeps_nothing_of_the_attempt_before() -> None:
    record = RequestRecord("s", 0)
    async with (
        rude() as server,
        Endpoint(EndpointSettings(server.url, "m"), time.monotonic) as endpoint,
    ):
        await endpoint.send(endpoint.settings.prepare("ours x", 3), record)
    assert record.ratio == 12.5
    gone = EndpointSettings(closed_url(), "m")
    async with Endpoint(gone, time.monotonic) as endpoint:
        await endpoint.send(endpoint.settings.prepare("well x", 3), record)
    assert record.error == "connect"
    assert (record.request_id, record.node, record.paced, record.reason) == ("", "", False, "")
    assert (record.ratio, record.crit, record.predicted_ttft_s) == (None, None, None)


async def test_a_key_that_the_endpoint_repeats_is_not_kept() -> None:
    async with rude() as server:
        record, _ = await sent(server, "repeats-key x", keys={"": "sesame"})
    assert record.error == "401"
    assert record.error_detail == "no such key: Bearer …"


async def test_headers_that_no_journal_can_hold_are_made_printable() -> None:
    record = await sent_to(
        b"HTTP/1.1 503 No\r\nx-request-id: \xff\r\nx-kappa-node: n\xfe\r\n"
        b"content-length: 6\r\n\r\n\x1b[31m!"
    )
    assert record.error == "503"
    for text in (record.request_id, record.node, record.error_detail):
        assert text and text.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord) == record


# -- events read from a stream, however it is cut into chunks


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(words: str | None, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": reason}]})


def delta(reason: str | None = None, **words: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": words, "finish_reason": reason}]})


DONE = b"data: [DONE]\n\n"


def read(*chunks: bytes) -> tuple[Stream, list[int]]:
    stream = Stream()
    counts = [stream.feed(chunk) for chunk in chunks]
    return stream, [*counts, stream.end()]


VLLM_CHAT = (
    delta(role="assistant", content="") + delta(content="a") + delta(content="")
    + delta("length", content="c")
    + event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}) + DONE
)  # fmt: skip


@given(st.lists(st.integers(0, len(VLLM_CHAT)), max_size=12))
def test_chunks_may_be_cut_anywhere(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(VLLM_CHAT)]
    stream, _ = read(*(VLLM_CHAT[a:b] for a, b in pairwise(ends)))
    assert (stream.outputs, stream.done, stream.finished) == (3, True, True)
    assert (stream.prompt_tokens, stream.completion_tokens) == (9, 3)


@pytest.mark.parametrize(
    ("chunks", "outputs"),
    [
        ([text("a"), text("b", "length")], 2),
        ([text("a"), text("", "stop")], 1),  # the end alone is no token
        ([text("", "length")], 1),  # but the only token may have no text
        ([text(""), text("")], 2),  # special tokens have none either
        ([delta(role="assistant"), delta(content="a"), delta("stop")], 1),
        ([delta(role="assistant", content="a"), delta(role="assistant", content="b")], 2),
        ([delta(role="assistant", content=None), delta(reasoning_content="hm")], 1),
        ([delta(tool_calls=[{"index": 0}])], 1),
        ([delta(role="assistant", content="")], 0),
    ],
)
def test_what_counts_as_output(chunks: list[bytes], outputs: int) -> None:
    assert read(*chunks)[0].outputs == outputs


def test_a_chunk_tells_how_many_outputs_ended_in_it() -> None:
    stream, counts = read(text("a") + text("b"), text("c")[:10], text("c")[10:], DONE)
    assert counts == [2, 0, 1, 0, 0]
    assert stream.done


def test_comments_line_ends_and_a_last_line_without_end() -> None:
    chunks = b": ping\r\n\r\nevent: x\r\nid: 1\r\nretry: 5\r\n" + text("a").replace(b"\n", b"\r\n")
    stream, counts = read(chunks, b"data: [DONE]")
    assert (stream.outputs, stream.done, counts) == (1, True, [1, 0, 0])


def test_a_stream_cut_within_an_event_is_just_not_finished() -> None:
    stream, _ = read(text("a"), text("b")[:-8])
    assert (stream.outputs, stream.done, stream.finished) == (1, False, False)


@pytest.mark.parametrize(
    ("chunk", "kind", "detail"),
    [
        (b"data: {oops\n", "bad_json", "oops"),
        (b'data: {"choices": 5}\n', "bad_json", "choices"),
        (b"<html>\n", "protocol", "<html>"),
        (event({"error": {"message": "died", "type": "x"}}), "stream_error", "died"),
        (event({"error": "plain"}), "stream_error", "plain"),
        (b"x" * (5 << 20), "protocol", "longer than"),
    ],
)
def test_a_stream_that_is_not_openais_is_refused_by_kind(
    chunk: bytes, kind: str, detail: str
) -> None:
    with pytest.raises(StreamFault, match=detail) as raised:
        read(chunk)
    assert raised.value.kind == kind


@pytest.mark.parametrize("count", [b"-1", b"1" + b"0" * 30, b"1.5"])
def test_a_bad_count_of_tokens_is_refused(count: bytes) -> None:
    with pytest.raises(StreamFault) as fault:
        Stream().feed(b'data: {"choices":[],"usage":{"completion_tokens":' + count + b"}}\n\n")
    assert fault.value.kind == "bad_json"
