"""What a load test sends: copies, what an endless cache holds, arrivals, lengths, flat memory."""

import tracemalloc
from itertools import islice, repeat

import numpy as np
import pytest

from kappa_workload import arrivals
from kappa_workload.catalogue import BUILT_IN, workload_named
from kappa_workload.reading import ReadAs
from kappa_workload.replay import (
    ReplayOptions,
    Reuse,
    expand,
    matched_blocks,
    mean_turns,
    replay_sessions,
    requests,
)
from kappa_workload.sessions import demo_sessions_path
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of
from tests.workload.checks import cached_in_fact

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


def test_copies_share_blocks_within_but_not_among_each_other(workload):
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


IDS = stream_ids(key_of("talk"), 0, 20)


def session(*turns, document_tokens=0, size=100, ids=IDS, name="s"):
    made = tuple(turn_of(0.0, *turn, ids, size, None) for turn in turns)
    return SessionShape(name, made, document_tokens=document_tokens)


def played(reuse, one):
    return [reuse.visit(one, number) for number in range(len(one.turns))]


@pytest.mark.parametrize(
    ("turns", "unit", "outputs_kept", "cached"),
    [
        # Whole blocks of earlier prompts.
        (((250, 10), (300, 10), (300, 10)), 100, False, [0, 200, 200]),
        # Answers, if they are kept.
        (((250, 150), (520, 10)), 100, False, [0, 200]),
        (((250, 150), (520, 10)), 100, True, [0, 400]),
        # Smaller blocks hold what a prompt fills in part, if the next says how it goes on.
        (((250, 60), (520, 90), (610, 10)), 16, False, [0, 240, 512]),
        (((250, 10), (520, 10)), 16, False, [0, 192]),
    ],
)
def test_reuse_counts_blocks_of_prompts_and_of_kept_answers(turns, unit, outputs_kept, cached):
    assert played(Reuse(100, unit, outputs_kept=outputs_kept), session(*turns)) == cached


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


BLOCK = 16


def toy(times=(None, None, None)):
    """Three conversations of two turns."""
    sessions = []
    for number, time_s in enumerate(times):
        ids = stream_ids(key_of("toy", number), 0, 10)
        turns = (
            turn_of(0.0, 40, 20, ids, BLOCK, 40),
            turn_of(4.0 + number, 80, 9, ids, BLOCK, 20),
        )
        sessions.append(SessionShape(f"s{number}", turns, tenant="t", arrival_s=time_s))
    return Workload("toy", BLOCK, tuple(sessions), "made up")


def play(workload, count=None, times=None, **options):
    return list(
        islice(
            replay_sessions(
                workload,
                arrivals=repeat(0.0) if times is None else times,
                seed=1,
                options=ReplayOptions(**options),
            ),
            count,
        )
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_expected_reuse_is_that_of_the_prompts(name):
    workload = workload_named(name, ReadAs(block_tokens=BLOCK))
    count = 40 if name in ("narrativeqa", "finqa") else 300
    seen: set[bytes] = set()
    reused = 0
    sent = requests(replay_sessions(workload, arrivals=repeat(0.0), seed=3))
    for request in islice(sent, count):
        tokens = request.make_prompt()
        assert len(tokens) == request.input_tokens
        assert cached_in_fact(seen, tokens, BLOCK) == request.cached_tokens
        assert request.cached_tokens + request.new_tokens == request.input_tokens
        reused += request.cached_tokens
    assert (reused > 0) == (name != "azure")


def test_copies_of_a_workload_share_nothing():
    seen: set[bytes] = set()
    for session in play(toy(), 12):
        first, second = session.requests
        assert cached_in_fact(seen, first.make_prompt(), BLOCK) == 0
        assert cached_in_fact(seen, second.make_prompt(), BLOCK) == second.cached_tokens == 32


def test_play_gives_the_same_sessions_in_order_of_arrival():
    def played():
        rng = np.random.default_rng(7)
        sessions = play(toy(), 50, arrivals.poisson(2.0, rng))
        return [(s.id, s.arrival_s, s.requests[1].after_s) for s in sessions]

    first = played()
    assert first == played()
    times = [time_s for _, time_s, _ in first]
    assert times == sorted(times)
    assert len({name for name, _, _ in first}) == 50


def test_a_session_is_told_as_its_source_tells_it():
    session = play(toy(), 1)[0]
    first, second = session.requests
    assert (first.turn, second.turn, first.tenant) == (0, 1, "t")
    assert first.session == second.session == session.id
    assert (first.after_s, first.output_tokens) == (0.0, 20)
    assert second.after_s in (4.0, 5.0, 6.0)


def test_replay_keeps_trace_times_and_lets_copies_follow():
    workload = toy((10.0, 0.0, 5.0))
    sessions = list(islice(replay_sessions(workload, arrivals=None, seed=0, trace_speed=2.0), 6))
    assert [s.id for s in sessions] == ["s1", "s2", "s0", "s1~1", "s2~1", "s0~1"]
    times = [s.arrival_s for s in sessions]
    assert times[:3] == [0.0, 2.5, 5.0]
    assert times[3] > times[2]
    assert np.diff(times[3:]).tolist() == pytest.approx([2.5, 2.5])
    assert sessions[0].requests[1].after_s == 5.0  # pauses are not hurried


def test_a_workload_without_times_says_what_to_choose():
    with pytest.raises(ValueError, match=r"'toy' does not say when .* such as poisson:5"):
        replay_sessions(toy(), arrivals=None, seed=0)
    with pytest.raises(ValueError, match="trace_speed is 0"):
        replay_sessions(toy((0.0, 1.0, 2.0)), arrivals=None, seed=0, trace_speed=0)


@pytest.mark.parametrize("name", ["mooncake", "azure"])
def test_real_traces_come_at_their_times(name):
    sessions = list(islice(replay_sessions(workload_named(name), arrivals=None, seed=0), 200))
    times = [session.arrival_s for session in sessions]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(set(times)) > 20


def test_what_does_not_fit_is_left_out():
    long = toy().sessions[0]
    sizes = play(toy(), 3, max_context_tokens=70)
    assert [len(session.requests) for session in sizes] == [1, 1, 1]
    with pytest.raises(ValueError, match="fits 30 tokens with its output: raise max_context"):
        play(toy(), 1, max_context_tokens=30)
    ids = stream_ids(key_of("big"), 0, 10)
    big = SessionShape("big", (turn_of(0.0, 100, 1, ids, BLOCK, 100),))
    mixed = Workload("mixed", BLOCK, (big, long), "made up")
    times = iter([1.0, 2.0, 3.0])
    assert [s.arrival_s for s in play(mixed, None, times, max_context_tokens=90)] == [1.0, 2.0, 3.0]


def test_options_bound_turns_outputs_pauses_and_copies():
    sessions = play(
        toy(), None, max_turns=2, max_output_tokens=4, pause_factor=10.0, copies=2,
    )  # fmt: skip
    assert len(sessions) == 6
    assert {request.output_tokens for request in requests(sessions)} == {4}
    assert sorted({s.requests[1].after_s for s in sessions}) == [40.0, 50.0, 60.0]
    assert len(play(toy(), 1, max_turns=1)[0].requests) == 1
    assert mean_turns(toy()) == 2


def test_prompts_are_words_if_asked_and_chats_if_texts_exist():
    request = play(toy(), 1, as_text=True)[0].requests[0]
    assert len(request.make_prompt().split(" ")) == 40

    recorded = workload_named(str(demo_sessions_path()), ReadAs(len, block_tokens=BLOCK))
    first, second = play(recorded, 1)[0].requests[:2]
    (message,) = first.make_prompt()
    assert message["role"] == "user"
    assert len(message["content"]) == first.input_tokens
    (later,) = second.make_prompt()
    assert later["content"].startswith(message["content"])


def test_chats_of_copies_share_no_beginning():
    recorded = workload_named(str(demo_sessions_path()), ReadAs(len))
    count = len(recorded.sessions)
    chats = {s.id: s.requests[0].make_prompt()[0]["content"] for s in play(recorded, 2 * count)}
    for name, text in chats.items():
        if not name.endswith("~1"):
            assert chats[f"{name}~1"][:5] != text[:5]


def test_an_empty_workload_is_refused():
    with pytest.raises(ValueError, match="holds no sessions"):
        play(Workload("none", BLOCK, (), "made up"), 1)


def test_memory_does_not_grow_with_the_number_of_requests():
    workload = toy((None,) * 100)
    stream = requests(replay_sessions(workload, arrivals=arrivals.constant(1000.0), seed=0))

    def held_after(count):
        for number, request in enumerate(islice(stream, count)):
            if number % 20 == 0:
                request.make_prompt()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = held_after(2_000)
        late = held_after(18_000)
    finally:
        tracemalloc.stop()
    assert late - early < 100_000
