"""Files that other tools write: what is sent, left out, and refused."""

import json

import pytest

from kappa_workload.catalogue import workload_named
from kappa_workload.reading import DEFAULT_OUTPUT_TOKENS, ReadAs, WorkloadError

HOW = ReadAs(count_tokens=lambda text: len(text.split()), block_tokens=1)


def read(tmp_path, *lines, how=HOW):
    path = tmp_path / "given.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return workload_named(str(path), how)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def lengths(read):
    return [[(t.input_tokens, t.output_tokens) for t in s.turns] for s in read.sessions]


def sent(read, session=0, turn=0):
    return list(read.texts.messages(session, turn, 0))


def test_chat_that_ends_with_a_user_is_one_request(tmp_path):
    system = {"role": "system", "content": "be brief"}
    messages = [system, user("a b"), assistant("c"), user("d")]
    found = read(tmp_path, {"messages": messages, "max_tokens": 7})
    # A role is a word, too: 3 + 3 + 2 + 2.
    assert lengths(found) == [[(10, 7)]]
    assert sent(found) == messages and found.source == "chats of `messages`, one a line"
    assert found.notes == ()


def test_each_answer_of_a_talk_is_a_turn_extending_the_previous(tmp_path):
    talk = [user("a b"), assistant("c d e"), user("f"), assistant("g")]
    found = read(tmp_path, {"messages": talk, "max_tokens": 99})
    assert lengths(found) == [[(3, 3), (9, 1)]]
    first, second = found.sessions[0].turns
    assert list(second.blocks[:3]) == list(first.blocks)
    assert sent(found, turn=1) == talk[:3]


def test_chats_that_begin_alike_share_their_beginning(tmp_path):
    system = {"role": "system", "content": "one two three"}
    found = read(tmp_path, *({"messages": [system, user(name)]} for name in ("x", "y")))
    one, other = (session.turns[0].blocks for session in found.sessions)
    assert list(one[:4]) == list(other[:4]) and one[-1] != other[-1]
    assert found.notes == (
        f"2 requests without a length of the answer: {DEFAULT_OUTPUT_TOKENS} tokens assumed",
    )


def test_lines_of_a_session_are_its_turns_at_their_times(tmp_path):
    line = {"messages": [user("a")], "output_length": 2}
    found = read(
        tmp_path,
        line | {"session_id": "s", "timestamp": 5000},
        line | {"session_id": 7, "timestamp": 6000},
        line | {"session_id": "s", "timestamp": 6500},
    )
    assert [(s.id, s.arrival_s, [t.after_s for t in s.turns]) for s in found.sessions] == [
        ("s", 0.0, [0.0, 1.5]), ("7", 1.0, [0.0]),
    ]  # fmt: skip


def test_a_batch_request_is_its_body(tmp_path):
    body = {"model": "m", "messages": [user("a")], "max_completion_tokens": 3}
    found = read(tmp_path, {"custom_id": "1", "url": "/v1/chat/completions", "body": body})
    assert lengths(found) == [[(2, 3)]] and found.source == "OpenAI batch requests"


def test_vllm_custom_data_set_is_read_as_prompts_with_lengths(tmp_path):
    lines = [{"prompt": "a b", "output_tokens": 10}, {"prompt": "c", "output_tokens": 4}]
    found = read(tmp_path, *lines)
    assert lengths(found) == [[(3, 10)], [(2, 4)]]
    assert sent(found, 1) == [user("c")] and found.source == "a vLLM custom data set"


def test_aiperf_conversations_grow_by_user_turns_and_say_so(tmp_path):
    turns = [
        {"role": "system", "text": "brief"},
        {"text": "a", "output_length": 5},
        {"texts": ["b", "c"], "delay": 1500, "output_length": 6},
    ]
    found = read(tmp_path, {"session_id": "s", "turns": turns})
    assert lengths(found) == [[(4, 5), (7, 6)]]
    assert [turn.after_s for turn in found.sessions[0].turns] == [0.0, 1.5]
    assert sent(found, turn=1) == [{"role": "system", "content": "brief"}, user("a"), user("b\nc")]
    assert found.notes == ("1 conversations without answers: later turns are sent without them",)


def test_spec_benchs_turns_are_texts(tmp_path):
    found = read(tmp_path, {"question_id": 1, "turns": ["a", "b"]})
    assert [len(session.turns) for session in found.sessions] == [2]


@pytest.mark.parametrize("field", ["text", "text_input"])
def test_aiperfs_single_texts_are_requests_of_their_own(tmp_path, field):
    line = {field: "a b", "output_length": 3}
    found = read(tmp_path, line | {"session_id": "s"}, line | {"session_id": "s", "delay": 250})
    assert lengths(found) == [[(3, 3), (3, 3)]]
    assert found.sessions[0].turns[1].after_s == 0.25 and sent(found, turn=1) == [user("a b")]
    assert "aiperf" in found.source


def test_what_is_left_out_is_counted_with_its_reason(tmp_path):
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    text = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    found = read(
        tmp_path,
        {"messages": [picture], "max_tokens": 1},
        {"messages": [assistant("hello")], "max_tokens": 1},
        {"messages": [text, call, result], "max_tokens": 1},
    )
    assert found.notes == (
        "2 lines left out: images, audio or video (1), no text of a user (1)",
        "2 tool calls and results, sent as plain text",
    )
    assert sent(found)[1:] == [assistant('[{"id": "1"}]'), user("42")]


def test_aiperfs_pictures_are_left_out(tmp_path):
    found = read(tmp_path, {"text": "a"}, {"text": "b", "images": ["x.png"]})
    assert len(found.sessions) == 1
    assert found.notes[0] == "1 lines left out: images, audio or video (1)"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (({"prompt": 5},), "1: Expected `str | null`, got `int` - at `$.prompt`: correct the line"),
        (({"prompt": "a"}, {"messages": []}), "2: has no 'prompt', which the first line has"),
        (({"messages": [{"content": "a"}]},), "1: Object missing required field `role`"),
        (({"prompt": "a", "output_tokens": 0},), "1: Expected `int` >= 1"),
        (({"prompt": ""},), " no line has a text to send: no text of a user (1)"),
    ],
)
def test_a_line_of_no_use_is_refused_with_its_place_and_a_remedy(tmp_path, lines, reason):
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, *lines)
    assert f"given.jsonl:{reason}" in str(caught.value)


def test_no_more_lines_are_read_than_the_limit(tmp_path):
    how = ReadAs(limit=2)
    assert len(read(tmp_path, *({"prompt": "a"} for _ in range(5)), how=how).sessions) == 2


def test_aiperf_trace_may_lack_times_answers_and_block_numbers(tmp_path):
    found = read(tmp_path, {"input_length": 600}, {"input_length": 1024, "hash_ids": [1, 2]})
    assert lengths(found) == [[(600, DEFAULT_OUTPUT_TOKENS)], [(1024, DEFAULT_OUTPUT_TOKENS)]]
    assert [session.arrival_s for session in found.sessions] == [None, None]
    with pytest.raises(WorkloadError, match=r"given.jsonl:2: either every line has a timestamp"):
        read(tmp_path, {"input_length": 1, "timestamp": 0}, {"input_length": 1})
