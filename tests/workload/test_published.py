"""Data sets as their authors publish them: found out by their columns, whole or refused."""

import csv
import json

import polars as pl
import pytest

from kappa_workload.analysis import analyse
from kappa_workload.catalogue import workload_named
from kappa_workload.published import FORMATS, format_of
from kappa_workload.reading import ReadAs, WorkloadError

DOCUMENTS = (
    "document_id,set,kind,story_url,story_file_size,wiki_url,wiki_title,story_word_count,"
    "story_start,story_end"
)
QUESTIONS = (
    "document_id,set,question,answer1,answer2,question_tokenized,answer1_tokenized,"
    "answer2_tokenized"
)


def write_csv(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return path


def repository(folder, documents=("a", "b"), questions=("a", "a", "b")):
    """NarrativeQA's two files: stories of 100 bytes and 1,000 words; questions of nine letters."""
    write_csv(
        folder / "documents.csv",
        DOCUMENTS,
        [[d, "test", "movie", "u", 100, "w", "t, it", 1000, "s", "e"] for d in documents],
    )
    rows = [[d, "test", "who is it", "one two", "three", "who", "1", "3"] for d in questions]
    return write_csv(folder / "qaps.csv", QUESTIONS, rows)


def test_narrativeqas_repository_is_read_by_its_lengths(tmp_path):
    path = repository(tmp_path)
    for name in (tmp_path, path, tmp_path / "documents.csv"):
        workload = workload_named(str(name), ReadAs(len))
        assert (workload.name, workload.built_in) == ("narrativeqa", False)
        assert [s.document_tokens for s in workload.sessions] == [1268, 1268]
        assert [[t.new_tokens for t in s.turns] for s in workload.sessions] == [[9, 9], [9]]
        assert workload.sessions[0].turns[0].output_tokens == 4
    assert workload.notes[0].startswith("2 of 2 stories are not in")
    story, question = workload.texts.messages(0, 0, 0)[0]["content"].split("\n\n")
    assert (len(story.split()), question) == (1268, "who is it")


def test_stories_that_were_fetched_are_sent(tmp_path):
    path, stories = repository(tmp_path), tmp_path / "tmp"
    stories.mkdir()
    (stories / "a.content").write_text("x" * 100)
    (stories / "b.content").write_text("x" * 50)
    workload = workload_named(str(path), ReadAs(len))
    assert [s.document_tokens for s in workload.sessions] == [100, 1268]
    assert workload.texts.messages(0, 1, 0)[0]["content"] == "x" * 100 + "\n\nwho is it"
    assert "b.content: 50 of 100 bytes: cut short, not used" in workload.notes[0]
    assert workload.notes[1].startswith("1 of 2 stories are not in")


def test_a_story_is_cut_with_its_tokens(tmp_path):
    path, stories = repository(tmp_path, ("a",), ("a",)), tmp_path / "tmp"
    stories.mkdir()
    (stories / "a.content").write_text("x" * 100)
    workload = workload_named(str(path), ReadAs(len, max_context_tokens=60))
    tokens = workload.sessions[0].document_tokens
    assert tokens == 60 - 9 - 4
    assert workload.texts.messages(0, 0, 0)[0]["content"] == "x" * tokens + "\n\nwho is it"


def test_the_papers_figures_stand_beside_a_file_of_its_data(tmp_path):
    found = analyse(workload_named(str(repository(tmp_path)), ReadAs(len)), None, {})
    assert not found["built_in"] and not found["why_ours_differ"]
    assert [row["paper"] for row in found["paper"] if row["quantity"] == "kappa"] == [
        2_400, 5_000, 11_000,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("documents", "questions", "reason"),
    [
        ("ab", "a", r"qaps.csv: has 1 questions on 1 of the 2 documents of documents.csv: it is"),
        ("a", "ab", r"qaps.csv:3: document b is not among the 1 of documents.csv"),
        ("aa", "a", r"documents.csv:3: a stands in an earlier row, too"),
        ("", "a", r"documents.csv: holds no records"),
        (map(str, range(355)), map(str, range(355)), r"355 of the 10,557 published .* 'test'"),
    ],
)
def test_narrativeqas_files_must_be_whole(tmp_path, documents, questions, reason):
    path = repository(tmp_path, list(documents), list(questions))
    with pytest.raises(WorkloadError, match=reason):
        workload_named(str(path))


def test_a_csv_file_cut_in_half_says_so(tmp_path):
    path = repository(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(WorkloadError, match=r"qaps.csv:4: has 4 of 8 columns: .* fetch it again"):
        workload_named(str(path))
    path.unlink()
    with pytest.raises(WorkloadError, match=r"qaps.csv is not there, beside documents.csv: fetch"):
        workload_named(str(tmp_path / "documents.csv"))


STORY = {"id": "d", "kind": "movie", "text": "a story", "summary": {"text": "s"}}
RECORDS = {
    "narrativeqa": {
        "document": STORY, "question": {"text": "who?", "tokens": ["who"]},
        "answers": [{"text": "he"}, {"text": "she"}],
    },
    "finqa": {"Context": "a filing", "Question": "how much?", "Program": "", "Answer": 5.5},
    "finqa-pages": {
        "id": "x-1", "filename": "x", "pre_text": ["before"], "table": [["y", 1]],
        "post_text": ["after"], "qa": {"question": "how much?", "answer": "5"},
    },
    "longbench": {"context": "a text", "input": "who?", "answers": ["he"], "dataset": "qasper"},
    "loogle": {"input": "a text", "title": "t", "qa_pairs": "[{'Q': 'who?', 'A': 'he'}]"},
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_published_record_is_known_by_its_columns(tmp_path, name):
    record = RECORDS[name]
    lines, listed = tmp_path / "x.jsonl", tmp_path / "x.json"
    lines.write_text(json.dumps(record) + "\n" + json.dumps(record))
    listed.write_text(json.dumps([record, record]))
    for path in (lines, listed):
        workload = workload_named(str(path), ReadAs(len))
        assert (workload.name, len(workload.sessions)) == (name, 1)
        assert len(workload.sessions[0].turns) == 2
        assert path.name in workload.source or name != "narrativeqa"
        (message,) = workload.texts.messages(0, 0, 0)
        assert message["content"].endswith("?")
        assert workload.sessions[0].document_tokens == len(message["content"].rpartition("\n\n")[0])
    assert len(workload_named(str(lines), ReadAs(len, limit=1)).sessions[0].turns) == 1


def test_a_published_table_is_read_row_by_row(tmp_path):
    row = RECORDS["narrativeqa"]
    for number in range(2):
        path = tmp_path / f"test-0000{number}-of-00002.parquet"
        pl.DataFrame([row] * 100).write_parquet(path)
    for name, turns in ((path, 100), (tmp_path, 200)):
        workload = workload_named(str(name), ReadAs(len))
        assert [len(session.turns) for session in workload.sessions] == [turns]
    assert workload.source == "NarrativeQA as on the hub, test-00000-of-00002.parquet and 1 more"
    path.rename(tmp_path / "test-00002-of-00003.parquet")
    (tmp_path / "test-00000-of-00002.parquet").rename(tmp_path / "test-00000-of-00003.parquet")
    with pytest.raises(WorkloadError, match=r"has 2 of the 3 files of 'test', numbers 1 are not"):
        workload_named(str(tmp_path))


def test_half_a_table_and_half_a_list_are_refused(tmp_path):
    table, listed = tmp_path / "a.parquet", tmp_path / "a.json"
    pl.DataFrame([RECORDS["narrativeqa"]] * 9).write_parquet(table)
    table.write_bytes(table.read_bytes()[:-50])
    listed.write_text(json.dumps([RECORDS["finqa"]] * 9)[:-50])
    for path, reason in (
        (table, r"of [\d,]+ bytes: if it is cut short, fetch it again"),
        (listed, r"in [\d,]+ bytes: the file is cut short, fetch it again"),
    ):
        with pytest.raises(WorkloadError, match=reason):
            workload_named(str(path))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"document": {}, "question": {}}', r"lacks \['answers'\] of its columns"),
        ("a.json", '[{"Context": "x", "Question": "y"}]', r"item 1: looks like DocFinQA, but lack"),
        ("a.csv", "document_id,set,question,answer\n1,2,3,4\n", r"NarrativeQA's qaps.csv, but lac"),
        ("a.csv", "x,y\n1,2\n", r"no format has just the columns \['x', 'y'\]"),
        ("a.jsonl", '{"session": "", "input": "", "output": ""}', "recorded sessions, but lacks"),
        ("a.jsonl", '{"input": "x", "qa_pairs": "(1"}', "field 'qa_pairs' is no list of pairs"),
        ("a.jsonl", '{"input": "x", "qa_pairs": "none"}', "holds no question on a document"),
        ("a.jsonl", '{"input": "x", "qa_pairs": "[3]"}', "a.jsonl:1: Expected `object`, got `int`"),
    ],
)  # fmt: skip
def test_nearly_a_format_is_told_what_lacks(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(WorkloadError, match=reason):
        workload_named(str(path))


def test_a_nearly_published_table_is_told_what_lacks(tmp_path):
    path = tmp_path / "a.parquet"
    pl.DataFrame({"context": ["x"], "answers": [["y"]]}).write_parquet(path)
    with pytest.raises(WorkloadError, match=r"looks like LongBench, but lacks \['input'\]"):
        workload_named(str(path))


def test_no_format_hides_another():
    assert [format_of(form.fields) for form in FORMATS] == list(FORMATS)


def test_a_users_table_is_not_described_as_ours(tmp_path):
    path = tmp_path / "mine.parquet"
    row = {"conv_id": "a", "split_offset_msgs": 0, "turn": 0, "cached_C": 0, "new_N": 5, "out": 5,
           "cached_C_unsplit_est": 0}  # fmt: skip
    pl.DataFrame([row]).write_parquet(path)
    assert workload_named(str(path)).source == "lengths in the layout of ShareGPT, mine.parquet"
