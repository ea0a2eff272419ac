"""A request's price on a worker: every formula by numbers worked out by hand.

The worker's figures are made for the working, not like any GPU's: a step reads weights for 0.5 s, a
token takes 0.01 s to compute and 0.001 s to read, a pair of tokens 0.0001 s, a step 0.2 s besides.
"""

import math

import numpy as np
import pytest

from kappa.cost import StepLimit, StepModel
from kappa_router import reservations, ttft
from kappa_router.decision import ESTIMATE

WORKER = {
    "load_token_s": 0.001, "load_fixed_s": 0.1, "token_s": 0.01, "pair_s": 0.0001, "weights_s": 0.5,
    "context_token_s": 0.001, "fixed_s": 0.2, "budget_tokens": 100.0, "overhead_s": 0.05,
    "dilation": 1.0, "max_sequences": math.inf,
}  # fmt: skip
SLO = (0.5, 5.0, 0.0, 3.0)
"""TTFT within the longer of 0.5 s and 5 times idle, TPOT within 3 times idle."""


def records(names, *rows):
    made = np.zeros(len(rows), dtype=names)
    for record, row in zip(made, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    for slot in range(len(made) if names is ttft.WORKER else 0):
        reservations.keep_factors(made, slot)
    return made


def workers(*changes):
    return records(ttft.WORKER, *[{**WORKER, **changed} for changed in changes or ({},)])


def worker(**changes):
    return workers(changes)[0]


# -- a prompt, a load, a fetch ------------------------------------------------------------------


def test_prefill_s_counts_requests_that_decode_beside():
    # 250 tokens, 50 held: 200 new in 2 steps; pairs 200 x (50 + 100) = 30,000.
    # Work: 200 x 0.01 + 30,000 x 0.0001 = 2 + 3 = 5. Beside 4 that decode over 1,000 tokens:
    # 4 x 0.01 + 1,000 x 0.0001 = 0.14 a step. Read: 2 x (0.5 + 1,250 x 0.001) = 3.5.
    # GEMMs 2.08 beside weights 1.0, then attention 3.2 beside KV 2.5, and 2 x 0.2: 5.68.
    found = ttft.prefill_s(worker(), 250.0, 50.0, 4.0, 1000.0)
    assert found == pytest.approx((5.0, 3.5, 5.68))
    # KV takes twice as long to read; of the weights a fifth is not hidden: 2.28 and 5.0.
    slower = worker(context_token_s=0.002, exposed=0.2)
    found = ttft.prefill_s(slower, 250.0, 50.0, 4.0, 1000.0)
    assert found == pytest.approx((5.0, 6.0, 7.68))


def test_sums_over_gpus_are_added_for_every_token():
    # As above; 200 tokens of its own and 8 beside take 1 ms each.
    found = ttft.prefill_s(worker(comm_token_s=0.001), 250.0, 50.0, 4.0, 1000.0)
    assert found == pytest.approx((5.2, 3.5, 5.888))


def test_a_decoding_step_reads_the_experts_that_its_tokens_touch():
    # Of experts of 0.8 s a token leaves half alone: three requests touch 7/8, one alone a half.
    mixture = worker(experts_s=0.8, expert_idle=0.5, decoding=2.0)
    assert ttft.reading_step_s(mixture, 100.0) == pytest.approx(0.5 + 0.7 + 0.1 + 0.2)
    alone = worker(experts_s=0.8, expert_idle=0.5)
    assert ttft.reading_step_s(alone, 100.0) == pytest.approx(0.5 + 0.4 + 0.1 + 0.2)


@pytest.mark.parametrize("decoding", [1.0, 4.0, 200.0])
@pytest.mark.parametrize(("behind", "waited_s"), [(0.0, 0.0), (3000.0, 0.0), (0.0, 1.0)])
def test_part_of_a_prompt_is_as_long_as_the_engine_makes_it(decoding, behind, waited_s):
    step = StepModel(0.01, 0.0001, 0.5, 0.001, 0.2)
    limit, budget = StepLimit(step, 2.5), 1000.0
    found = ttft.chunk_tokens(
        worker(step_factor=2.5, budget_tokens=budget), decoding, 50 * decoding, behind, waited_s
    )
    most = limit.tokens(int(decoding), 50 * decoding, behind, waited_s=waited_s)
    tokens = min(most, budget)
    assert found == tokens - decoding
    assert ttft.chunk_tokens(worker(step_factor=2.5), 0.0, 0.0, behind, 0.0) == 100.0


def test_short_prompt_takes_as_long_as_reading_the_weights():
    # 10 new behind 100: pairs 10 x (100 + 5) = 1,050; work 0.1 + 0.105 = 0.205.
    # Read: 0.5 before GEMMs' 0.1, then 110 x 0.001, before attention's 0.105; the step adds 0.2.
    found = ttft.prefill_s(worker(), 110.0, 100.0, 0.0, 0.0)
    assert found == pytest.approx((0.205, 0.61, 0.81))


def test_load_takes_its_tokens_and_what_every_load_takes():
    assert ttft.load_s(worker(), 400.0, 0.0) == pytest.approx(0.1 + 400 * 0.001)
    assert ttft.load_s(worker(), 0.0, 0.0) == 0.0


def test_load_from_disk_is_read_there_and_crosses_the_link():
    # 400 tokens of which 100 are on disk: 0.1 + 400 x 0.001 + 100 x 0.02 = 2.5.
    slow = worker(disk_token_s=0.02)
    assert ttft.load_s(slow, 400.0, 100.0) == pytest.approx(2.5)
    assert ttft.load_s(slow, 400.0, 0.0) == pytest.approx(0.5)


def test_fetch_needs_a_network_and_room_in_the_host_tier():
    networked = worker(spare_tokens=1000.0, promised_tokens=300.0, net_tokens_per_s=100.0)
    peer = worker(net_tokens_per_s=100.0)
    assert ttft.fetch_s(networked, peer, 700.0) == pytest.approx(7.0)
    assert ttft.fetch_s(networked, peer, 701.0) == math.inf, "300 of 1,000 are promised"
    assert ttft.fetch_s(networked, peer, 0.0) == 0.0
    networked["net_tokens_per_s"] = 0.0
    assert ttft.fetch_s(networked, peer, 700.0) == math.inf
    assert ttft.fetch_s(networked, peer, 0.0) == 0.0


def test_fetch_is_as_slow_as_the_slower_of_the_two_cards():
    fast = worker(spare_tokens=1000.0, net_tokens_per_s=1e6)
    assert ttft.fetch_s(fast, worker(net_tokens_per_s=50.0), 700.0) == pytest.approx(14.0)


def test_leading_tokens_on_the_device_and_behind_them_in_host():
    # Columns 2 and 0 of the index; only 5 whole blocks of the prompt count, of 16 tokens each.
    blocks = np.array([[3, 0, 2], [9, 0, 1], [8, 0, 0]])
    device, host, disk = held = np.empty((3, 2))
    ttft.leading_tokens(blocks, np.array([2, 0]), np.array([0, 1]), 5, 16, held)
    assert device.tolist() == [2 * 16, 3 * 16]
    assert host.tolist() == [1 * 16, 2 * 16]
    assert disk.tolist() == [0, 2 * 16], "no more than count behind the device's"


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
    busy = workers(
        {}, {"link_free_s": 5.0, "link_reserved_s": 2.0, "gpu_reserved_s": 3.0, "gpu_since_s": 4.0,
             "gpu_head_s": 1.0},
    )  # fmt: skip
    assert ttft.queued_s(busy[1], now_s) == pytest.approx((link_s, gpu_s))


@pytest.mark.parametrize(
    ("decoding", "context", "step_s"),
    [
        # Weights 0.5 before GEMMs 0.2, then KV 4.0 before attention 0.4; and 0.2.
        (20.0, 4000.0, 4.7),
        # GEMMs 2.0 before weights 0.5, then KV 1.0 before attention 0.1; and 0.2.
        (200.0, 1000.0, 3.2),
    ],
)
def test_step_under_way_is_half_waited_for_and_one_more_to_load(decoding, context, step_s):
    busy = worker(decoding=decoding, decode_context_tokens=context)
    assert ttft.under_way_s(busy, 0.0) == pytest.approx(0.5 * step_s)
    assert ttft.under_way_s(busy, 64.0) == pytest.approx(1.5 * step_s)


def test_no_step_is_waited_for_where_nothing_decodes():
    assert ttft.under_way_s(worker(decode_context_tokens=500.0), 64.0) == 0.0


# -- what a delay weighs ------------------------------------------------------------------------


def objective(made, work_s, load_s, slo=SLO):
    rows = np.zeros(len(made), dtype=ESTIMATE)
    rows["work_s"], rows["load_s"] = work_s, load_s
    return ttft.objective(made, np.arange(len(made)), rows, 300.0, slo)


def three_workers(dilation=1.0):
    """Steps that read 300 tokens: 2.5, 0.5 and 1.5 s for the weights, 0.3 + 0.2 s: 3, 1, 2 s."""
    return workers({"weights_s": 2.5}, {"dilation": dilation}, {"weights_s": 1.5})


@pytest.mark.parametrize(
    ("dilation", "found"),
    [
        # TPOT: 3 x the middle step of 2 s. Idle TTFT: the second worker has 0.05 + 0.35 +
        # max(1.6, 1) = 2; the first 0.05 + 0 + max(0.9, 3) = 3.05; the third 0.05 + 5 + 2 more.
        # The limit is 5 x 2 = 10.
        (1.0, (10.0, 6.0)),
        # The floor is 0.5 s times the largest dilation, 30: 15 s, more than 10.
        (30.0, (15.0, 6.0)),
    ],
)
def test_objective_has_the_best_idle_ttft_and_the_middle_tpot(dilation, found):
    made = objective(three_workers(dilation), [0.9, 1.6, 1.0], [0.0, 0.35, 5.0])
    assert made == pytest.approx(found)
    floors = objective(
        three_workers(dilation), [0.9, 1.6, 1.0], [0.0, 0.35, 5.0], (99.0, 5, 0.5, 3)
    )
    assert floors == pytest.approx((99.0 * dilation, max(6.0, 0.5 * dilation)))


def test_objective_is_infinite_without_workers_or_times():
    assert objective(workers()[:0], [], []) == (math.inf, math.inf)
    timeless = workers({"weights_s": 0.0, "context_token_s": 0.0, "fixed_s": 0.0})
    assert objective(timeless, [1.0], [0.0]) == (math.inf, math.inf)
    assert priced(timeless)["interference_s"] == 0.0


@pytest.mark.parametrize(
    ("limit_s", "share"),
    [
        (2.0, 0.25),  # the soonest first token comes after 4 s, twice the limit: half of a half
        (4.0, 0.5),  # just in time
        (8.0, 1.0),  # in half of the time allowed
        (80.0, 1.0),
    ],
)
def test_tokens_count_less_the_later_the_first_one_comes(limit_s, share):
    rows = records(ESTIMATE, {"ttft_s": 8.0}, {"ttft_s": 4.0})
    assert ttft.interference_share(rows, limit_s) == pytest.approx(share)
    rows["ttft_s"][1] = 0.0
    assert ttft.interference_share(rows, limit_s) == 1.0


# -- the whole price ----------------------------------------------------------------------------

WINDOW_S = 10 / math.log(2)
"""Ten seconds after it was last brought up to date, recent use counts half."""
BUSY = {
    "decoding": 4.0, "decode_context_tokens": 1000.0, "resident_tokens": 1200.0, "in_flight": 6.0,
    "waiting": 2.0, "queued_tokens": 300.0, "gpu_use": 0.4, "loads_per_s": 6.0,
    "prefills_per_s": 2.0, "used_s": 3.0, "use_known": 1.0, "link_free_s": 14.0,
    "link_reserved_s": 3.0, "gpu_reserved_s": 3.0, "gpu_since_s": 12.5, "gpu_head_s": 1.0,
    "net_tokens_per_s": 10.0, "net_free_s": 13.5, "spare_tokens": 1000.0,
}  # fmt: skip


def priced(made, now_s=13.0, fetch_tokens=0.0, source=-1, output_tokens=50.0):
    """250 tokens on the first worker: 30 on the device, 20 in host; 50 will be generated."""
    rows = records(
        ESTIMATE, {"device_tokens": 30.0, "cached_tokens": 20.0, "fetch_tokens": fetch_tokens}
    )
    ttft.price(made, np.array([0]), rows, (now_s, WINDOW_S, 250.0, output_tokens), source, SLO)
    return rows[0]


def values(row, *names):
    return [float(row[name]) for name in names]


def test_price_on_a_busy_worker_equals_figures_by_hand():
    """The prompt of `test_prefill_s_counts_requests_that_decode_beside`."""
    row = priced(workers(BUSY))
    assert values(row, "new_tokens", "work_s", "compute_s") == pytest.approx([200, 5.0, 5.68])
    # Each of 4 waits for what computing takes beyond reading: 4 x (5.68 - 3.5).
    assert row["tpot_impact_s"] == pytest.approx(8.72)
    use = values(row, "gpu_use", "loads_per_s", "prefills_per_s")
    assert use == pytest.approx([0.2, 3.0, 1.0])
    # The link is free in 1 s; of 3 s of prompts, the half second since 12.5 is done.
    backlogs = values(row, "link_backlog_s", "gpu_backlog_s", "net_backlog_s")
    assert backlogs == pytest.approx([1.0, 2.5, 0.5])
    assert row["load_s"] == pytest.approx(0.1 + 20 * 0.001)
    # The step under way, 0.5 + 1,000 x 0.001 + 0.2 = 1.7 s, counts one and a half times: 2.55.
    # Waits max(1 + 0.12, 2.5) + 2.55 = 5.05; overhead 0.05, compute 5.68.
    assert row["ttft_s"] == pytest.approx(10.78)
    # A step beside all: 0.5 + (250 + 1,200) x 0.001 + 0.2 = 2.15; a fifth goes to prompts.
    assert row["tpot_s"] == pytest.approx(2.15 / 0.8)
    # Idle: TPOT 0.5 + 0.25 + 0.2 = 0.95, limit 2.85; TTFT 0.05 + 0.12 + 5 = 5.17, limit 25.85.
    # The first token comes in less than half of that, so later ones count in full.
    # An answer of 50 tokens may take 50 x 2.85 = 142.5 s. This one holds each of 6 up for
    # 5.68 - 3.5 s, its tokens for 50 x (0.01 + 0.25) s.
    added = (2.18 + 13) / 142.5
    # It is late itself with 1 / (1 + 2.398^4) at its first token, 1 / (1 + 1.0605^8) at later ones.
    late = 0.02936 + 0.38473
    # Which grows by 8 x 0.38473 x (1 - 0.38473) x 1.0605 with the share of a token's time.
    growth = 2.0082
    # Of 5 s of its prompt behind 2.5 s of others', who comes, one a second, is late in all.
    expected = 25.85 * (6 * growth * added + 5 + late)
    assert row["interference_s"] == pytest.approx(expected, rel=1e-4)
    rest = values(row, "fixed_s", "in_flight", "waiting", "queued_tokens", "resident_tokens")
    assert rest == [0.05, 6, 2, 300, 1200]
    assert values(row, "fetch_s", "load_token_s") == [0.0, 0.001]


def test_price_row_carries_the_workers_figures():
    fields = ("capacity_tokens", "h2d_bytes_per_s", "flops_per_s", "cost_per_hour", "kappa_literal")
    row = priced(workers({name: float(i) for i, name in enumerate(fields, 1)}))
    assert values(row, *fields) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_fetching_request_waits_for_the_network_of_both_ends():
    # The source's card is free at 15, ours at 13.5: 2 s of queue. 20 tokens at 10 a second: 2 s.
    # The load starts after 4 s: waits max(4 + 0.12, 2.5) + 2.55 = 6.67; TTFT 6.67 + 5.73.
    peer = {"net_free_s": 15.0, "net_tokens_per_s": 20.0}
    row = priced(workers(BUSY, peer), fetch_tokens=20.0, source=1)
    assert values(row, "net_backlog_s", "fetch_s", "ttft_s") == pytest.approx([2.0, 2.0, 12.4])


def test_tokens_count_less_when_the_queue_outlasts_the_slo():
    # 50 s of prompts: TTFT = 0.05 + 50 + 2.55 + 5.68 = 58.28 against a limit of 25.85.
    # In both the queue alone lasts longer than the least objective: 5 s more are late.
    soon, late = (priced(workers({**BUSY, "gpu_reserved_s": s})) for s in (3.0, 50.5))
    share = 0.5 * 25.85 / 58.28
    # It is late itself with 1 / (1 + (25.85 / 58.28)^4) = 0.9627 instead of 0.02936.
    more = 25.85 * (0.96274 - 0.02936)
    expected = share * (soon["interference_s"] + more)
    assert late["interference_s"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("output_tokens", [50.0, 1.0])
def test_answers_that_are_late_already_lose_no_more(output_tokens):
    # Nineteen parts in twenty go to prompts: a token takes 43 s and may take 2.85. What is lost is
    # this request, and those that come while its prompt of 5 s computes.
    row = priced(workers({**BUSY, "gpu_use": 6.0}), output_tokens=output_tokens)
    first = 1 / (1 + (25.85 / row["ttft_s"]) ** 4)
    assert row["interference_s"] == pytest.approx(25.85 * (1 + first + 5))


def test_token_comes_no_later_than_the_bound_on_steps_allows():
    def bounded_s(**changes):
        worker = {
            "step_factor": 2.5, "weights_s": 0.005, "context_token_s": 1e-6, "fixed_s": 0.002,
            "decoding": 4.0, "decode_context_tokens": 12_000.0, "token_s": 1e-5,
        }  # fmt: skip
        return ttft.bounded_s(workers(worker | changes), 0)

    # One alone: 5 + 3 + 2 ms.
    assert bounded_s() == pytest.approx(0.025)
    assert bounded_s(step_factor=0.0) == math.inf
    # A tile of 128 tokens of 1 ms each.
    assert bounded_s(token_s=1e-3) == pytest.approx(0.130)
    # Of experts of 100 ms the four leave 65.6 to a prompt, with 0.9 of that in products beside
    # the 5 + 100 + 2 ms that such a step takes.
    mixture = {"experts_s": 0.1, "expert_idle": 0.9}
    assert bounded_s(**mixture) == pytest.approx(0.107 + 0.9 * 0.0656, abs=1e-4)


def test_prompts_hold_up_bounded_steps_by_a_quarter():
    def lost(step_factor):
        made = workers({**BUSY, "gpu_use": 0.0, "step_factor": step_factor, "gpu_reserved_s": 0.0})
        row = priced(made)
        # 4 decode; a token takes 2.15 s and may take 2.85, a first one 25.85.
        held_up_s = row["tpot_impact_s"] / 4
        late = 1 / (1 + (25.85 / row["ttft_s"]) ** 4) + 1 / (1 + (2.85 / 2.15) ** 8)
        others = row["interference_s"] / 25.85 - 4.5 - late
        slow = 1 / (1 + (2.85 / 2.15) ** 8)
        growth = 8 * slow * (1 - slow) * 2.85 / 2.15
        return others / (6 * growth) - 13 / 142.5, held_up_s / 142.5

    for factor, share in ((0.0, 1.0), (2.5, 0.25)):
        added, held_up = lost(factor)
        assert added == pytest.approx(share * held_up)


def test_queued_prompts_wait_for_those_that_decode_in_bounded_steps():
    # A prompt gets the 0.5 s of the weights' reads less 0.04 s for 4 that decode, and having waited
    # ten times too long ten times that: 460 tokens and 4, in tiles 512. Such a step takes
    # 5.12 + 1,000 x 0.001 + 0.2 = 6.32 s, of which 5.08 s are the prompt's.
    made = workers({**BUSY, "step_factor": 1.0, "budget_tokens": 1000.0})
    assert priced(made)["gpu_backlog_s"] == pytest.approx(2.5 * 6.32 / 5.08)
    assert priced(workers(BUSY))["gpu_backlog_s"] == pytest.approx(2.5)


PLACES = {"decoding": 4.0, "in_flight": 4.0, "spent_at_s": 13.0}


@pytest.mark.parametrize(
    ("changed", "wait_s"),
    [
        ({"max_sequences": 5.0}, 0.0),
        # One is ahead of it: an answer of 50 steps of 0.5 + 0.25 + 0.2 s, by 4 at a time.
        ({"max_sequences": 4.0}, 47.5 / 4),
        ({"max_sequences": 3.0}, 2 * 47.5 / 3),
        # Three ended in 92.5 s of decoding: with that one answer 140 s by 4 ends.
        ({"max_sequences": 4.0, "spent_s": 92.5, "ends": 3.0}, 35 / 4),
        # Ten seconds ago: half of it counts, and 4 have decoded since.
        ({"max_sequences": 4.0, "spent_s": 105.0, "ends": 2.0, "spent_at_s": 3.0}, 70 / 4),
    ],
)
def test_request_waits_for_a_place_that_another_leaves(changed, wait_s):
    row = priced(workers({**PLACES, **changed}))
    alone = priced(workers({**PLACES, "max_sequences": math.inf}))
    load_s = 0.1 + 20 * 0.001
    expected = max(wait_s, load_s) - load_s
    assert row["ttft_s"] - alone["ttft_s"] == pytest.approx(expected)


def test_place_that_is_taken_makes_later_ones_late():
    def lost(prefills_per_s):
        made = workers({**PLACES, "max_sequences": 4.0, "prefills_per_s": prefills_per_s,
                        "used_s": 13.0})  # fmt: skip
        row = priced(made)
        return row["interference_s"] / (0.5 * 25.85 / row["ttft_s"] * 25.85)

    # It waits 11.875 s and the next one twice that: who comes in those, 0.6 a second, is late.
    assert lost(0.6) - lost(0.0) == pytest.approx(0.6 * 11.875)


@pytest.mark.parametrize(
    ("queue_s", "late_s"),
    [
        (0.0, 4.5),  # 5 s of prompt: who comes in its first 4.5 s waits for more than 0.5 s
        (0.2, 4.7),
        (0.5, 5.0),
        (2.0, 5.0),  # who comes in the first 1.5 s is late already
    ],
)
def test_request_behind_a_long_prompt_is_late(queue_s, late_s):
    # None is in flight; 3 come every 5 s.
    made = workers({"prefills_per_s": 0.6, "used_s": 13.0, "gpu_reserved_s": queue_s,
                    "gpu_since_s": 13.0})  # fmt: skip
    row = priced(made)
    assert row["work_s"] == pytest.approx(5.0)
    late = 1 / (1 + (25.85 / row["ttft_s"]) ** 4) + 1 / (1 + (2.85 / 0.95) ** 8)
    assert row["interference_s"] == pytest.approx(25.85 * (0.6 * late_s + late))


def test_use_is_of_the_part_of_the_window_that_is_known():
    # Of a window of which half was known, three quarters are, ten seconds later: 0.2 in those.
    assert priced(workers({**BUSY, "use_known": 0.5}))["gpu_use"] == pytest.approx(0.2 / 0.75)
    # At once after the first prompt a tenth counts as known.
    first = {**BUSY, "gpu_use": 0.02, "use_known": 0.0, "used_s": 13.0}
    assert priced(workers(first))["gpu_use"] == pytest.approx(0.2)


def test_clock_that_was_set_back_does_not_make_use_grow():
    assert priced(workers(BUSY), now_s=1.0)["gpu_use"] == pytest.approx(0.4)


def test_overload_does_not_stretch_a_token_for_ever():
    # Use of 3 counts as 0.95: 2.15 / 0.05.
    row = priced(workers({**BUSY, "gpu_use": 6.0}))
    assert values(row, "gpu_use", "tpot_s") == pytest.approx([3.0, 2.15 / 0.05])


def test_idle_s_equals_figures_by_hand():
    # 200 new behind 50 loaded: overhead 0.05 + load 0.15; compute max(5, 2 x 0.75) + 0.4.
    rows = records(ESTIMATE, {"cached_tokens": 50.0})
    ttft_s, tpot_s, *_ = ttft.median_idle(workers(), np.array([0]), rows, 250.0)
    assert ttft_s == pytest.approx(0.05 + 0.15 + 5.4)
    assert tpot_s == pytest.approx(0.95)
