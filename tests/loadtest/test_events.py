"""What the client reads from a stream, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.events import Stream, StreamFault


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(said: str | None, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": reason}]})


def delta(reason: str | None = None, **said: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": reason}]})


DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> tuple[Stream, list[int]]:
    stream = Stream()
    counts = [stream.feed(piece) for piece in pieces]
    return stream, [*counts, stream.end()]


VLLM_CHAT = (
    delta(role="assistant", content="") + delta(content="a") + delta(content="")
    + delta("length", content="c")
    + event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}) + DONE
)  # fmt: skip


@given(st.lists(st.integers(0, len(VLLM_CHAT)), max_size=12))
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(VLLM_CHAT)]
    stream, _ = read(*(VLLM_CHAT[a:b] for a, b in pairwise(ends)))
    assert (stream.outputs, stream.done, stream.finished) == (3, True, True)
    assert (stream.prompt_tokens, stream.completion_tokens) == (9, 3)


@pytest.mark.parametrize(
    ("pieces", "outputs"),
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
def test_what_counts_as_output(pieces: list[bytes], outputs: int) -> None:
    assert read(*pieces)[0].outputs == outputs


def test_a_piece_tells_how_many_outputs_ended_in_it() -> None:
    stream, counts = read(text("a") + text("b"), text("c")[:10], text("c")[10:], DONE)
    assert counts == [2, 0, 1, 0, 0]
    assert stream.done


def test_comments_line_ends_and_a_last_line_without_end() -> None:
    pieces = b": ping\r\n\r\nevent: x\r\nid: 1\r\nretry: 5\r\n" + text("a").replace(b"\n", b"\r\n")
    stream, counts = read(pieces, b"data: [DONE]")
    assert (stream.outputs, stream.done, counts) == (1, True, [1, 0, 0])


def test_a_stream_cut_within_an_event_is_just_not_finished() -> None:
    stream, _ = read(text("a"), text("b")[:-8])
    assert (stream.outputs, stream.done, stream.finished) == (1, False, False)


@pytest.mark.parametrize(
    ("piece", "kind", "detail"),
    [
        (b"data: {oops\n", "bad_json", "oops"),
        (b'data: {"choices": 5}\n', "bad_json", "choices"),
        (b"<html>\n", "protocol", "<html>"),
        (event({"error": {"message": "died", "type": "x"}}), "stream_error", "died"),
        (event({"error": "plain"}), "stream_error", "plain"),
        (b"x" * (5 << 20), "protocol", "longer than"),
    ],
)
def test_what_is_no_stream_of_openai_is_told(piece: bytes, kind: str, detail: str) -> None:
    with pytest.raises(StreamFault, match=detail) as raised:
        read(piece)
    assert raised.value.kind == kind


@pytest.mark.parametrize("count", [b"-1", b"1" + b"0" * 30, b"1.5"])
def test_a_count_of_tokens_that_is_none_is_told(count: bytes) -> None:
    with pytest.raises(StreamFault) as fault:
        Stream().feed(b'data: {"choices":[],"usage":{"completion_tokens":' + count + b"}}\n\n")
    assert fault.value.kind == "bad_json"
