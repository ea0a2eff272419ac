"""ShareGPT: the table of turns, and the layout with the texts."""

import json

import polars as pl
import pytest

from kappa_workload.reading import ReadAs, WorkloadError
from kappa_workload.sharegpt import MEAN_THINK_S, read_sharegpt_table, read_sharegpt_texts
from tests.workload.checks import check_pauses, check_refused


def row(name="a", turn=0, cached=0, new=100, out=50, uncut=None):
    return {
        "conv_id": name,
        "split_offset_msgs": 0,
        "turn": turn,
        "cached_C": cached,
        "new_N": new,
        "out": out,
        "cached_C_unsplit_est": cached if uncut is None else uncut,
    }


def table(tmp_path, *rows):
    path = tmp_path / "turns.parquet"
    pl.DataFrame(list(rows)).write_parquet(path)
    return path


def texts(tmp_path, content):
    path = tmp_path / "sharegpt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def talk(name, *messages):
    return {"id": name, "conversations": [{"from": f, "value": v} for f, v in messages]}


def lengths(workload):
    return {s.id: [(t.input_tokens, t.output_tokens) for t in s.turns] for s in workload.sessions}


def test_prompt_begins_with_all_kept_of_the_previous_turn(tmp_path):
    path = table(
        tmp_path,
        row("a", 0, 0, 100, 50),
        row("b", 0, 30, 100, 0),
        row("a", 1, 150, 70, 40),
        row("b", 1, 130, 0, 7),
    )
    workload = read_sharegpt_table(path, ReadAs(block_tokens=20))

    assert lengths(workload) == {"a": [(100, 50), (220, 40)], "b": [(130, 1), (130, 7)]}
    first, second = workload.sessions[0].turns
    assert first.kept_blocks.tolist() == second.blocks[:7].tolist()
    assert len(second.blocks) == 11
    assert len(second.kept_blocks) == 13
    other = workload.sessions[1].turns[1].kept_blocks.tolist()
    assert not set(other) & set(second.kept_blocks.tolist())
    assert read_sharegpt_table(path).block_tokens == 64


def test_the_history_before_the_cut_can_be_put_in_front(tmp_path):
    path = table(tmp_path, row(cached=30, uncut=1000), row(turn=1, cached=180, uncut=1150))

    assert lengths(read_sharegpt_table(path)) == {"a": [(130, 50), (280, 50)]}
    whole = read_sharegpt_table(path, ReadAs(whole_history=True))
    assert lengths(whole) == {"a": [(1100, 50), (1250, 50)]}


def test_pauses_are_drawn_from_the_seed(tmp_path):
    rows = [row(f"c{k}", turn, 150 * turn) for k in range(300) for turn in range(4)]
    check_pauses(read_sharegpt_table, table(tmp_path, *rows), MEAN_THINK_S)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (row(turn=2, cached=150), "column 'turn' must be 1 for this conversation, found 2"),
        (row("b", turn=1), "column 'turn' must be 0"),
        (row("b", new=0), "make a prompt of 0 tokens, 0 with its history"),
        (row("b", out=-1), "Expected `int` >= 0 - at `$.out`"),
        (row("b", cached=1 << 24, new=9), "with its history: give 1 to 16777216"),
        (row("b", new=10**9), "Expected `int` <= 16777216 - at `$.new_N`"),
        (row("b", out=10**9), "<= 16777216 - at `$.out`"),
        (row(turn=1, cached=20), "make a prompt of 120 tokens, but the turn before left 150"),
        ({**row("b"), "conv_id": None}, "got `null` - at `$.conv_id`"),
    ],
)
def test_a_bad_row_is_named(tmp_path, second, reason):
    path = table(tmp_path, row(), second)
    check_refused(read_sharegpt_table, path, ": row 2: ", reason)


def test_texts_are_measured_and_accumulate(tmp_path):
    path = texts(
        tmp_path,
        [
            talk("a", ("human", "12345"), ("gpt", "123"), ("human", "1"), ("gpt", "")),
            talk("b", ("gpt", "12"), ("human", "1"), ("gpt", "1234")),
            talk("a", ("system", "123"), ("user", "1"), ("chatgpt", "12")),
            talk("only a greeting", ("gpt", "hello")),
            talk("empty"),
        ],
    )
    workload = read_sharegpt_texts(path, ReadAs(len, block_tokens=2))

    assert lengths(workload) == {
        "a/0": [(5, 3), (9, 1)],
        "b/1": [(3, 4)],
        "a/2": [(4, 2)],
    }
    assert workload.notes == ("2 of 5 conversations left out: no answer to anything",)
    first, second = workload.sessions[0].turns
    assert first.kept_blocks.tolist() == second.blocks.tolist()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[\n{"id": 1,\n oops}]', ":3: not JSON"),
        ("[" * 200_000, "nested too deep"),
        ({"id": "a"}, "expected a list: Expected `array`, got `object`"),
        ([], "holds no conversation with an answer"),
        ([talk("a", ("gpt", "x"))], "holds no conversation with an answer"),
        ([7], "item 1: Expected `object`, got `int`"),
        ([{"id": "a"}], "missing required field `conversations`"),
        ([{"id": "a", "conversations": ["x"]}], "got `str` - at `$.conversations[0]`"),
        ([talk(7, ("human", "x"))], "Expected `str`, got `int` - at `$.id`"),
        ([talk("a", ("human", 5))], "Expected `str`, got `int` - at `$.conversations[0].value`"),
        ([talk("a", ("nobody", "x"))], "Invalid enum value 'nobody'"),
    ],
)
def test_other_files_of_texts_are_refused(tmp_path, content, reason):
    path = texts(tmp_path, content)
    check_refused(lambda path: read_sharegpt_texts(path, ReadAs(len)), path, ":", reason)


def test_texts_become_chats_in_the_words_of_the_api(tmp_path):
    path = texts(
        tmp_path,
        [talk("a", ("system", "be brief"), ("human", "1+1?"), ("gpt", "2"), ("user", "sure?"),
              ("chatgpt", "yes"))],
    )  # fmt: skip
    workload = read_sharegpt_texts(path, ReadAs(len))
    roles = [message["role"] for message in workload.texts.messages(0, 1, 0)]
    assert roles == ["system", "user", "assistant", "user"]
    assert workload.texts.messages(0, 0, 0)[-1] == {"role": "user", "content": "1+1?"}
    assert [turn.new_tokens for turn in workload.sessions[0].turns] == [12, 5]


def test_no_more_conversations_are_read_than_asked_for(tmp_path):
    path = texts(tmp_path, [talk("a", ("human", "x"), ("gpt", "y")), talk("b", ("gpt", 7))])
    assert len(read_sharegpt_texts(path, ReadAs(len, limit=1)).sessions) == 1
    with pytest.raises(WorkloadError, match="item 2: Expected `str`"):
        read_sharegpt_texts(path, ReadAs(len))


def test_the_table_tells_what_is_new(tmp_path):
    workload = read_sharegpt_table(
        table(tmp_path, row("a", 0, 30, 100, 5)), ReadAs(whole_history=True)
    )
    assert workload.sessions[0].turns[0].new_tokens == 100
