"""What another rule would have made of recorded requests: arithmetic by hand, and whole replays."""

import math

import numpy as np
import pytest

from kappa_router.calibration import Calibration
from kappa_router.config import RouterConfig
from kappa_router.policy import policy_named
from kappa_router.rollout import PRESENT, RoundRobin
from kappa_router.rollout_journal import JournaledRequest, JournaledWorker, RolloutSegment
from kappa_router.router import Router
from kappa_simulator import counterfactual as cf
from kappa_simulator.decode import DecodeRun, factor_of
from kappa_simulator.dispatch import RouterDispatch
from kappa_simulator.faults import Faults
from kappa_simulator.play import Play
from kappa_simulator.run import SimulationConfig, announcements_of, node_models, traffic_of

SIZE = 16


def request(
    conversation="c", arrival_s=0.0, end_s=1.0, prompt=40, output=20, blocks=(1, 2), **more
):
    given = {"ttft_s": 0.5, "worker": "a", "steered": "present", **more}
    ids = np.array(blocks, dtype=np.uint64)
    return JournaledRequest(
        conversation, arrival_s, given["ttft_s"], end_s, given["worker"], given["steered"], prompt,
        output, ids,
    )  # fmt: skip


# -- traffic ---------------------------------------------------------------------------------------


def test_request_after_the_previous_answer_keeps_its_pause():
    rows = [request(end_s=2.0), request(arrival_s=5.0, end_s=6.0, blocks=(1, 2, 3), prompt=60)]
    traffic, order = cf.traffic_of(rows, SIZE)
    assert order == [0, 1] and traffic.base == [0] and traffic.first_s == [0.0]
    assert [turn.after_s for turn in traffic.turns[0]] == [0.0, 3.0]


def test_request_before_the_previous_answer_keeps_its_arrival():
    rows = [request(arrival_s=10.0, end_s=14.0), request(arrival_s=12.0, end_s=13.0)]
    traffic, order = cf.traffic_of(rows, SIZE)
    assert traffic.first_s == [0.0, 2.0] and traffic.base == [0, 1] and order == [0, 1]


def test_interleaved_conversations_stand_one_after_the_other():
    names = ["a", "b", "a", "b"]
    rows = [request(n, float(k), k + 0.5) for k, n in enumerate(names)]
    traffic, order = cf.traffic_of(rows, SIZE)
    assert order == [0, 2, 1, 3] and traffic.base == [0, 2] and traffic.first_s == [0.0, 1.0]
    assert traffic.session.tolist() == [0, 0, 1, 1]


def test_answer_leaves_the_blocks_that_begin_the_next_prompt():
    # 40 + 20 tokens fill three blocks of 16; the next prompt says what the third one is.
    rows = [request(), request(arrival_s=2.0, blocks=(1, 2, 7, 8), prompt=70)]
    first, second = cf.traffic_of(rows, SIZE)[0].turns[0]
    assert first.kept_blocks.tolist() == [1, 2, 7]
    assert second.kept_blocks[:4].tolist() == [1, 2, 7, 8] and len(second.kept_blocks) == 90 // SIZE


def test_answer_without_a_follow_up_leaves_blocks_of_its_own():
    rows = [request(), request(arrival_s=2.0, blocks=(1, 9))]
    first, second = cf.traffic_of(rows, SIZE)[0].turns[0]
    assert first.kept_blocks[:2].tolist() == [1, 2]
    assert first.kept_blocks[2] not in (9, second.kept_blocks[2])


# -- arithmetic ------------------------------------------------------------------------------------


def test_a_replay_that_is_twice_too_fast_is_corrected_by_two():
    replayed = np.linspace(1, 3, 200)
    corrected = cf.corrected_by(replayed, 2 * replayed, np.array([0.5, 1.5, 10.0]))
    assert corrected == pytest.approx([1.0, 3.0, 20.0])


def test_what_is_saved_is_the_difference_of_the_figures():
    measured = np.array([1.0, 2.0, 3.0] * 40)
    names = np.array([str(k % 6) for k in range(120)])
    found = cf.compared(measured, measured, measured / 2, names)
    assert found.measured == pytest.approx((2.0, 2.0, 3.0))
    assert found.other == pytest.approx((1.0, 1.0, 1.5))
    assert [one.saved_s for one in found.saved] == pytest.approx([1.0, 1.0, 1.5])
    assert found.model_error == 0 and found.conversations == 6 and found.requests == 120


def test_more_conversations_give_a_narrower_range():
    rng = np.random.default_rng(0)

    def width(conversations):
        mean_s = rng.lognormal(size=conversations).repeat(10)
        names = np.arange(conversations).repeat(10).astype(str)
        saved = cf.compared(mean_s, mean_s, mean_s / 2, names).saved[1]
        assert saved.low_s < saved.saved_s < saved.high_s
        return saved.high_s - saved.low_s

    assert width(400) < width(25) / 2


def test_arms_are_compared_as_measured():
    rows = [request(str(k), ttft_s=2.0) for k in range(60)]
    rows += [request(f"k{k}", ttft_s=0.5, steered="kappa") for k in range(60)]
    found = cf.arms(rows)
    assert found.saved == ((1.5, 1.5, 1.5),) * 3 and math.isnan(found.model_error)


def test_an_arm_of_few_requests_says_nothing():
    rows = [request(str(k)) for k in range(60)]
    assert cf.arms([*rows, *[request("k", steered="kappa")] * (cf.LEAST_REQUESTS - 1)]) is None


def test_unstreamed_answers_are_not_measured():
    measured = np.array([1.0, math.nan, 3.0])
    found = cf.compared(measured, np.full(3, 2.0), np.full(3, 1.0), np.array(["a", "b", "c"]))
    assert found.requests == 2 and found.measured.mean == 2.0
    rows = [request(str(k), ttft_s=math.nan) for k in range(200)]
    assert cf.arms([*rows, *[request("k", steered="kappa")] * 200]) is None


def test_too_few_requests_and_unknown_engines_are_refused(announced):
    segment = RolloutSegment("shadow", "round-robin", "priced", {"a": announced[0]})
    segment.requests.extend([request()] * 3)
    with pytest.raises(ValueError, match=f"3 streamed requests .* {cf.LEAST_REQUESTS} are"):
        cf.counterfactual(segment, policy_named("priced"))
    segment.requests.extend(request(str(k), worker="b") for k in range(60))
    with pytest.raises(ValueError, match="no line of the journal describes a, b"):
        cf.counterfactual(segment, policy_named("priced"))


# -- whole replays ---------------------------------------------------------------------------------


@pytest.fixture
def config(trio, documents, shape):
    return SimulationConfig(
        cluster=trio, workload=documents, shape=shape, rate_rps=3.0, requests=300, warm=False
    )


@pytest.fixture
def announced(config):
    made = announcements_of(config, node_models(config))
    return [JournaledWorker(one, Calibration(one).speed, 0.0) for one in made]


def played(config, policy):
    models = node_models(config)
    router = Router(RouterConfig(policy, 1, 1_000_000, stale_after_s=math.inf, forecast_workers=0))
    traffic = traffic_of(config)
    play = Play(models, traffic, RouterDispatch([router], announcements_of(config, models)),
                Faults(), config.seed)  # fmt: skip
    play.run()
    return play, traffic


def segment_of(play, traffic, workers):
    segment = RolloutSegment("shadow", "round-robin", "priced")
    segment.workers = {one.announcement.worker: one for one in workers}
    names = list(segment.workers)
    for base, turns, name in zip(traffic.base, traffic.turns, traffic.ids, strict=True):
        for k, turn in enumerate(turns, base):
            at_s = play.arrival_s[k]
            segment.requests.append(
                JournaledRequest(
                    name, at_s, play.ttft_s[k], at_s + play.e2e_s[k], names[play.node[k]],
                    "present", turn.input_tokens, turn.output_tokens, turn.blocks,
                )
            )  # fmt: skip
    return segment


def test_counterfactual_replays_known_engines_as_they_were(config, announced):
    segment = segment_of(*played(config, RoundRobin()), announced)
    found = cf.counterfactual(segment, RoundRobin())
    assert found.model_error < 0.02


@pytest.mark.parametrize("present", ["round-robin", "prefix-hash"])
def test_counterfactual_saving_is_within_a_quarter_of_the_truth(config, announced, present):
    saved_s = truth_s = 0.0
    for seed in range(3):  # of one the mean depends on a few long waits
        config = config.replaced(seed=seed)
        before = played(config, PRESENT[present]())
        after = played(config, policy_named("priced"))[0]
        found = cf.counterfactual(segment_of(*before, announced), policy_named("priced"))
        late = np.argsort(before[0].arrival_s)[config.requests // 5 :]
        truth = np.subtract(*(cf.figures(np.array(p.ttft_s)[late]) for p in (before[0], after)))
        assert truth[1] > 0
        saved_s, truth_s = saved_s + found.saved[1].saved_s, truth_s + truth[1]
    assert saved_s == pytest.approx(truth_s, rel=0.25)


def test_a_learnt_factor_lengthens_steps_and_runs_alike(announced):
    factors = (0.0, math.log(3.0), 0.0)
    model = cf.node_model(announced[0])
    assert [factor_of(each, 2) for each in ((), factors)] == pytest.approx([1.0, 3.0])
    runs = [DecodeRun(model.step, 2, 500, each).seconds(40) for each in ((), factors)]
    assert runs[1] == pytest.approx(3 * runs[0])
