"""A request's price on a worker: every formula by numbers worked out by hand.

The worker's figures are made for the working, not like any GPU's: a step reads weights for 0.5 s, a
token takes 0.01 s to compute and 0.001 s to read, a pair of tokens 0.0001 s, a step 0.2 s besides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from kappa.cost import StepModel, StepWork, chunk_work, transfer_s
from router import pricing as at

WORKER = {
    at.LOAD_TOKEN: 0.001, at.LOAD_FIXED: 0.1, at.TOKEN: 0.01, at.PAIR: 0.0001, at.WEIGHTS: 0.5,
    at.CONTEXT: 0.001, at.STEP: 0.2, at.BUDGET: 100.0, at.OVERHEAD: 0.05, at.DILATION: 1.0,
}  # fmt: skip
SLO = (0.5, 5.0, 3.0)
"""TTFT within the longer of 0.5 s and 5 times idle, TPOT within 3 times idle."""


def workers(*changes):
    cells = np.zeros((at.ROWS, max(len(changes), 1)))
    for slot, changed in enumerate(changes or ({},)):
        for row, value in {**WORKER, **changed}.items():
            cells[row, slot] = value
    return cells


def slots(cells):
    return np.arange(cells.shape[1])


# -- a prompt, a load, a fetch ------------------------------------------------------------------


def test_a_prompt_beside_requests_that_decode():
    # 250 tokens, 50 held: 200 new in 2 steps; pairs 200 x (50 + 100) = 30,000.
    # Work: 200 x 0.01 + 30,000 x 0.0001 = 2 + 3 = 5. Beside 4 that decode over 1,000 tokens:
    # 4 x 0.01 + 1,000 x 0.0001 = 0.14 a step. Read: 2 x (0.5 + 1,250 x 0.001) = 3.5.
    # Together max(5 + 2 x 0.14, 3.5) + 2 x 0.2 = 5.68.
    found = at.prefill_s(workers(), 0, 250.0, 50.0, 4.0, 1000.0)
    assert found == pytest.approx((5.0, 3.5, 5.68))


def test_a_short_prompt_takes_as_long_as_reading_the_weights():
    # 10 new behind 100: pairs 10 x (100 + 5) = 1,050; work 0.1 + 0.105 = 0.205.
    # Read: 0.5 + 110 x 0.001 = 0.61, more than the work; the step adds 0.2.
    found = at.prefill_s(workers(), 0, 110.0, 100.0, 0.0, 0.0)
    assert found == pytest.approx((0.205, 0.61, 0.81))


def test_a_load_takes_its_tokens_and_what_every_load_takes():
    assert at.load_s(workers(), 0, 400.0) == pytest.approx(0.1 + 400 * 0.001)
    assert at.load_s(workers(), 0, 0.0) == 0.0


def test_a_fetch_needs_a_network_and_room_in_the_host_tier():
    cells = workers({at.SPARE: 1000.0, at.PROMISED: 300.0, at.NET: 100.0})
    assert at.fetch_s(cells, 0, 700.0) == pytest.approx(7.0)
    assert at.fetch_s(cells, 0, 701.0) == math.inf, "300 of 1,000 are promised"
    assert at.fetch_s(cells, 0, 0.0) == 0.0
    cells[at.NET] = 0.0
    assert at.fetch_s(cells, 0, 700.0) == math.inf
    assert at.fetch_s(cells, 0, 0.0) == 0.0


def test_leading_tokens_on_the_device_and_behind_them_in_host():
    # Columns 2 and 0 of the index; only 5 whole blocks of the prompt count, of 16 tokens each.
    blocks = np.array([[3, 0, 2], [9, 0, 1]])
    columns = np.array([2, 0])
    device, host = at.leading_tokens(blocks, columns, np.array([0, 1]), 5, 16)
    assert device.tolist() == [2 * 16, 3 * 16]
    assert host.tolist() == [1 * 16, 2 * 16]


# -- queues -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now_s", "link_s", "gpu_s"),
    [
        (1.0, 2.0, 3.0),  # the link is free at 5, but has only 2 s of work; the gpu has not begun
        (4.0, 1.0, 3.0),
        (4.5, 0.5, 2.5),  # half a second of the first prompt is done
        (10.0, 0.0, 2.0),  # no more can be done than the first prompt's second
    ],
)
def test_queues_shrink_as_time_passes(now_s, link_s, gpu_s):
    cells = workers(
        {at.LINK_FREE: 5.0, at.LINK_OUT: 2.0, at.GPU_OUT: 3.0, at.GPU_SINCE: 4.0, at.GPU_HEAD: 1.0}
    )
    assert at.backlogs_s(cells, 0, now_s) == pytest.approx((link_s, gpu_s))


@pytest.mark.parametrize(
    ("decoding", "context", "step_s"),
    [
        # Reads 0.5 + 4,000 x 0.001 = 4.5, more than 20 x 0.01 + 4,000 x 0.0001 = 0.6; and 0.2.
        (20.0, 4000.0, 4.7),
        # Computes 200 x 0.01 + 1,000 x 0.0001 = 2.1, more than it reads, 1.5; and 0.2.
        (200.0, 1000.0, 2.3),
    ],
)
def test_the_step_under_way_is_waited_for_half_and_with_a_load_one_more(decoding, context, step_s):
    cells = workers({at.DECODING: decoding, at.DECODE_CONTEXT: context})
    assert at.under_way_s(cells, 0, 0.0) == pytest.approx(0.5 * step_s)
    assert at.under_way_s(cells, 0, 64.0) == pytest.approx(1.5 * step_s)


def test_nobody_waits_for_a_step_where_nothing_decodes():
    assert at.under_way_s(workers({at.DECODE_CONTEXT: 500.0}), 0, 64.0) == 0.0


# -- what a delay weighs ------------------------------------------------------------------------


def objective(cells, work_s, load_s, output_tokens=1e9, slo=SLO):
    priced = np.zeros((at.OUT_ROWS, cells.shape[1]))
    priced[at.OUT_WORK], priced[at.OUT_LOAD] = work_s, load_s
    return at.objective(cells, slots(cells), priced, 300.0, output_tokens, slo)


def three_workers(dilation=1.0):
    """Steps that read 300 tokens: 0.5, 1.5 and 2.5 s for the weights, 0.3 + 0.2 s: 1, 2, 3 s."""
    return workers({at.WEIGHTS: 2.5}, {at.DILATION: dilation}, {at.WEIGHTS: 1.5})


def test_a_multiple_of_the_best_idle_worker_limits_the_first_token():
    # TPOT: 3 x the middle step of 2 s. Idle TTFT: the second worker has 0.05 + 0.35 + max(1.6, 1)
    # = 2; the first 0.05 + 0 + max(0.9, 3) = 3.05; the third 0.05 + 5 + 2 more. Limit 5 x 2 = 10.
    found = objective(three_workers(), [0.9, 1.6, 1.0], [0.0, 0.35, 5.0])
    assert found == pytest.approx((10 / 6, 6.0, 10.0))


def test_the_floor_limits_the_first_token_where_it_is_longer_in_dilated_time():
    # As above, but the floor is 0.5 s times the largest dilation, 30: 15 s, more than 10.
    found = objective(three_workers(30.0), [0.9, 1.6, 1.0], [0.0, 0.35, 5.0])
    assert found == pytest.approx((15 / 6, 6.0, 15.0))


def test_no_more_tokens_are_delayed_than_there_will_be():
    found = objective(three_workers(), [0.9, 1.6, 1.0], [0.0, 0.35, 5.0], output_tokens=1.5)
    assert found[0] == 1.5


def test_without_workers_or_times_there_is_no_objective():
    assert objective(workers()[:, :0], [], [], 50.0) == (50.0, math.inf, math.inf)
    timeless = workers({at.WEIGHTS: 0.0, at.CONTEXT: 0.0, at.STEP: 0.0})
    assert objective(timeless, [1.0], [0.0], 50.0) == (50.0, math.inf, math.inf)


@pytest.mark.parametrize(
    ("limit_s", "share"),
    [
        (2.0, 0.25),  # the soonest first token comes after 4 s, twice the limit: half of a half
        (4.0, 0.5),  # just in time
        (8.0, 1.0),  # in half of the time allowed
        (80.0, 1.0),
    ],
)
def test_later_tokens_count_less_the_later_the_soonest_first_token(limit_s, share):
    priced = np.zeros((at.OUT_ROWS, 2))
    priced[at.OUT_TTFT] = [8.0, 4.0]
    assert at.crowd_share(priced, limit_s) == pytest.approx(share)
    priced[at.OUT_TTFT, 1] = 0.0
    assert at.crowd_share(priced, limit_s) == 1.0


# -- all of it ----------------------------------------------------------------------------------

WINDOW_S = 10 / math.log(2)
"""Ten seconds after it was last brought up to date, recent use counts half."""
BUSY = {
    at.DECODING: 4.0, at.DECODE_CONTEXT: 1000.0, at.RESIDENT: 1200.0, at.IN_FLIGHT: 6.0,
    at.WAITING: 2.0, at.QUEUED: 300.0, at.GPU_USE: 0.4, at.LOADS: 6.0, at.PREFILLS: 2.0,
    at.USE_AT: 3.0, at.LINK_FREE: 14.0, at.LINK_OUT: 3.0, at.GPU_OUT: 3.0, at.GPU_SINCE: 12.5,
    at.GPU_HEAD: 1.0, at.NET: 10.0, at.NET_FREE: 13.5, at.SPARE: 1000.0,
}  # fmt: skip


def priced(cells, now_s=13.0, fetch=(), source=0):
    return at.price(
        cells, np.array([0]), now_s, WINDOW_S, 250.0, 50.0, np.array([30.0]), np.array([20.0]),
        np.array(fetch, dtype=float), source, SLO,
    )[:, 0]  # fmt: skip


def test_a_request_on_a_busy_worker():
    """Those of `test_a_prompt_beside_requests_that_decode`: 30 tokens on the device, 20 in host."""
    out = priced(workers(BUSY))
    assert out[at.OUT_NEW] == 200
    assert out[[at.OUT_WORK, at.OUT_COMPUTE]] == pytest.approx([5.0, 5.68])
    # Each of 4 waits for what computing takes beyond reading: 4 x (5.68 - 3.5).
    assert out[at.OUT_HARM] == pytest.approx(8.72)
    use = out[[at.OUT_GPU_USE, at.OUT_LOADS, at.OUT_PREFILLS]]
    assert use == pytest.approx([0.2, 3.0, 1.0])
    # The link is free in 1 s; of 3 s of prompts, the half second since 12.5 is done.
    backlogs = out[[at.OUT_LINK_BACKLOG, at.OUT_GPU_BACKLOG, at.OUT_NET_BACKLOG]]
    assert backlogs == pytest.approx([1.0, 2.5, 0.5])
    assert out[at.OUT_LOAD] == pytest.approx(0.1 + 20 * 0.001)
    # The step under way, 0.5 + 1,000 x 0.001 + 0.2 = 1.7 s, counts one and a half times: 2.55.
    # Waits max(1 + 0.12, 2.5) + 2.55 = 5.05; overhead 0.05, compute 5.68.
    assert out[at.OUT_TTFT] == pytest.approx(10.78)
    # A step beside all: 0.5 + (250 + 1,200) x 0.001 + 0.2 = 2.15; a fifth goes to prompts.
    assert out[at.OUT_TPOT] == pytest.approx(2.15 / 0.8)
    # Idle: TPOT 0.5 + 0.25 + 0.2 = 0.95, limit 2.85; TTFT 0.05 + 0.12 + 5 = 5.17, limit 25.85.
    # The first token comes in less than half of that, so later ones count in full.
    weight = 25.85 / 2.85
    assert out[at.OUT_DECODE] == pytest.approx(weight * (0.01 + 250 * 0.001))
    # Half of the use counts: 2.15 / (1 - 0.1), of which half of 2.85 is allowed.
    assert out[at.OUT_OWN_LATE] == pytest.approx(weight * (2.15 / 0.9 - 1.425))
    rest = [at.OUT_FIXED, at.OUT_IN_FLIGHT, at.OUT_WAITING, at.OUT_QUEUED, at.OUT_RESIDENT]
    assert out[rest].tolist() == [0.05, 6, 2, 300, 1200]


def test_a_request_that_fetches_waits_for_the_network_of_both_ends():
    # The source's card is free at 15, ours at 13.5: 2 s of queue. 20 tokens at 10 a second: 2 s.
    # The load starts after 4 s: waits max(4 + 0.12, 2.5) + 2.55 = 6.67; TTFT 6.67 + 5.73.
    out = priced(workers(BUSY, {at.NET_FREE: 15.0}), fetch=[20.0], source=1)
    assert out[[at.OUT_NET_BACKLOG, at.OUT_FETCH]] == pytest.approx([2.0, 2.0])
    assert out[at.OUT_TTFT] == pytest.approx(12.4)


def test_later_tokens_count_less_where_the_queue_outlasts_the_objective():
    # 50 s of prompts: TTFT = 0.05 + 50 + 2.55 + 5.68 = 58.28 against a limit of 25.85.
    out = priced(workers({**BUSY, at.GPU_OUT: 50.5}))
    share = 0.5 * 25.85 / 58.28
    assert out[at.OUT_DECODE] == pytest.approx(share * 25.85 / 2.85 * 0.26)


def test_a_clock_that_was_set_back_does_not_make_use_grow():
    assert priced(workers(BUSY), now_s=1.0)[at.OUT_GPU_USE] == pytest.approx(0.4)


def test_more_prompts_than_a_worker_can_do_do_not_stretch_a_token_for_ever():
    # Use of 3 counts as 0.95: 2.15 / 0.05; for its own lateness half of that: 2.15 / 0.525.
    out = priced(workers({**BUSY, at.GPU_USE: 6.0}))
    assert out[at.OUT_GPU_USE] == pytest.approx(3.0)
    assert out[at.OUT_TPOT] == pytest.approx(2.15 / 0.05)
    assert out[at.OUT_OWN_LATE] == pytest.approx(25.85 / 2.85 * (2.15 / 0.525 - 1.425))


def test_idle_workers():
    cells = workers()
    # 200 new behind 50 loaded: overhead 0.05 + load 0.15; compute max(5, 2 x 0.75) + 0.4.
    assert at.idle_ttft_s(cells, slots(cells), 250.0, 50.0) == pytest.approx(0.05 + 0.15 + 5.4)
    assert at.idle_tpot_s(cells, slots(cells), 250.0) == pytest.approx(0.95)


# -- the formulas are those of the cost model, restated: random workers, random requests ------

WORKERS, REQUESTS, BUDGET = 40, 25, 8192
RELATIVE = 1e-12


@pytest.fixture(scope="module")
def drawing():
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def drawn_workers(drawing):
    """Each a step model and its link's seconds per token and per load, in real seconds."""

    def one():
        magnitudes = (-6, -3), (-12, -8), (-4, -1), (-9, -6), (-5, -2), (-7, -4), (-5, -2)
        drawn = [float(10 ** drawing.uniform(*ends)) for ends in magnitudes]
        return StepModel(*drawn[:5]), drawn[5], drawn[6]

    return [one() for _ in range(WORKERS)]


@pytest.fixture(scope="module")
def drawn_cells(drawn_workers):
    matrix = np.zeros((at.ROWS, WORKERS))
    matrix[at.BUDGET] = BUDGET
    for slot, (step, load_token_s, load_fixed_s) in enumerate(drawn_workers):
        matrix[at.TOKEN, slot], matrix[at.PAIR, slot] = step.token_s, step.pair_s
        matrix[at.WEIGHTS, slot], matrix[at.CONTEXT, slot] = step.weights_s, step.context_token_s
        matrix[at.STEP, slot] = step.fixed_s
        matrix[at.LOAD_TOKEN, slot], matrix[at.LOAD_FIXED, slot] = load_token_s, load_fixed_s
    return matrix


@pytest.fixture(scope="module")
def drawn_requests(drawing):
    """Prompt tokens, those of them that are cached; requests that decode, and their contexts."""
    drawn = []
    for _ in range(REQUESTS):
        prompt = int(drawing.integers(1, 100_000))
        decoding = int(drawing.integers(0, 60))
        drawn.append((prompt, int(drawing.integers(0, prompt)), decoding, decoding * 1234))
    return drawn


def test_a_prompt_beside_decoding_requests_costs_what_the_cost_model_says(
    drawn_workers, drawn_cells, drawn_requests
):
    for slot, (step, _, _) in enumerate(drawn_workers):
        for prompt, held, decoding, context in drawn_requests:
            new = prompt - held
            steps = math.ceil(new / BUDGET)
            alone = chunk_work(float(new), float(held))
            # Each step decodes a token for each of the others, and reads prompt and contexts.
            beside = StepWork(
                new + steps * decoding, alone.pairs + steps * context, steps * (prompt + context)
            )
            parts = step.parts(beside, steps)
            got = at.prefill_s(drawn_cells, slot, float(prompt), float(held), decoding, context)
            expected = (step.parts(alone).compute_s, parts.read_s, parts.step_s)
            assert got == pytest.approx(expected, rel=RELATIVE)


def test_a_load_costs_what_the_cost_model_says(drawn_workers, drawn_cells, drawn_requests):
    for slot, (_, token_s, fixed_s) in enumerate(drawn_workers):
        for _, held, _, _ in [*drawn_requests, (1, 0, 0, 0)]:
            expected = transfer_s(float(held), token_s, fixed_s)
            assert at.load_s(drawn_cells, slot, float(held)) == pytest.approx(
                expected, rel=RELATIVE
            )


def test_a_step_that_only_reads_costs_what_the_cost_model_says(
    drawn_workers, drawn_cells, drawn_requests
):
    for slot, (step, _, _) in enumerate(drawn_workers):
        for _, _, _, context in drawn_requests:
            expected = step.parts(StepWork(0.0, 0.0, context)).step_s
            got = at.reading_step_s(drawn_cells, slot, float(context))
            assert got == pytest.approx(expected, rel=RELATIVE)


def test_half_of_a_decoding_step_is_waited_for_and_one_more_behind_a_load(
    drawn_workers, drawn_cells, drawn_requests
):
    for slot, (step, _, _) in enumerate(drawn_workers):
        for _, _, decoding, context in drawn_requests:
            step_s = step.parts(StepWork(decoding, context, context)).step_s if decoding else 0.0
            drawn_cells[at.DECODING, slot], drawn_cells[at.DECODE_CONTEXT, slot] = decoding, context
            for cached, share in ((0.0, 0.5), (16.0, 1.5)):
                got = at.under_way_s(drawn_cells, slot, cached)
                assert got == pytest.approx(share * step_s, rel=RELATIVE)


def test_idle_workers_cost_what_the_cost_model_says(drawn_workers, drawn_cells, drawn_requests):
    slots = np.arange(WORKERS)
    for prompt, held, _, _ in drawn_requests:
        expected_s = []
        for step, token_s, fixed_s in drawn_workers:
            steps = math.ceil((prompt - held) / BUDGET)
            tokens, pairs, _ = chunk_work(float(prompt - held), float(held))
            parts = step.parts(StepWork(tokens, pairs, float(steps * prompt)), steps)
            expected_s.append(transfer_s(float(held), token_s, fixed_s) + parts.step_s)
        got = at.idle_ttft_s(drawn_cells, slots, float(prompt), float(held))
        assert got == pytest.approx(expected_s, rel=RELATIVE)
