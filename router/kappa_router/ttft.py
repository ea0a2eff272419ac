"""The time to first token of a request on every worker: its price, by compiled arithmetic.

Each formula is for one worker, in real seconds; the loops over workers stand at the end.
`router.fleet` keeps the records; the formulas of a step are those of `kappa.step_seconds`. Queues
are arithmetic here: the work reserved and not yet done, less what the engine must have done since
it last finished some. Their forecast step by step is `router.engine_queue`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa import step_seconds
from kappa.compiled import compiled
from kappa_router.decision import Floats, Slots
from kappa_router.reservations import Rows, Workers, fade, spent

# One worker's record; all are floats.
_IDENTITY = (
    "load_token_s", "load_fixed_s", "disk_token_s", "token_s", "pair_s", "weights_s",
    "context_token_s", "fixed_s", "experts_s", "expert_idle", "exposed", "comm_token_s",
    "overhead_s", "dilation", "budget_tokens", "step_factor", "capacity_tokens", "max_sequences",
    "kappa_literal", "h2d_bytes_per_s", "flops_per_s", "cost_per_hour", "net_tokens_per_s",
    "seen_s", "compute_sd", "link_sd", "overhead_sd_s", "ttft_sd",
)  # fmt: skip
# Reserved and not done, on link and gpu: since when, and how much, the engine computes at the head
# of its queue; requests and tokens by state; recent use, as of `used_s`, and how much of its window
# is known; the network card; the host tier's room, and what of it is promised to fetches; recent
# seconds of decoding, and how many requests ended; `factor` of a step of those that decode, and of
# one with one more, with its weight reads: kept, since logarithms and powers are most of what a
# price costs.
_LOAD = (
    "link_reserved_s", "link_free_s", "gpu_reserved_s", "gpu_since_s", "gpu_head_s", "in_flight",
    "waiting", "queued_tokens", "resident_tokens", "decoding", "decode_context_tokens", "gpu_use",
    "loads_per_s", "prefills_per_s", "used_s", "use_known", "net_free_s", "spare_tokens",
    "promised_tokens", "spent_s", "ends", "spent_at_s", "decoding_factor", "one_more_factor",
    "one_more_weights_s",
)  # fmt: skip
# `factors`: as `kappa_router.engine_fit.EngineSpeed` has them.
_FIGURES = tuple((name, np.float64) for name in (*_IDENTITY, *_LOAD))
WORKER = np.dtype([*_FIGURES, ("factors", np.float64, step_seconds.FACTORS)])

MOST_USE = 0.95
# The least share of the window of recent use that it is taken to be known for.
LEAST_KNOWN = 0.1
# Of what the objective allows a first token, the wait above which later ones count less: a share
# that simulation chose, not derived (docs/adr/0005); as are the two below (docs/adr/0179).
MOST_WAIT = 0.5
# Of the seconds that a prompt computes, how many hold up those that decode in bounded steps.
BOUNDED_SHARE = 0.25
# How surely a request that is predicted to be late will be: at its first token, at later ones.
LATE_POWERS = 4.0, 8.0

Slo = tuple[float, float, float, float]
"""As `kappa.slo.ServiceObjective`."""


@compiled
def leading_tokens(
    blocks: NDArray[np.int64], columns: Slots, slots: Slots, usable_blocks: int, block_tokens: int,
    held: Floats,
) -> None:  # fmt: skip
    """Fill in leading tokens that each of `slots` has on the device, further ones, and of these
    on disk: shape (3, slots). (To return arrays takes numba a microsecond each.)

    blocks: shape (3, the index's columns), as its `match_columns` gives them, of which
    `usable_blocks` count together, the deepest last; columns: of each slot.
    """
    for i in range(len(slots)):
        column = columns[slots[i]]
        here = min(blocks[0, column], usable_blocks)
        held[0, i] = here * block_tokens
        behind = min(blocks[1, column], usable_blocks - here)
        held[1, i] = behind * block_tokens
        held[2, i] = min(blocks[2, column], behind) * block_tokens


# -- one worker -----------------------------------------------------------------------------------


@compiled
def bounded_s(workers: Workers, slot: int) -> float:
    """Most seconds per token where `kappa.cost.StepLimit` bounds steps, elsewhere infinite."""
    worker = workers[slot]
    if worker.step_factor <= 0:
        return math.inf
    read_s, fixed_s = worker.decode_context_tokens * worker.context_token_s, worker.fixed_s
    limit_s = step_seconds.limit_s(worker, worker.step_factor, worker.decoding, read_s)
    # Whole tiles are computed, and a mixture's reads made worth it, whatever they take.
    tokens = (worker.decoding // step_seconds.TILE_TOKENS + 1) * step_seconds.TILE_TOKENS
    mixed_s = step_seconds.least_mixed_s(worker, worker.decoding)
    return max(limit_s, tokens * worker.token_s + fixed_s, mixed_s)


@compiled
def chunk_tokens(
    worker: Any, decoding: float, decode_context: float, behind: float, waited_s: float
) -> float:
    """Most tokens of a prompt in a step: the budget, or what `kappa.cost.StepLimit` leaves beside
    those that decode, for a short prompt that has waited."""
    late = max(waited_s / (step_seconds.LATE_S * worker.dilation), 1.0)
    most = step_seconds.limited_tokens(
        worker, worker.step_factor, decoding, decode_context, behind, late
    )
    if math.isinf(most):
        return worker.budget_tokens
    return max(min(most, worker.budget_tokens) - decoding, 1.0)


@compiled
def prefill_s(
    worker: Any, prompt_tokens: float, held_tokens: float, decoding: float, decode_context: float
) -> tuple[float, float, float]:
    """A prompt's own gpu work, beside requests that decode (none: an idle engine).

    Returns what it adds to a busy engine; the least its steps take, for reading weights and KV; and
    what they take beside those that decode there.
    """
    new = prompt_tokens - held_tokens
    behind_tokens = held_tokens + 0.5 * new
    steps = np.ceil(new / chunk_tokens(worker, decoding, decode_context, behind_tokens, 0.0))
    token_s = worker.token_s + worker.comm_token_s
    work_s = step_seconds.computing_s(new, new * behind_tokens, token_s, worker.pair_s)
    tokens, pairs = new + steps * decoding, new * behind_tokens + steps * decode_context
    reads = steps * (prompt_tokens + decode_context)
    read_s = step_seconds.weights_read_s(worker, steps, tokens) + reads * worker.context_token_s
    compute_s = step_seconds.steps_s(worker, steps, tokens, pairs, reads)
    scale = step_seconds.factor(worker.factors, tokens / steps)
    return scale * work_s, scale * read_s, scale * compute_s


@compiled
def load_s(worker: Any, cached_tokens: float, disk_tokens: float) -> float:
    """The load of a cached prefix, some of it from disk; none takes no time."""
    if cached_tokens <= 0:
        return 0.0
    link_s = step_seconds.transfer_s(cached_tokens, worker.load_token_s, worker.load_fixed_s)
    return link_s + disk_tokens * worker.disk_token_s


@compiled
def queued_s(worker: Any, now_s: float) -> tuple[float, float]:
    """Work queued on link and gpu."""
    link_s = min(max(worker.link_free_s - now_s, 0.0), worker.link_reserved_s)
    done_s = min(max(now_s - worker.gpu_since_s, 0.0), worker.gpu_head_s)
    return max(link_s, 0.0), max(worker.gpu_reserved_s - done_s, 0.0)


@compiled
def beside_decoding(worker: Any, queue_s: float) -> float:
    """The seconds that `queue_s` of queued prompts take in bounded steps, which are those of the
    requests that decode as well."""
    decoding, context = worker.decoding, worker.decode_context_tokens
    if queue_s <= 0 or decoding <= 0 or worker.step_factor <= 0:
        return queue_s
    tokens = chunk_tokens(worker, decoding, context, 0.0, queue_s)
    work_s = tokens * (worker.token_s + worker.comm_token_s)
    step_s = step_seconds.steps_s(worker, 1.0, tokens + decoding, context, context)
    return queue_s * max(step_s / work_s, 1.0) if work_s > 0 else queue_s


@compiled
def under_way_s(worker: Any, cached_tokens: float) -> float:
    """The wait for the step of decoding that is under way, where there is one.

    Half a step on average; a load that has landed is noticed one step later.
    """
    decoding, context = worker.decoding, worker.decode_context_tokens
    if decoding <= 0:
        return 0.0
    step_s = step_seconds.steps_s(worker, 1.0, decoding, context, context) * worker.decoding_factor
    return step_s * (1.5 if cached_tokens > 0 else 0.5)


@compiled
def place_waits_s(
    worker: Any, answer_s: float, now_s: float, window_s: float
) -> tuple[float, float]:
    """The waits of the request, and of the next one, for a place among the `max_sequences` that the
    engine runs at a time; 0 where one is free.

    Those that run end as often per second of decoding as they lately did. One answer of `answer_s`
    counts as one more of which that is known.
    """
    ahead = worker.in_flight + 1 - worker.max_sequences
    if ahead < 0:
        return 0.0, 0.0
    spent_s, ends = spent(worker, now_s, window_s)
    all_s, often = spent_s + answer_s, (ends + 1) * worker.max_sequences
    return ahead * all_s / often, (ahead + 1) * all_s / often


@compiled
def lateness(seconds: float, limit_s: float, power: float) -> float:
    """The likelihood that a request is late of which so many seconds are predicted: half at the
    limit."""
    if seconds <= 0 or math.isinf(limit_s):
        return 0.0
    return 1 / (1 + (limit_s / seconds) ** power)


@compiled
def reading_step_s(worker: Any, context_tokens: float) -> float:
    """A step that waits for memory: it reads the weights and the KV of `context_tokens`."""
    read_s = worker.one_more_weights_s + context_tokens * worker.context_token_s
    return (read_s + worker.fixed_s) * worker.one_more_factor


@compiled
def fetch_s(worker: Any, source: Any, tokens: float) -> float:
    """`tokens` from `source` over the slower of two network cards: for ever where there is none, or
    no room for them in the tier."""
    if tokens > worker.spare_tokens - worker.promised_tokens:
        return math.inf
    if tokens <= 0:
        return 0.0
    rate = min(worker.net_tokens_per_s, source.net_tokens_per_s)
    return tokens / rate if rate > 0 else math.inf


@compiled
def deviation(worker: Any, row: Any) -> float:
    """Standard deviation of the logarithm of a predicted TTFT."""
    load_s = row.load_s * worker.link_sd
    compute_s = (row.compute_s + row.gpu_backlog_s) * worker.compute_sd
    unsure_s = math.sqrt(load_s * load_s + compute_s * compute_s + worker.overhead_sd_s**2)
    share = unsure_s / row.ttft_s if row.ttft_s > 0 else 0.0
    return math.sqrt(share * share + worker.ttft_sd**2)


# -- all workers ----------------------------------------------------------------------------------


@compiled
def objective(
    workers: Workers, slots: Slots, rows: Rows, prompt_tokens: float, slo: Slo
) -> tuple[float, float]:
    """Seconds that the first token and that each later one may take, by the service objective
    (`kappa.slo`) of the best and of the middle idle worker.

    `rows` has `work_s` and `load_s` filled in.
    """
    if not len(slots):
        return math.inf, math.inf
    ttft_floor_s, ttft_factor, tpot_floor_s, tpot_factor = slo
    alone_s = np.empty(len(slots))
    idle_s, dilation = math.inf, 0.0
    for i in range(len(slots)):
        worker, row = workers[slots[i]], rows[i]
        alone_s[i] = reading_step_s(worker, prompt_tokens)
        compute_s = max(row.work_s, alone_s[i])
        idle_s = min(idle_s, worker.overhead_s + row.load_s + compute_s)
        dilation = max(dilation, worker.dilation)
    middle = len(alone_s) // 2
    tpot_limit_s = tpot_factor * np.partition(alone_s, middle)[middle]
    tpot_limit_s = max(tpot_limit_s, tpot_floor_s * dilation)
    if tpot_limit_s <= 0:
        return math.inf, math.inf
    return max(ttft_floor_s * dilation, ttft_factor * idle_s), tpot_limit_s


@compiled
def interference_share(rows: Rows, ttft_limit_s: float) -> float:
    """The share of decode interference that counts, the same for all workers: 1 while first tokens
    are in time.

    Who waits for a first token past its objective gains nothing by quicker tokens after it, and
    spreading those that decode then lengthens the queues. `rows` has `ttft_s` filled in.
    """
    soonest_s = math.inf
    for i in range(len(rows)):
        soonest_s = min(soonest_s, rows[i].ttft_s)
    return min(MOST_WAIT * ttft_limit_s / soonest_s, 1.0) if soonest_s > 0 else 1.0


@compiled
def price_interference(
    workers: Workers, slots: Slots, rows: Rows, lengths: tuple[float, float], own_s: Floats,
    slo: Slo,
) -> None:  # fmt: skip
    """Put the cost of decode interference, and of being late, in the place of its seconds, in a
    price's `rows`.

    lengths: tokens of the prompt, and of the output. own_s: of each worker, a step of all in flight
    and the request, without prompts, and the waits for a place of the request and of the next,
    shape (3, slots).
    """
    prompt_tokens, output_tokens = lengths
    ttft_limit_s, tpot_limit_s = objective(workers, slots, rows, prompt_tokens, slo)
    share = interference_share(rows, ttft_limit_s)
    answer_s = max(output_tokens, 1.0) * tpot_limit_s
    for i in range(len(slots)):
        worker, row = workers[slots[i]], rows[i]
        if math.isinf(answer_s):
            row.interference_s = 0.0
            continue
        token_s = worker.token_s + worker.comm_token_s + prompt_tokens * worker.context_token_s
        held_up_s = row.interference_s * (BOUNDED_SHARE if worker.step_factor > 0 else 1.0)
        each_s = min(row.tpot_s, max(bounded_s(workers, slots[i]), own_s[0, i]))
        slow = lateness(each_s, tpot_limit_s, LATE_POWERS[1])
        added = min(token_s / tpot_limit_s + held_up_s / answer_s, 1.0)
        # By how much more likely each in flight is to be late: the derivative of `lateness`.
        growth = LATE_POWERS[1] * slow * (1 - slow) * tpot_limit_s / each_s if slow > 0 else 0.0
        # For so much longer who comes waits past the least objective of a first token.
        least_s, queue_s = slo[0] * worker.dilation, max(row.gpu_backlog_s, own_s[1, i])
        next_s = max(row.gpu_backlog_s + row.work_s, own_s[2, i])
        late_s = max(next_s - least_s, 0.0) - max(queue_s - least_s, 0.0)
        own = slow + lateness(row.ttft_s, ttft_limit_s, LATE_POWERS[0])
        lost = own + worker.in_flight * growth * added + row.prefills_per_s * late_s
        row.interference_s = share * ttft_limit_s * lost


@compiled
def price(
    workers: Workers, slots: Slots, rows: Rows, request: tuple[float, float, float, float],
    source: int, slo: Slo,
) -> None:  # fmt: skip
    """Price a request on each of `slots`; `rows`, a record each, is filled in.

    `rows` has `device_tokens`, `cached_tokens` and of these `disk_tokens`, and `fetch_tokens` where
    they come from the worker in place `source` (-1: nothing is fetched); whatever else it has is
    overwritten. request: the time, the seconds that recent use looks back, tokens of the prompt,
    and of the output.
    """
    now_s, window_s, prompt_tokens, output_tokens = request
    own_s = np.empty((3, len(slots)))
    for i in range(len(slots)):
        worker, row = workers[slots[i]], rows[i]
        cached = row.cached_tokens
        held = row.device_tokens + cached
        row.new_tokens = prompt_tokens - held
        row.load_token_s = worker.load_token_s
        row.fixed_s = worker.overhead_s
        row.in_flight = worker.in_flight
        row.waiting = worker.waiting
        row.queued_tokens = worker.queued_tokens
        row.resident_tokens = worker.resident_tokens
        row.capacity_tokens = worker.capacity_tokens
        row.h2d_bytes_per_s = worker.h2d_bytes_per_s
        row.flops_per_s = worker.flops_per_s
        row.cost_per_hour = worker.cost_per_hour
        row.kappa_literal = worker.kappa_literal
        row.work_s, read_s, row.compute_s = prefill_s(
            worker, prompt_tokens, held, worker.decoding, worker.decode_context_tokens
        )
        row.interference_s = max(row.compute_s - read_s, 0.0)
        row.tpot_impact_s = worker.decoding * row.interference_s
        left = fade(worker.used_s, now_s, window_s)
        known = max(worker.use_known * left + 1 - left, LEAST_KNOWN)
        row.gpu_use = worker.gpu_use * left / known
        row.loads_per_s = worker.loads_per_s * left
        row.prefills_per_s = worker.prefills_per_s * left
        row.load_s = load_s(worker, cached, row.disk_tokens)
        link_s, gpu_s = queued_s(worker, now_s)
        gpu_s = beside_decoding(worker, gpu_s)
        row.net_backlog_s, start_s = max(worker.net_free_s - now_s, 0.0), link_s
        if source >= 0:
            row.net_backlog_s = max(row.net_backlog_s, workers[source].net_free_s - now_s)
            row.fetch_s = fetch_s(worker, workers[source], row.fetch_tokens)
            start_s = max(link_s, row.net_backlog_s + row.fetch_s)
        else:
            row.fetch_tokens = row.fetch_s = 0.0
        row.link_backlog_s, row.gpu_backlog_s = link_s, gpu_s
        step_s = reading_step_s(worker, prompt_tokens + worker.resident_tokens)
        places_s = place_waits_s(worker, output_tokens * step_s, now_s, window_s)
        own_s[0, i], own_s[1, i], own_s[2, i] = step_s, places_s[0], places_s[1]
        wait_s = max(start_s + row.load_s, gpu_s, own_s[1, i]) + under_way_s(worker, cached)
        row.ttft_s = worker.overhead_s + wait_s + row.compute_s
        row.ttft_sd = deviation(worker, row)
        row.tpot_s = step_s / (1 - min(row.gpu_use, MOST_USE))
    price_interference(workers, slots, rows, (prompt_tokens, output_tokens), own_s, slo)


class IdleMedians(NamedTuple):
    """The price of a request on the median worker with nothing else to do."""

    # Seconds to the first token, and per output token.
    ttft_s: float
    tpot_s: float
    dilation: float
    # The least gpu seconds that the request adds to any worker.
    least_work_s: float


@compiled
def median_idle(workers: Workers, slots: Slots, rows: Rows, prompt_tokens: float) -> IdleMedians:
    """Medians over workers with the prefix of the best holder among `rows` in their host tiers. A
    median is the least figure that half of them reach, as `kappa.slo.median_node` has it."""
    held_tokens, least_s = 0.0, math.inf
    dilations = np.empty(len(slots))
    for i in range(len(slots)):
        held_tokens = max(held_tokens, rows[i].device_tokens + rows[i].cached_tokens)
        least_s = min(least_s, rows[i].work_s)
        dilations[i] = workers[slots[i]].dilation
    ttft_s, tpot_s = np.empty(len(slots)), np.empty(len(slots))
    for i in range(len(slots)):
        worker = workers[slots[i]]
        compute_s = prefill_s(worker, prompt_tokens, held_tokens, 0.0, 0.0)[2]
        ttft_s[i] = worker.overhead_s + load_s(worker, held_tokens, 0.0) + compute_s
        tpot_s[i] = reading_step_s(worker, prompt_tokens)
    k = (len(slots) - 1) // 2
    ttft_s, tpot_s = np.partition(ttft_s, k), np.partition(tpot_s, k)
    return IdleMedians(ttft_s[k], tpot_s[k], np.partition(dilations, k)[k], least_s)
