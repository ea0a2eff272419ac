"""A chat's answer as blocks: every way in which an engine's parsers may write one."""

import json

import pytest

from router.api.blocks import AnswerEnd, RewordedStream, event, reworded
from tests.router.scripted import USAGE, calling, chunks

pytestmark = pytest.mark.ray


class Shown:
    """A wording that tells what it was called with, a line each."""

    def begun(self, model, end):
        return f"begun {model} {end.tokens('prompt_tokens')}\n"

    def opened(self, block):
        return f"opened {block.index} {block.kind} {block.name} {block.call_id}".rstrip() + "\n"

    def grown(self, block, more):
        return f"grown {block.index} {more}\n"

    def closed(self, block):
        return f"closed {block.index} {block.text}\n"

    def ended(self, blocks, end):
        cached = end.tokens("prompt_tokens_details", "cached_tokens")
        return f"ended {len(blocks)} {end.finish_reason} {end.stop} {cached}\n"

    def failed(self, error):
        return f"failed {error['message']}\n"

    def whole(self, model, blocks, end):
        return {"model": model, "blocks": [(b.kind, b.text, b.name) for b in blocks], "end": end}


def shown(*packets):
    stream = RewordedStream(Shown())
    return "".join(stream.feed(packet) for packet in packets).splitlines()


BEGUN, ENDED = "begun m 40", "ended 1 stop None 32"


def test_each_kind_of_text_is_a_block_of_its_own_and_grows():
    said = shown(*chunks({"reasoning": "Hm"}, {"reasoning": "m."}, {"content": "Hi"},
                         {"content": "!"}))  # fmt: skip
    assert said == [
        BEGUN, "opened 0 reasoning", "grown 0 Hm", "grown 0 m.", "closed 0 Hmm.",
        "opened 1 text", "grown 1 Hi", "grown 1 !", "closed 1 Hi!", "ended 2 stop None 32",
    ]  # fmt: skip


def test_calls_follow_each_other_and_text_inside_one_waits_for_its_end():
    said = shown(*chunks(
        calling(0, "", "c1", "f"), calling(0, '{"a"'), {"content": "aside"}, calling(0, ":1}"),
        calling(1, "{}", "c2", "g"), finish="tool_calls",
    ))  # fmt: skip
    assert said == [
        BEGUN, "opened 0 call f c1", 'grown 0 {"a"', "grown 0 :1}", 'closed 0 {"a":1}',
        "opened 1 text", "grown 1 aside", "closed 1 aside",
        "opened 2 call g c2", "grown 2 {}", "closed 2 {}", "ended 3 tool_calls None 32",
    ]  # fmt: skip


def test_text_that_waits_is_shown_at_the_end():
    said = shown(*chunks(calling(0, "{}", "c1", "f"), {"content": "bye"}))
    assert said[1:] == [
        "opened 0 call f c1", "grown 0 {}", "closed 0 {}", "opened 1 text", "grown 1 bye",
        "closed 1 bye", "ended 2 stop None 32",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_events_may_come_cut_anywhere_or_several_at_once(size):
    text = "".join(chunks({"content": "héllo"}, {"content": "\n\ndata: x"}))
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert shown(*cut) == shown(text) and shown(text)[-1] == ENDED


def test_an_error_ends_the_stream_and_nothing_comes_after_it():
    opening, one, *_, done = chunks({"content": "Hi"})
    broken = 'data: {"error":{"message":"no"}}\n\n'
    assert shown(opening, one, broken, one, done) == [
        BEGUN, "opened 0 text", "grown 0 Hi", "failed no",
    ]  # fmt: skip
    for garbage in ("data: {\n\n", "data: 7\n\n", "data: nonsense\n\n"):
        assert shown(opening, garbage, done) == [BEGUN, "failed Internal error."]


def test_comments_are_passed_over_and_an_answer_may_be_empty():
    opening, *rest = chunks()
    assert shown(": ping\n\n", opening, *rest) == [BEGUN, "ended 0 stop None 32"]


def test_the_stop_string_is_told_and_the_id_of_a_stop_token_is_not():
    assert shown(*chunks(stop="END"))[-1] == "ended 0 stop END 32"
    assert shown(*chunks(stop=128009))[-1] == "ended 0 stop None 32"


def test_a_whole_answer_has_the_same_blocks():
    message = {
        "reasoning": "Hm", "content": "Hi",
        "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}] * 2,
    }  # fmt: skip
    choice = {"message": message, "finish_reason": "tool_calls", "stop_reason": None}
    made = reworded({"model": "m", "choices": [choice], "usage": USAGE}, Shown())
    assert made["blocks"] == [
        ("reasoning", "Hm", ""), ("text", "Hi", ""), ("call", "{}", "f"), ("call", "{}", "f"),
    ]  # fmt: skip
    assert made["end"] == AnswerEnd("tool_calls", None, USAGE)


def test_an_event_is_ascii_whatever_a_model_wrote():
    made = event("x", text="é\ud800\n\n")
    assert made.isascii() and made.count("\n") == 3
    assert json.loads(made.split("data: ")[1]) == {"type": "x", "text": "é\ud800\n\n"}
