"""Sessions of readers who ask about one document."""

from pathlib import Path

import pytest

from kappa_workload.documents import Question, document_sessions
from kappa_workload.reading import ReadAs, WorkloadError

ASKED = {
    "d": [Question("d", 500, tokens, 8) for tokens in (10, 20, 30)],
    "e": [Question("e", 90, 10, 8)],
}


def sessions(**reading):
    return document_sessions("toy", Path("file"), ASKED, ReadAs(block_tokens=100, **reading))


def test_every_prompt_is_the_document_and_one_question():
    read = sessions()
    assert [s.id for s in read.sessions] == ["d/0", "e/0"]
    turns = read.sessions[0].turns
    assert [turn.input_tokens for turn in turns] == [510, 520, 530]
    assert [turn.new_tokens for turn in turns] == [10, 20, 30]
    assert len({tuple(turn.blocks.tolist()) for turn in turns}) == 1
    assert turns[0].after_s == 0.0 < turns[1].after_s


def test_readers_begin_with_different_questions_of_a_document():
    read = sessions(readers=3)
    assert [[q.tokens for q in asked] for asked in read.questions[:3]] == [
        [10, 20, 30],
        [20, 30, 10],
        [30, 10, 20],
    ]
    for session, asked in zip(read.sessions, read.questions, strict=True):
        assert [turn.new_tokens for turn in session.turns] == [q.tokens for q in asked]


def test_document_is_cut_so_that_its_longest_question_fits():
    read = sessions(max_context_tokens=300)
    assert [s.document_tokens for s in read.sessions] == [300 - 30 - 8, 90]
    assert read.notes == ["1 of 2 documents cut to 300 tokens"]
    assert sessions(max_context_tokens=None).notes == []
    with pytest.raises(WorkloadError, match="file: a question on document d takes 38 tokens"):
        sessions(max_context_tokens=38)


@pytest.mark.parametrize("wrong", [{"readers": 0}, {"block_tokens": 0}])
def test_nobody_reads_nothing(wrong):
    with pytest.raises(ValueError, match="give at least 1"):
        ReadAs(**({"block_tokens": 100} | wrong))
