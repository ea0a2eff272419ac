"""Workloads by name and by path."""

import gzip
import json
import shutil

import polars as pl
import pytest

from kappa_workload import arrivals
from kappa_workload.catalogue import BUILT_IN, arrivals_for, workload_named
from kappa_workload.reading import ReadAs, WorkloadError, estimated_tokens
from kappa_workload.sessions import demo_sessions_path

DATA = demo_sessions_path().parent


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_keep_the_contract_of_shapes(name):
    workload = workload_named(name)

    assert workload.name == name
    assert workload.source
    assert len({session.id for session in workload.sessions}) == len(workload.sessions)
    size = workload.block_tokens
    for session in workload.sessions:
        assert session.turns
        assert session.turns[0].after_s == 0
        for turn in session.turns:
            assert len(turn.blocks) == turn.input_tokens // size
            assert len(turn.kept_blocks) == (turn.input_tokens + turn.output_tokens) // size
            assert (turn.kept_blocks[: len(turn.blocks)] == turn.blocks).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_id_stands_for_one_prefix(name):
    """Wherever an id occurs, the id before it is the same."""
    before: dict[int, int] = {}
    for session in workload_named(name).sessions[:400]:
        for turn in session.turns[:10]:
            previous = 0
            for block in turn.kept_blocks.tolist():
                assert before.setdefault(block, previous) == previous
                previous = block


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_are_the_same_every_time(name):
    def fingerprint():
        return [
            (s.id, t.after_s, t.input_tokens, t.output_tokens, t.kept_blocks[-1:].tolist())
            for s in workload_named(name).sessions
            for t in s.turns
        ]

    assert fingerprint() == fingerprint()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("narrativeqa_lengths.jsonl.gz", "narrativeqa"),
        ("mooncake_conversation.jsonl.gz", "mooncake"),
        ("sharegpt_turns.parquet", "sharegpt"),
        ("miniswe_lengths.parquet", "miniswe"),
        ("miniswe_slice.jsonl.gz", "miniswe"),
        ("azure2023_conv.csv.gz", "azure"),
        ("finqa_filings.parquet", "finqa"),
    ],
)
def test_the_format_of_a_file_is_found_out(file, name, tmp_path):
    copy = tmp_path / f"renamed.{file.partition('.')[2]}"
    shutil.copy(DATA / file, copy)
    shutil.copy(DATA / "finqa_questions.parquet", tmp_path)
    assert workload_named(str(copy)).name == name


def test_plain_files_and_files_of_texts_are_found_out_too(tmp_path):
    plain = tmp_path / "plain.csv"
    plain.write_bytes(gzip.decompress((DATA / "azure2023_conv.csv.gz").read_bytes()))
    talk = {"id": "a", "conversations": [{"from": "human", "value": "abc"}] * 2}
    talk["conversations"][1] = {"from": "gpt", "value": "four"}
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([talk]))

    assert workload_named(str(plain)).name == "azure"
    assert workload_named(str(texts), ReadAs(len)).sessions[0].turns[0].input_tokens == 3
    assert workload_named(str(texts)).sessions[0].turns[0].input_tokens == 1


def test_a_table_of_documents_needs_the_questions_beside_it(tmp_path):
    path = tmp_path / "documents.parquet"
    columns = ["document_id", "set", "kind", "wiki_title", "wiki_url"]
    row = dict.fromkeys(columns, "d") | {
        "story_word_count": 1,
        "story_file_size": 1,
        "est_tokens": 500,
    }
    pl.DataFrame([row]).write_parquet(path)
    with pytest.raises(WorkloadError, match=r"the questions, qaps.jsonl.gz, are not beside it"):
        workload_named(str(path))

    question = {"document_id": "d", "question_tokens": 5, "output_tokens": 5}
    (tmp_path / "qaps.jsonl").write_text(json.dumps(question))
    assert workload_named(str(path)).sessions[0].turns[0].input_tokens == 505


def test_what_is_neither_a_name_nor_a_workload_is_refused(tmp_path):
    with pytest.raises(
        WorkloadError, match=r"no workload and no file 'moon': .* narrativeqa, moon"
    ):
        workload_named("moon")

    for name, content, reason in (
        ("a.txt", "x", "unknown ending"),
        ("a.jsonl", "\n", "holds no records"),
        ("a.jsonl", "\n{", "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"sound": 1}', "a.jsonl:1: no format has just the fields"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(WorkloadError, match=reason):
            workload_named(str(path))

    path = tmp_path / "a.parquet"
    pl.DataFrame({"x": [1]}).write_parquet(path)
    with pytest.raises(WorkloadError, match="no format has just the columns"):
        workload_named(str(path))
    with pytest.raises(WorkloadError, match="rates of arrivals, no requests"):
        workload_named(str(DATA / "servegen_day_rates.parquet"))


def test_azure_arrives_in_bursts_and_all_others_at_random():
    assert arrivals_for("azure").func is arrivals.servegen
    for name in set(BUILT_IN) - {"azure"}:
        assert arrivals_for(name) is arrivals.poisson


def test_an_estimated_length_grows_with_the_text():
    assert estimated_tokens("") == 0
    assert estimated_tokens("a") == 1
    assert estimated_tokens("a" * 307) == 100


def test_how_a_workload_is_read_can_be_chosen():
    assert workload_named("sharegpt", ReadAs(block_tokens=16)).block_tokens == 16
    assert workload_named("narrativeqa", ReadAs(block_tokens=16)).block_tokens == 256

    def longest_document(most):
        workload = workload_named("finqa", ReadAs(max_context_tokens=most))
        return max(session.document_tokens for session in workload.sessions)

    assert longest_document(None) == 615_860
    assert longest_document(10_000) < 10_000
    for name in ("narrativeqa", "finqa"):
        several, one = workload_named(name), workload_named(name, ReadAs(readers=1))
        assert len(several.sessions) > len(one.sessions)
    longest = [
        max(
            t.input_tokens
            for s in workload_named("sharegpt", ReadAs(whole_history=whole)).sessions
            for t in s.turns
        )
        for whole in (False, True)
    ]
    assert longest[0] < 10_000 < longest[1]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="is a folder: name the file in it"):
        workload_named(str(tmp_path))
