"""What an endless cache holds of a prompt."""

import numpy as np
import pytest

from workload.block_ids import key_of, stream_ids
from workload.reuse import Reuse, matched_blocks
from workload.shapes import SessionShape, turn_of

IDS = stream_ids(key_of("talk"), 0, 20)


def session(*turns, document_tokens=0, size=100, ids=IDS, name="s"):
    made = tuple(turn_of(0.0, *turn, ids, size, None) for turn in turns)
    return SessionShape(name, made, document_tokens=document_tokens)


def played(reuse, one):
    cached = []
    for number in range(len(one.turns)):
        cached.append(reuse.cached_tokens(one, number))
        reuse.note(one, number)
    return cached


def test_whole_blocks_of_earlier_prompts_are_held_and_the_last_token_never_is():
    talk = session((250, 10), (300, 10), (300, 10))
    assert played(Reuse(100, 100, outputs_kept=False), talk) == [0, 200, 200]


def test_answers_are_held_if_they_are_kept():
    talk = session((250, 150), (520, 10))
    assert played(Reuse(100, 100, outputs_kept=False), talk) == [0, 200]
    assert played(Reuse(100, 100, outputs_kept=True), talk) == [0, 400]


def test_smaller_blocks_hold_what_a_prompt_fills_in_part():
    talk = session((250, 60), (520, 90), (610, 10))
    assert played(Reuse(100, 16, outputs_kept=False), talk) == [0, 240, 512]
    untold = session((250, 10), (520, 10))  # nothing says how the first prompt goes on
    assert played(Reuse(100, 16, outputs_kept=False), untold) == [0, 192]


def test_a_document_is_held_to_its_last_full_block():
    shared = IDS[:10]
    own = [np.concatenate([shared, stream_ids(key_of("q", n), 10, 14)]) for n in range(2)]
    readers = [
        session((1080, 5), document_tokens=1060, ids=ids, name=str(n)) for n, ids in enumerate(own)
    ]
    reuse = Reuse(100, 16, outputs_kept=False)
    assert [played(reuse, reader) for reader in readers] == [[0], [1056]]


def test_another_text_shares_nothing():
    reuse = Reuse(100, 16, outputs_kept=True)
    assert played(reuse, session((400, 100))) == [0]
    assert played(reuse, session((400, 100), ids=stream_ids(key_of("other"), 0, 9))) == [0]


@pytest.mark.parametrize("known", range(6))
def test_matching_finds_the_longest_known_prefix(known):
    assert matched_blocks(IDS[:5], {int(block) for block in IDS[:known]}) == known


def test_a_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block_tokens is 0"):
        Reuse(100, 0, outputs_kept=True)
