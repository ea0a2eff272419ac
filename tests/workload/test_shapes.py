"""What a turn must be."""

import numpy as np
import pytest

from workload.block_ids import key_of, stream_ids
from workload.shapes import MOST_TOKENS, TurnShape, require_tokens, turn_of

IDS = stream_ids(key_of("a"), 0, 10)


def test_a_turn_has_its_full_blocks_only():
    turn = turn_of(1.5, 130, 100, IDS, 64)

    assert turn.blocks.tolist() == IDS[:2].tolist()
    assert turn.kept_blocks.tolist() == IDS[:3].tolist()


def test_an_output_of_nothing_counts_as_one_token():
    turn = turn_of(0.0, 63, 0, IDS, 64)

    assert turn.output_tokens == 1
    assert len(turn.blocks) == 0
    assert len(turn.kept_blocks) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"after_s": -1.0}, "after_s is -1.0"),
        ({"after_s": float("nan")}, "after_s is nan"),
        ({"input_tokens": 0}, "0 input"),
        ({"output_tokens": 0}, "0 output"),
        ({"kept_blocks": IDS[:0]}, "kept_blocks must begin with blocks"),
    ],
)
def test_a_turn_that_nobody_could_serve_is_refused(change, reason):
    good = {
        "after_s": 0.0,
        "input_tokens": 64,
        "output_tokens": 1,
        "blocks": IDS[:1],
        "kept_blocks": IDS[:1],
    }
    TurnShape(**good)
    with pytest.raises(ValueError, match=reason):
        TurnShape(**{**good, **change})


def test_lengths_have_a_least_and_a_most():
    assert require_tokens("it", MOST_TOKENS, least=1) == MOST_TOKENS
    with pytest.raises(ValueError, match="it must be at least 1, found 0"):
        require_tokens("it", 0, least=1)
    with pytest.raises(ValueError, match="it must be at most"):
        require_tokens("it", MOST_TOKENS + 1)


def test_shapes_share_no_hidden_equality():
    assert turn_of(0.0, 64, 1, IDS, 64) != turn_of(0.0, 64, 1, IDS, 64)
    assert IDS.dtype == np.uint64
