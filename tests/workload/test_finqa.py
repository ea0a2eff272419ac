"""FinQA: lengths of filings and questions, and ConvFinQA's items with texts."""

import gzip
import json

import polars as pl
import pytest

from kappa_workload.analysis import source_ratios
from kappa_workload.catalogue import workload_named
from kappa_workload.finqa import (
    OUTPUT_TOKENS,
    QUESTIONS_PER_FILING,
    read_convfinqa,
    read_finqa,
)
from kappa_workload.reading import ReadAs, WorkloadError


def filings(tmp_path, *lengths, name="filings.parquet"):
    path = tmp_path / name
    rows = [
        {"doc_name": f"CO{number}_2020_10K", "pdf_bytes": 1, "pages": 1, "words": 1,
         "llama2_tokens": tokens}
        for number, tokens in enumerate(lengths)
    ]  # fmt: skip
    pl.DataFrame(rows).write_parquet(path)
    return path


def questions(tmp_path, *lengths, name="finqa_questions.parquet"):
    path = tmp_path / name
    pl.DataFrame({"question_tokens": list(lengths)}).write_parquet(path)
    return path


def item(number=1, asked=("what is the net change?", "what percentage is this?")):
    return {
        "id": f"Single_{number}",
        "pre_text": ["revenue grew .", "the table says more ."],
        "table": [["", "2008", "2009"], ["masco", "$ 55.78", "$ 71.52"]],
        "post_text": ["no shares since march ."],
        "annotation": {"dialogue_break": list(asked)},
    }


def lines(tmp_path, *items, name="convfinqa.jsonl"):
    path = tmp_path / name
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in items)
    )
    return path


def test_each_filing_is_dealt_its_questions(tmp_path):
    asked = questions(tmp_path, *range(10, 40))
    workload = read_finqa(filings(tmp_path, 1000, 2000, 700), asked, how=ReadAs(block_tokens=100))

    assert [session.document_tokens for session in workload.sessions] == [1000, 2000, 700]
    for session in workload.sessions:
        assert len(session.turns) == QUESTIONS_PER_FILING
        for turn in session.turns:
            assert turn.input_tokens == session.document_tokens + turn.new_tokens
            assert turn.output_tokens == OUTPUT_TOKENS
    dealt = sorted(turn.new_tokens for s in workload.sessions for turn in s.turns)
    assert len(set(dealt)) == 27  # no question twice while there are enough
    again = read_finqa(filings(tmp_path, 1000, 2000, 700), asked, how=ReadAs(block_tokens=100))
    assert [t.new_tokens for t in again.sessions[0].turns] == [
        t.new_tokens for t in workload.sessions[0].turns
    ]


def test_readers_of_a_filing_share_it_and_vary_the_order(tmp_path):
    paths = filings(tmp_path, 1000), questions(tmp_path, *range(10, 19))
    one, other = read_finqa(*paths, how=ReadAs(block_tokens=100, readers=2)).sessions
    assert one.turns[0].blocks[:10].tolist() == other.turns[0].blocks[:10].tolist()
    asked = [[turn.new_tokens for turn in session.turns] for session in (one, other)]
    assert asked[0] != asked[1]
    assert sorted(asked[0]) == sorted(asked[1]) == list(range(10, 19))


def test_bad_tables_name_file_row_and_column(tmp_path):
    good = filings(tmp_path, 1000)
    with pytest.raises(WorkloadError, match=r"questions.parquet: row 2: .*question_tokens"):
        read_finqa(good, questions(tmp_path, 5, 0))
    with pytest.raises(WorkloadError, match=r"missing columns \['question_tokens'\]"):
        read_finqa(good, good)
    twice = tmp_path / "twice.parquet"
    pl.concat([pl.read_parquet(good)] * 2).write_parquet(twice)
    with pytest.raises(WorkloadError, match=r"twice.parquet: row 2: CO0_2020_10K stands in an"):
        read_finqa(twice, questions(tmp_path, 5))


def test_convfinqa_page_becomes_a_chat_that_grows_by_a_question(tmp_path):
    workload = read_convfinqa(lines(tmp_path, item()), ReadAs(len, block_tokens=10))
    (session,) = workload.sessions
    chats = [workload.texts.messages(0, turn, 0) for turn in range(2)]
    texts = [message["content"] for (message,) in chats]

    assert [turn.input_tokens for turn in session.turns] == [len(text) for text in texts]
    assert "masco | $ 55.78 | $ 71.52" in texts[0]
    assert texts[0].endswith("\n\nwhat is the net change?")
    assert texts[1] == texts[0] + "\n\nwhat percentage is this?"
    shared = len(session.turns[0].blocks)
    assert session.turns[1].blocks[:shared].tolist() == session.turns[0].blocks.tolist()
    ratios = source_ratios(workload)
    assert ratios.new_tokens.tolist() == [25, 26]  # the question, and the blank line before it
    assert ratios.cached_tokens[1] == len(texts[0])


def test_the_layouts_are_found_out_by_name(tmp_path):
    packed = tmp_path / "any.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(item()).encode()))
    listed = tmp_path / "train.json"
    listed.write_text(json.dumps([item(1), item(2)]))
    for path, sessions in ((packed, 1), (listed, 2), (lines(tmp_path, item(), "", item(2)), 2)):
        workload = workload_named(str(path), ReadAs(len))
        assert (workload.name, len(workload.sessions)) == ("convfinqa", sessions)
    table = filings(tmp_path, 1000)
    questions(tmp_path, 20, name="finqa_question_lengths.parquet")
    assert workload_named(str(table)).name == "finqa"


def test_a_table_of_filings_needs_the_questions_beside_it(tmp_path):
    with pytest.raises(WorkloadError, match=r"finqa_question_lengths.parquet, are not beside it"):
        workload_named(str(filings(tmp_path, 1000)))
    with pytest.raises(WorkloadError, match="holds questions only: name the table of filings"):
        workload_named(str(questions(tmp_path, 5)))


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", r"convfinqa.jsonl:2: not JSON"),
        (item() | {"annotation": 3}, r":2: Expected `object`, got `int` - at `\$.annotation`"),
        (item(asked=()), r"`array` of length >= 1 - at `\$.annotation.dialogue_break`"),
        (item() | {"table": "x"}, r":2: Expected `array`, got `str` - at `\$.table`"),
        (item() | {"pre_text": [1]}, r":2: Expected `str`, got `int` - at `\$.pre_text\[0\]`"),
        ({k: v for k, v in item().items() if k != "id"}, r":2: Object missing required field `id`"),
    ],
)
def test_bad_items_name_file_line_and_what_was_expected(tmp_path, second, reason):
    with pytest.raises(WorkloadError, match=reason):
        workload_named(str(lines(tmp_path, item(), second)), ReadAs(len))


def test_bad_items_of_a_list_are_counted(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps([item(), 7]))
    with pytest.raises(WorkloadError, match=r"train.json: item 2: Expected `object`, got `int`"):
        workload_named(str(path), ReadAs(len))
