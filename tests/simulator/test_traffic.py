"""The requests of a run: how many, how fast, from the middle of things, and what they can reuse."""

import math

import numpy as np
import pytest

from kappa.cost import StepModel
from kappa.slo import IdleSpeed
from kappa_simulator.traffic import Clients, build_traffic, document_blocks
from kappa_workload.shapes import SessionShape, TurnShape, Workload

SPEED = IdleSpeed(StepModel(1e-5, 1e-10, 5e-3, 1e-8, 1e-3), 1e-6, 1e-3)


def build(workload, **changes):
    options = {"rate_rps": 10.0, "requests": 2000, "seed": 0, "warm": True, **changes}
    return build_traffic(workload, SPEED, **options)


def under_way(traffic):
    """Sessions that began before the run: their copies are numbered far beyond the others'."""
    copies = [name.partition("~")[2] for name in traffic.ids]
    return [i for i, copy in enumerate(copies) if copy and int(copy) > 1 << 30]


def per_request(traffic):
    return [turn for turns in traffic.turns for turn in turns]


def test_four_fifths_of_the_requests_are_measured(chats):
    traffic = build(chats)
    assert traffic.requests == 2000 == len(per_request(traffic))
    assert traffic.measured.sum() == 1600
    assert traffic.planned_s[traffic.measured].min() >= traffic.planned_s[~traffic.measured].max()
    assert [t.input_tokens for t in per_request(traffic)] == traffic.prompt_tokens.tolist()


@pytest.mark.parametrize("which", ["chats", "documents"])
def test_the_rate_is_steady_from_the_start(which, request):
    workload = request.getfixturevalue(which)
    counts = []
    for seed in range(8):
        traffic = build(workload, seed=seed)
        quarters = np.linspace(0, traffic.planned_s.max(), 5)
        counts.append(np.histogram(traffic.planned_s, quarters)[0])
        assert traffic.planned_s.min() >= 0
        assert 2000 / traffic.planned_s.max() == pytest.approx(10.0, rel=0.25)
    mean = np.mean(counts, axis=0)
    assert mean == pytest.approx(np.full(4, 500), rel=0.12)


def test_sessions_under_way_come_with_the_turns_they_have_left(chats):
    traffic = build(chats)
    whole = {s.id: len(s.turns) for s in chats.sessions}
    began = under_way(traffic)
    assert began
    assert any(len(traffic.turns[i]) < whole[traffic.ids[i].rpartition("~")[0]] for i in began)
    for index in began:
        assert traffic.turns[index][0].input_tokens > 300 or traffic.first_s[index] < 60


def test_traffic_is_equal_for_one_seed_and_differs_for_another(chats):
    one, again, other = build(chats), build(chats), build(chats, seed=1)
    assert one.planned_s.tolist() == again.planned_s.tolist()
    assert one.ids == again.ids != other.ids


def test_more_load_means_more_sessions_not_shorter_pauses(chats):
    slow, fast = build(chats), build(chats, rate_rps=40.0)
    assert fast.planned_s.max() < slow.planned_s.max() / 3
    pauses = {turn.after_s for turns in fast.turns for turn in turns[1:]}
    assert pauses == {3.0}


@pytest.mark.parametrize("which", ["chats", "documents"])
def test_another_rate_is_the_same_sessions_nearer_together(which, request):
    workload = request.getfixturevalue(which)
    slow, fast = build(workload), build(workload, rate_rps=12.5)
    began, later = {}, {}
    for traffic in (slow, fast):
        for name, first_s in zip(traffic.ids, traffic.first_s, strict=True):
            late = name not in {traffic.ids[i] for i in under_way(traffic)}
            (later if late else began).setdefault(name, []).append(first_s)
    both = [times for times in later.values() if len(times) == 2]
    assert len(both) > 0.7 * len(later)
    for slow_s, fast_s in both:
        assert slow_s == pytest.approx(1.25 * fast_s)
    assert sum(len(times) == 2 for times in began.values()) > 0.5 * len(began) > 0


def test_what_can_be_reused_follows_the_shapes(documents, chats):
    talk = build(chats, warm=False)
    turns = [(turns, base) for turns, base in zip(talk.turns, talk.base, strict=True)]
    for own, base in turns:
        for number in range(1, len(own)):
            kept = len(own[number - 1].kept_blocks) * 64
            assert talk.reuse_tokens[base + number] == kept
        assert talk.reuse_tokens[base] == 0
    reading = build(documents, warm=False)
    first = np.array(reading.base)
    later = np.setdiff1d(np.arange(reading.requests), first)
    assert (reading.reuse_tokens[first] == 0).all()
    assert (reading.prompt_tokens[later] - reading.reuse_tokens[later] == 100).all()


def test_warm_traffic_holds_documents_and_chats_already_begun(documents, chats):
    reading = build(documents)
    assert (reading.prompt_tokens - reading.reuse_tokens == 100).all()
    assert len(reading.warm) == len(reading.turns)
    talk = build(chats)
    assert 0 < len(talk.warm) <= len(under_way(talk))


def test_what_another_session_began_with_counts_as_reusable(chats):
    shared = np.arange(7, dtype=np.uint64)
    sessions = []
    for session in chats.sessions[:10]:
        turn = session.turns[0]
        kept = np.concatenate([shared[:2], turn.kept_blocks[2:]])
        sessions.append(
            type(session)(
                session.id,
                (type(turn)(0.0, turn.input_tokens, turn.output_tokens, kept[: len(turn.blocks)],
                            kept),),
            )
        )  # fmt: skip
    traffic = build(Workload("shared", 64, tuple(sessions), "made up"), requests=10, rate_rps=0.1)
    assert set(traffic.reuse_tokens.tolist()) == {0, 128}


def test_document_blocks_are_those_of_texts_and_not_of_talks(documents, chats):
    assert [document_blocks(s) for s in documents.sessions] == [100 + 40 * i for i in range(12)]
    assert not any(document_blocks(s) for s in chats.sessions)
    text = chats.sessions[0].turns[0].blocks[:4]
    short = [TurnShape(0.0, 256 + n % 3, 5, text, text) for n in range(4)]
    assert document_blocks(SessionShape("short questions", tuple(short))) == 4
    growing = [TurnShape(0.0, 256 + 6 * n, 5, text, text) for n in range(4)]
    assert document_blocks(SessionShape("short talk", tuple(growing))) == 0


@pytest.mark.parametrize(
    ("retry", "pauses_s"),
    [
        ("never", [math.inf] * 3),
        ("at_once", [0.1, 0.1, math.inf]),
        # Half as long to one and a half times: 0.5 and 1 s, here at 0.75 times.
        ("backoff", [0.375, 0.75, math.inf]),
        # In whole seconds, as the header has it, and at least one.
        ("retry_after", [3.0, 3.0, math.inf]),
    ],
)
def test_when_a_refused_client_comes_again(retry, pauses_s):
    clients = Clients(retry)
    assert [clients.again_s(tries, 2.2, 0.25) for tries in (1, 2, 8)] == pauses_s
    assert Clients("retry_after").again_s(1, 0.0, 0.0) == 1.0
    assert Clients("backoff").again_s(7, 0.0, 1.0) == 30.0


def test_what_clients_cannot_do_is_refused():
    with pytest.raises(ValueError, match="choose one of never, at_once, backoff, retry_after"):
        Clients("often")
    for seconds in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="give seconds above zero"):
            Clients(patience_s=seconds)
