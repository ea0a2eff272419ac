"""How long streams are expected to be."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from router.pool_view import Outputs


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=700))
def test_the_typical_length_is_the_median_of_the_latest(lengths):
    outputs = Outputs()
    for seen, tokens in enumerate(lengths, 1):
        outputs.add(tokens)
        if seen % 50 == 0 or seen == len(lengths):
            assert outputs.typical == int(median(lengths[max(seen - 256, 0) : seen]))


def test_before_any_stream_ended_there_is_a_guess_within_what_was_asked_for():
    assert Outputs().guess(0) == 128
    assert Outputs().guess(3) == 3
