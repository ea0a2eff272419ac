"""Reading recorded sessions, and what the shipped ones must look like."""

import gzip
import json
from pathlib import Path

import pytest

from kappa_workload.reading import WorkloadError
from kappa_workload.sessions import (
    Session,
    Turn,
    as_messages,
    demo_sessions_path,
    read_sessions,
)
from tests.workload.checks import check_refused


def line(session="a", t_s=0.0, **fields):
    record = {"session": session, "t_s": t_s, "input": "in", "output": "out", **fields}
    return json.dumps(record) + "\n"


@pytest.fixture(scope="module")
def demo() -> list[Session]:
    return read_sessions(demo_sessions_path())


def test_sessions_are_grouped_in_order_of_their_first_line(tmp_path):
    path = tmp_path / "sessions.jsonl"
    path.write_text(line("b") + line("a", 1) + "\n" + line("b", 2.5, input="more"))

    assert read_sessions(path) == [
        Session("b", (Turn(0.0, "in", "out"), Turn(2.5, "more", "out"))),
        Session("a", (Turn(1.0, "in", "out"),)),
    ]


def test_plain_and_gzipped_files_read_alike(tmp_path):
    text = line() + line(t_s=1, input="ünïcode")
    plain, zipped = tmp_path / "s.jsonl", tmp_path / "s.jsonl.gz"
    plain.write_text(text, encoding="utf-8")
    zipped.write_bytes(gzip.compress(text.encode()))

    assert read_sessions(str(plain)) == read_sessions(zipped)


@pytest.mark.parametrize(
    ("second_line", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1]", "Expected `object`, got `array`"),
        (line(session=7), "Expected `str`, got `int` - at `$.session`"),
        ('{"session": "a", "t_s": 1, "output": ""}', "missing required field `input`"),
        (line(t_s="soon"), "Expected `float`, got `str` - at `$.t_s`"),
        (line(t_s=float("nan")), "not JSON"),
        (line(t_s=True), "Expected `float`, got `bool` - at `$.t_s`"),
        (line(t_s=-1), "Expected `float` >= 0.0 - at `$.t_s`"),
        (line(t_s=4), "t_s 4.0 is before the previous turn's 5.0"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path, second_line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_text(line(t_s=5) + second_line)

    check_refused(read_sessions, path, ":2: ", reason)


def test_absent_empty_and_damaged_files_are_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(line().encode() * 50)[:-12])
    not_gzip = tmp_path / "plain.jsonl.gz"
    not_gzip.write_text(line())
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")

    for path in (tmp_path / "absent.jsonl", empty, cut, not_gzip, binary):
        with pytest.raises(WorkloadError, match=path.name):
            read_sessions(path)


def test_an_unknown_format_is_one_user_message():
    turn = Turn(0.0, "hello\n\nworld", "hi")

    assert as_messages(turn) == [{"role": "user", "content": "hello\n\nworld"}]
    assert as_messages(turn, ["unused"]) == as_messages(turn)


def test_shipped_sessions_are_small_and_nest(demo):
    assert demo_sessions_path().stat().st_size <= 150_000
    assert len(demo) == 8
    assert len({session.turns[0].input_text for session in demo}) == 8
    for session in demo:
        assert len(session.turns) == 6
        assert session.turns[0].t_s == 0
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.input_text.startswith(before.input_text)
            assert len(after.input_text) > len(before.input_text)


def test_shipped_turns_split_into_messages_extending_each_other(demo):
    for session in demo:
        for index, turn in enumerate(session.turns):
            messages = as_messages(turn)
            assert "\n\n".join(message["content"] for message in messages) == turn.input_text
            assert len(messages) == index + 1
            if index:
                assert messages[:index] == as_messages(session.turns[index - 1])


def test_replies_give_alternating_roles_that_still_extend(demo):
    session = demo[0]
    replies = [turn.output_text for turn in session.turns]
    before: list[dict[str, str]] = []
    for index, turn in enumerate(session.turns):
        messages = as_messages(turn, replies)
        assert [message["role"] for message in messages[::2]] == ["user"] * (index + 1)
        assert [message["role"] for message in messages[1::2]] == ["assistant"] * index
        assert messages[: len(before)] == before
        before = messages


def test_the_data_folder_states_source_and_licence():
    readme = Path(demo_sessions_path()).with_name("README.md").read_text(encoding="utf-8")
    assert "lmcache-agent-trace" in readme
    assert "Apache-2.0" in readme
