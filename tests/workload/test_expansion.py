"""More sessions from the same shapes."""

from itertools import islice

import pytest

from workload.block_ids import key_of, stream_ids
from workload.expansion import expand
from workload.shapes import SessionShape, Workload, turn_of

SESSIONS = 20


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Twenty sessions of two turns that share their first two blocks."""
    shared = stream_ids(key_of("shared"), 0, 2)
    sessions = []
    for number in range(SESSIONS):
        own = stream_ids(key_of("own", number), 2, 8)
        ids = [*shared, *own]
        text = stream_ids(key_of("x"), 0, 8)
        text[:] = ids
        turns = (turn_of(0.0, 40, 5, text, 10), turn_of(3.0, 60, 15, text, 10))
        sessions.append(SessionShape(f"s{number}", turns, tenant="t"))
    return Workload("toy", 10, tuple(sessions), "made up")


def copies(workload, count, seed=0):
    sessions = list(islice(expand(workload, seed), count * SESSIONS))
    return [sessions[k * SESSIONS : (k + 1) * SESSIONS] for k in range(count)]


def blocks_of(sessions):
    return {int(block) for s in sessions for t in s.turns for block in t.kept_blocks}


def test_the_first_copy_is_the_workload_itself_in_another_order(workload):
    (first,) = copies(workload, 1)

    assert [s.id for s in first] != [s.id for s in workload.sessions]
    assert sorted(s.id for s in first) == sorted(s.id for s in workload.sessions)
    assert blocks_of(first) == blocks_of(workload.sessions)


def test_copies_share_nothing_with_one_another_and_everything_within(workload):
    groups = copies(workload, 5)

    sets = [blocks_of(group) for group in groups]
    assert len(set().union(*sets)) == sum(len(blocks) for blocks in sets)
    for group, blocks in zip(groups, sets, strict=True):
        assert len(blocks) == 2 + 5 * SESSIONS
        assert len({tuple(s.turns[0].blocks[:2].tolist()) for s in group}) == 1
        for session in group:
            first, second = session.turns
            assert second.kept_blocks[:4].tolist() == first.kept_blocks.tolist()
            assert first.kept_blocks[:4].tolist() == first.blocks.tolist()


def test_copies_keep_lengths_pauses_and_tenants(workload):
    by_id = {s.id: s for s in workload.sessions}
    third = copies(workload, 3)[2]

    assert len({s.id for s in third}) == SESSIONS
    for session in third:
        name, _, copy = session.id.partition("~")
        assert copy == "2"
        assert session.tenant == "t"
        for turn, original in zip(session.turns, by_id[name].turns, strict=True):
            assert turn.input_tokens == original.input_tokens
            assert turn.output_tokens == original.output_tokens
            assert turn.after_s == original.after_s
            assert len(turn.blocks) == len(original.blocks)


def test_the_seed_fixes_everything_and_changes_only_the_order(workload):
    def fingerprint(seed):
        return [
            (s.id, [t.kept_blocks.tolist() for t in s.turns])
            for group in copies(workload, 3, seed)
            for s in group
        ]

    assert fingerprint(7) == fingerprint(7)
    assert fingerprint(7) != fingerprint(8)
    assert sorted(fingerprint(7)) == sorted(fingerprint(8))


def test_copies_come_in_orders_of_their_own(workload):
    first, second = copies(workload, 2)

    assert [s.id for s in first] != [s.id.partition("~")[0] for s in second]


def test_nothing_expands_to_nothing():
    assert list(expand(Workload("none", 1, (), ""), 0)) == []
