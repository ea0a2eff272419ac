"""NarrativeQA: many questions on one long document."""

import json

import polars as pl
import pytest

from kappa_workload.documents import MEAN_THINK_S
from kappa_workload.narrativeqa import read_narrativeqa
from kappa_workload.reading import ReadAs, WorkloadError
from tests.workload.checks import check_pauses, check_refused


def line(document="d", tokens=1000, question=20, **more):
    record = {"document_id": document, "doc_est_tokens": tokens, "question_tokens": question}
    return json.dumps({**record, **({"output_tokens": 9} | more)}) + "\n"


def written(tmp_path, *lines):
    path = tmp_path / "qaps.jsonl"
    path.write_text("".join(lines))
    return path


def documents(tmp_path, **est_tokens):
    path = tmp_path / "documents.parquet"
    words = dict.fromkeys(("set", "kind", "wiki_title", "wiki_url"), "")
    counts = dict.fromkeys(("story_word_count", "story_file_size"), 1)
    rows = [
        {"document_id": name, **words, **counts, "est_tokens": tokens}
        for name, tokens in est_tokens.items()
    ]
    pl.DataFrame(rows).write_parquet(path)
    return path


def test_questions_share_their_document_and_nothing_else(tmp_path):
    path = written(tmp_path, line(), line("e"), line(question=300), line(question=700))
    workload = read_narrativeqa(path, how=ReadAs(block_tokens=100))

    assert [len(session.turns) for session in workload.sessions] == [3, 1]
    turns = workload.sessions[0].turns
    assert [turn.input_tokens for turn in turns] == [1020, 1300, 1700]
    assert [len(turn.blocks) for turn in turns] == [10, 13, 17]
    assert [len(turn.kept_blocks) for turn in turns] == [10, 13, 17]
    shared = turns[0].blocks.tolist()
    assert turns[1].blocks[:10].tolist() == turns[2].blocks[:10].tolist() == shared
    assert not set(turns[1].blocks[10:].tolist()) & set(turns[2].blocks[10:].tolist())
    assert not set(workload.sessions[1].turns[0].blocks.tolist()) & set(shared)
    assert read_narrativeqa(path).block_tokens == 256


def test_the_length_of_answers_counts_and_not_their_text(tmp_path):
    def output_of(*answers):
        record = json.loads(line())
        del record["output_tokens"]
        path = written(tmp_path, json.dumps({**record, "answers": answers}))
        return read_narrativeqa(path).sessions[0].turns[0].output_tokens

    assert output_of("one two three four", "one two three four five six") == 7  # 1.3 times 5
    assert output_of("yes", "no") == 4
    assert output_of("", "") == 4


def test_a_table_of_documents_gives_the_lengths(tmp_path):
    path = written(tmp_path, line(tokens=5), line("e", tokens=5))
    workload = read_narrativeqa(path, documents(tmp_path, d=700, e=800, f=900))

    assert [s.turns[0].input_tokens for s in workload.sessions] == [720, 820]
    assert workload.notes == ("1 of 3 documents have no question",)
    with pytest.raises(WorkloadError, match=r"qaps.jsonl:2: document e is not in the table"):
        read_narrativeqa(path, documents(tmp_path, d=700))
    with pytest.raises(WorkloadError, match=r"documents.parquet: row 2: .*est_tokens"):
        read_narrativeqa(path, documents(tmp_path, d=700, e=0))


def test_pauses_are_drawn_from_the_seed(tmp_path):
    path = written(tmp_path, *(line(f"d{k % 40}") for k in range(1000)))
    check_pauses(read_narrativeqa, path, MEAN_THINK_S)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("no", "not JSON"),
        ("[]", "Expected `object`, got `array`"),
        (line(document=5), "Expected `str`, got `int` - at `$.document_id`"),
        (line("e", tokens=0), "Expected `int` >= 1 - at `$.doc_est_tokens`"),
        (line("e", tokens="x"), "got `str` - at `$.doc_est_tokens`"),
        (line(question=-3), "Expected `int` >= 1 - at `$.question_tokens`"),
        (line(output_tokens=0), "Expected `int` >= 1 - at `$.output_tokens`"),
        (line(tokens=999), "document d has 999 tokens here and 1000 in an earlier line"),
        (line(output_tokens=None), "fields 'output_tokens' and 'answers' are missing: give one"),
        (line(answers=[1]), "Expected `str`, got `int` - at `$.answers[0]`"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path, bad, reason):
    path = written(tmp_path, line(), bad)
    check_refused(read_narrativeqa, path, ":2: ", reason)


def with_texts(tmp_path, *summaries, question="WHO ?"):
    asked = {"document_id": "d", "doc_est_tokens": 60, "question_tokens": 5, "output_tokens": 4}
    path = tmp_path / "qaps.jsonl"
    path.write_text(json.dumps(asked | ({"question": question} if question else {})))
    told = tmp_path / "summaries.jsonl"
    told.write_text("\n".join(summaries))
    return path, told


SUMMARY = json.dumps({"document_id": "d", "summary_tokenized": "A tale . ", "summary_tokens": 10})


def test_questions_with_summaries_have_texts(tmp_path):
    path, told = with_texts(tmp_path, SUMMARY)
    workload = read_narrativeqa(path, summaries=told)
    summary, words, question = workload.texts.messages(0, 0, 0)[0]["content"].split("\n\n")
    assert (summary, len(words.split()), question) == ("A tale .", 50, "WHO ?")
    assert "CC-BY-SA" in workload.source
    assert any("bodies are not in the source" in note for note in workload.notes)
    assert workload.sessions[0].document_tokens == 60
    assert workload.sessions[0].turns[0].new_tokens == 5


def test_lengths_alone_have_no_texts(tmp_path):
    path, told = with_texts(tmp_path, SUMMARY, question="")
    assert read_narrativeqa(path, summaries=told).texts is None
    path, _ = with_texts(tmp_path, SUMMARY)
    assert read_narrativeqa(path).texts is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "summaries.jsonl:2: not JSON"),
        ("{}", "summaries.jsonl:2: Object missing required field `document_id`"),
        ('{"document_id": "d", "summary_tokenized": "x"}', "missing required field `summary_to"),
    ],
)
def test_bad_summaries_name_file_line_and_field(tmp_path, line, reason):
    path, told = with_texts(tmp_path, SUMMARY, line)
    with pytest.raises(WorkloadError, match=reason):
        read_narrativeqa(path, summaries=told)


def test_documents_are_whole_without_a_limit(tmp_path):
    path, _ = with_texts(tmp_path, SUMMARY)
    for limit, tokens in ((30, 21), (None, 60)):
        (session,) = read_narrativeqa(path, how=ReadAs(max_context_tokens=limit)).sessions
        assert session.document_tokens == tokens
