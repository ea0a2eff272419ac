"""Texts as chats, and documents without their bodies at hand."""

from kappa_workload.documents import Question
from kappa_workload.narrativeqa import document_texts
from kappa_workload.prompts import WORDS
from kappa_workload.shapes import Texts, of_user

TALK = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye"},
)


def documents():
    asked = (
        (Question("d", 100, 5, 3, "who?"), Question("d", 100, 5, 3, "where?")),
        (Question("e", 50, 5, 3, "when?"),),
    )
    return document_texts(asked, [100, 50], {"d": ("a tale of two", 6)})


def test_a_turn_sends_what_was_said_before_it():
    talks = Texts(lambda session, turn: TALK[: (1, 3)[turn]])
    assert talks.messages(0, 0, 0) == TALK[:1]
    assert talks.messages(0, 1, 0) == TALK


def test_a_copy_begins_with_its_number_and_leaves_the_text_alone():
    talks = Texts(lambda session, turn: TALK[: (1, 3)[turn]])
    assert talks.messages(0, 1, 7) == ({"role": "user", "content": "7 hello"}, *TALK[1:])
    assert TALK[0]["content"] == "hello"
    prompts = Texts(lambda session, turn: of_user(f"{session} {turn}"))
    assert prompts.messages(3, 4, 0) == ({"role": "user", "content": "3 4"},)
    assert prompts.messages(3, 4, 1)[0]["content"] == "1 3 4"


def test_document_is_its_summary_and_words_up_to_its_length():
    summary, words, question = documents().messages(0, 0, 0)[0]["content"].split("\n\n")
    assert summary == "a tale of two"
    assert len(words.split()) == 94
    assert set(words.split()) <= set(WORDS)
    assert question == "who?"


def test_every_question_comes_with_the_same_document():
    texts = [documents().messages(0, turn, 0)[0]["content"] for turn in range(2)]
    assert texts[0].removesuffix("who?") == texts[1].removesuffix("where?")


def test_a_document_without_a_summary_is_words():
    words, question = documents().messages(1, 0, 0)[0]["content"].split("\n\n")
    assert (len(words.split()), question) == (50, "when?")
