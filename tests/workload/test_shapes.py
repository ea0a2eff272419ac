"""What a turn must be, and ids of blocks: the same in every run, unlike for unlike prefixes."""

import numpy as np
import pytest

from kappa_workload.shapes import (
    TurnShape,
    key_of,
    mixed,
    recorded_ids,
    salt_of,
    stream_ids,
    turn_of,
)

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


def test_shapes_share_no_hidden_equality():
    assert turn_of(0.0, 64, 1, IDS, 64) != turn_of(0.0, 64, 1, IDS, 64)
    assert IDS.dtype == np.uint64


def test_ids_do_not_change_between_versions():
    assert int(key_of("a", 1)) == 0xC13CD84A6BC18181
    assert stream_ids(key_of("a", 1), 0, 2).tolist() == [0xD1E388311AB60126, 0xC5DF270353EEF751]


def test_a_stream_can_be_read_in_pieces():
    key = key_of("text")
    whole = stream_ids(key, 0, 20)

    assert np.concatenate([stream_ids(key, 0, 7), stream_ids(key, 7, 20)]).tolist() == (
        whole.tolist()
    )
    assert len(stream_ids(key, 5, 3)) == 0
    assert whole.dtype == np.uint64


def test_names_of_keys_do_not_run_together():
    assert key_of("ab", "c") != key_of("a", "bc")


def test_streams_and_recorded_numbers_do_not_meet():
    ids = [stream_ids(key_of("text", number), 0, 100) for number in range(1000)]
    ids.append(recorded_ids(np.arange(100_000, dtype=np.uint64)))
    together = np.concatenate(ids)

    assert len(np.unique(together)) == len(together)


def test_ids_are_well_mixed():
    """Every bit is set in about half of the ids, for numbers that differ in their low bits only."""
    ids = mixed(np.arange(1, 20_001, dtype=np.uint64))
    for bit in range(64):
        share = float(((ids >> np.uint64(bit)) & np.uint64(1)).mean())
        assert 0.48 < share < 0.52


def test_copy_0_has_no_salt_and_no_two_copies_the_same():
    assert salt_of(0) == 0
    assert len({int(salt_of(copy)) for copy in range(1000)}) == 1000
