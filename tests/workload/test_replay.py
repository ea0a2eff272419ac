"""What a load test sends: arrivals, lengths, expected reuse that prompts bear out, flat memory."""

import hashlib
import tracemalloc
from itertools import islice, repeat

import numpy as np
import pytest

from workload import arrivals
from workload.block_ids import key_of, stream_ids
from workload.catalogue import workload_named, workload_names
from workload.replay import ReplayOptions, mean_turns, replay_sessions, requests
from workload.sessions import demo_sessions_path
from workload.shapes import SessionShape, Workload, turn_of

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


def cached_in_fact(seen, tokens):
    """What an endless cache of full blocks held of a prompt; notes it."""
    state, held, whole = hashlib.blake2b(digest_size=8), 0, True
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        state.update(tokens[start : start + BLOCK].tobytes())
        digest = state.copy().digest()
        whole = whole and digest in seen
        held += BLOCK * whole
        seen.add(digest)
    return min(held, (len(tokens) - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("name", workload_names())
def test_the_expected_reuse_is_that_of_the_prompts(name):
    workload = workload_named(name, block_tokens=BLOCK)
    count = 40 if name in ("narrativeqa", "finqa") else 300
    seen: set[bytes] = set()
    reused = 0
    sent = requests(replay_sessions(workload, arrivals=repeat(0.0), seed=3))
    for request in islice(sent, count):
        tokens = request.make_prompt()
        assert len(tokens) == request.input_tokens
        assert cached_in_fact(seen, tokens) == request.cached_tokens
        assert request.cached_tokens + request.new_tokens == request.input_tokens
        reused += request.cached_tokens
    assert (reused > 0) == (name != "azure")


def test_copies_of_a_workload_share_nothing():
    seen: set[bytes] = set()
    for session in play(toy(), 12):
        first, second = session.requests
        assert cached_in_fact(seen, first.make_prompt()) == 0
        assert cached_in_fact(seen, second.make_prompt()) == second.cached_tokens == 32


def test_outputs_count_as_cached_if_the_model_answers_as_recorded():
    kept = play(toy(), 1, outputs_kept=True)[0].requests[1]
    assert (kept.cached_tokens, kept.new_tokens) == (48, 32)  # 60 tokens, in full blocks


def test_sessions_come_in_order_of_arrival_and_are_the_same_each_time():
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
    assert (first.session, second.arrival_s) == (session.id, session.arrival_s)
    assert (first.after_s, first.output_tokens) == (0.0, 20)
    assert second.after_s in (4.0, 5.0, 6.0)


def test_the_times_of_a_trace_are_kept_and_copies_follow_one_another():
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
        toy(), None, max_turns=2, max_output_tokens=4, pause_factor=10.0, longest_pause_s=45.0,
        copies=2,
    )  # fmt: skip
    assert len(sessions) == 6
    assert {request.output_tokens for request in requests(sessions)} == {4}
    assert sorted({s.requests[1].after_s for s in sessions}) == [40.0, 45.0]
    assert len(play(toy(), 1, max_turns=1)[0].requests) == 1
    assert mean_turns(toy()) == 2


def test_prompts_are_words_if_asked_and_chats_where_there_are_texts():
    request = play(toy(), 1, as_text=True)[0].requests[0]
    assert len(request.make_prompt().split(" ")) == 40

    recorded = workload_named(str(demo_sessions_path()), len, block_tokens=BLOCK)
    first, second = play(recorded, 1)[0].requests[:2]
    (message,) = first.make_prompt()
    assert message["role"] == "user"
    assert len(message["content"]) == first.input_tokens
    (later,) = second.make_prompt()
    assert later["content"].startswith(message["content"])
    tokens = play(recorded, 1, texts=False)[0].requests[0].make_prompt()
    assert len(tokens) == first.input_tokens


def test_chats_of_copies_share_no_beginning():
    recorded = workload_named(str(demo_sessions_path()), len)
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
