"""Prompts made from block ids: shared exactly where the source shares."""

import numpy as np
import pytest

from kappa_workload.prompts import VOCABULARY, WORDS, filler, prompt_tokens, prompt_words
from kappa_workload.replay import copied
from kappa_workload.shapes import SessionShape, key_of, stream_ids, turn_of
from tests.workload.checks import document_session

SIZE = 16


def talk(name="talk", lengths=((40, 30, 40), (90, 10, 20), (130, 5, 30))):
    """A conversation of (prompt, output, new) tokens, each prompt of which repeats the last."""
    ids = stream_ids(key_of(name), 0, 20)
    turns = tuple(turn_of(0.0, *turn[:2], ids, SIZE, turn[2]) for turn in lengths)
    return SessionShape(name, turns)


def document(tokens=100, questions=(10, 20, 7)):
    return document_session(tokens, questions, SIZE)


def common(one, other):
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least


def test_prompt_has_its_turns_length_in_vocabulary_tokens():
    for session in (talk(), document()):
        for number, turn in enumerate(session.turns):
            tokens = prompt_tokens(session, number, SIZE)
            assert tokens.shape == (turn.input_tokens,)
            assert tokens.dtype == np.int32
            assert tokens.min() >= VOCABULARY.start and tokens.max() < VOCABULARY.stop
            assert (tokens == prompt_tokens(session, number, SIZE)).all()


def test_a_talk_repeats_itself_to_the_last_token():
    prompts = [prompt_tokens(talk(), turn, SIZE) for turn in range(3)]
    assert common(prompts[0], prompts[1]) == 40
    assert common(prompts[1], prompts[2]) == 90


def test_questions_share_exactly_their_documents_tokens():
    prompts = [prompt_tokens(document(), turn, SIZE) for turn in range(3)]
    assert common(prompts[0], prompts[1]) == common(prompts[1], prompts[2]) == 100


def test_a_copy_and_another_salt_share_nothing():
    for session in (talk(), document()):
        plain = prompt_tokens(session, 0, SIZE)
        assert common(plain, prompt_tokens(copied(session, 1), 0, SIZE)) < 3
        assert common(plain, prompt_tokens(session, 0, SIZE, salt=1)) < 3


def test_a_prompt_shorter_than_a_block_is_filled_too():
    ids = stream_ids(key_of("short"), 0, 0)
    one, other = (SessionShape(name, (turn_of(0.0, 5, 3, ids, SIZE, 5),)) for name in "ab")
    assert len(prompt_tokens(one, 0, SIZE)) == 5
    assert common(prompt_tokens(one, 0, SIZE), prompt_tokens(other, 0, SIZE)) < 3


def test_words_are_one_a_token_and_share_what_tokens_share():
    texts = [prompt_words(document(), turn, SIZE) for turn in range(2)]
    words = [text.split(" ") for text in texts]
    assert [len(each) for each in words] == [110, 120]
    assert set(words[0]) <= set(WORDS)
    assert words[0][:100] == words[1][:100]
    assert words[0][100:] != words[1][100:110]


def test_the_words_are_plain_and_all_different():
    assert len(set(WORDS)) == len(WORDS) > 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize("words", [0, 1, 256, 1000])
def test_filler_has_as_many_words_as_asked_and_begins_the_same(words):
    text = filler("a name", words)
    assert len(text.split()) == words
    assert filler("a name", 2000).startswith(text)
    assert words < 9 or not filler("another", 2000).startswith(text)
