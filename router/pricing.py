"""What a request takes on every worker: arithmetic over the fleet's matrix, and nothing kept.

Each formula is for one worker, a column of the matrix (its rows stand below), in real seconds; the
loops over workers stand at the end. All is compiled. `router.fleet` keeps the matrix; the queues'
forecast step by step is elsewhere (`router.shadow`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from router.offers import Floats

# Rows of the fleet's matrix: one quantity each, a column per worker.
# What a worker is: seconds per token to load, to compute, per pair of tokens to attend, to read the
# weights and a token of context; limits and prices; when it was last heard from; its network.
LOAD_TOKEN, LOAD_FIXED, TOKEN, PAIR, WEIGHTS, CONTEXT, STEP = range(7)
BUDGET, CAPACITY, CRIT, LINK_RATE, FLOPS, COST, OVERHEAD, SEEN, NET = range(7, 16)
# What it has to do: work reserved and not done on link and gpu, since when and how much the engine
# computes at the head of its queue, requests and tokens by state, use of late.
LINK_OUT, LINK_FREE, GPU_OUT, GPU_SINCE, GPU_HEAD, IN_FLIGHT, WAITING = range(16, 23)
QUEUED, RESIDENT, DECODING, DECODE_CONTEXT, GPU_USE, USE_AT = range(23, 29)
DILATION, LOADS, PREFILLS, NET_FREE, SPARE, PROMISED = range(29, 35)
ROWS = 35

# Rows of a priced request: the float arrays of `router.offers.Offers`, a column per worker asked.
OUT_NEW, OUT_LOAD, OUT_LOAD_TOKEN, OUT_WORK, OUT_COMPUTE, OUT_FIXED = range(6)
OUT_LINK_BACKLOG, OUT_GPU_BACKLOG, OUT_HARM, OUT_DECODE, OUT_GPU_USE, OUT_LOADS = range(6, 12)
OUT_PREFILLS, OUT_IN_FLIGHT, OUT_WAITING, OUT_QUEUED, OUT_RESIDENT, OUT_CAPACITY = range(12, 18)
OUT_LINK_RATE, OUT_FLOPS, OUT_COST, OUT_CRIT, OUT_FETCH, OUT_NET_BACKLOG = range(18, 24)
OUT_TTFT, OUT_TPOT, OUT_OWN_LATE = range(24, 27)
OUT_ROWS = 27

MOST_USE = 0.95
# Shares that simulation chose, not derived (docs/adr/0005): of what the objective allows a token,
# what its step may take; of what it allows a first token, the wait above which later ones count
# less; of the time that prompts take, by which steps count as longer.
MOST_STEP = 0.5
MOST_WAIT = 0.5
FELT_USE = 0.5

Slots = NDArray[np.intp]
Slo = tuple[float, float, float]
"""Least TTFT objective in seconds, and what TTFT and TPOT may be of an idle worker's."""


@compiled
def leading_tokens(
    blocks: NDArray[np.int64], columns: Slots, slots: Slots, usable_blocks: int, block_tokens: int
) -> tuple[Floats, Floats]:
    """Leading tokens that each of `slots` has on the device, and further ones in host.

    blocks: shape (2, the index's columns), on the device and in host, of which `usable_blocks`
    count together; columns: of each slot.
    """
    device, host = np.empty(len(slots)), np.empty(len(slots))
    for i in range(len(slots)):
        column = columns[slots[i]]
        here = min(blocks[0, column], usable_blocks)
        device[i] = here * block_tokens
        host[i] = min(blocks[1, column], usable_blocks - here) * block_tokens
    return device, host


@compiled
def prefill_s(
    cells: Floats, slot: int, prompt_tokens: float, held_tokens: float,
    decoding: float, decode_context: float,
) -> tuple[float, float, float]:  # fmt: skip
    """A prompt's own gpu work, beside requests that decode (none: an idle engine).

    Returns what it adds to a busy engine; the least its steps take, for reading weights and KV; and
    what they take beside those that decode there.
    """
    new = prompt_tokens - held_tokens
    steps = np.ceil(new / cells[BUDGET, slot])
    pairs = new * (held_tokens + 0.5 * new)
    token_s, pair_s = cells[TOKEN, slot], cells[PAIR, slot]
    work_s = new * token_s + pairs * pair_s
    beside_s = decoding * token_s + decode_context * pair_s
    read_s = steps * (
        cells[WEIGHTS, slot] + (prompt_tokens + decode_context) * cells[CONTEXT, slot]
    )
    compute_s = max(work_s + steps * beside_s, read_s) + steps * cells[STEP, slot]
    return work_s, read_s, compute_s


@compiled
def load_s(cells: Floats, slot: int, cached_tokens: float) -> float:
    """The load of a cached prefix; none takes no time."""
    if cached_tokens <= 0:
        return 0.0
    return cached_tokens * cells[LOAD_TOKEN, slot] + cells[LOAD_FIXED, slot]


@compiled
def backlogs_s(cells: Floats, slot: int, now_s: float) -> tuple[float, float]:
    """Work queued on link and gpu."""
    link_s = min(max(cells[LINK_FREE, slot] - now_s, 0.0), cells[LINK_OUT, slot])
    done_s = min(max(now_s - cells[GPU_SINCE, slot], 0.0), cells[GPU_HEAD, slot])
    return max(link_s, 0.0), max(cells[GPU_OUT, slot] - done_s, 0.0)


@compiled
def under_way_s(cells: Floats, slot: int, cached_tokens: float) -> float:
    """The wait for the step of decoding that is under way, where there is one.

    Half of it on average; a load that has landed is heard of one step later.
    """
    decoding, context = cells[DECODING, slot], cells[DECODE_CONTEXT, slot]
    if decoding <= 0:
        return 0.0
    beside_s = decoding * cells[TOKEN, slot] + context * cells[PAIR, slot]
    read_s = cells[WEIGHTS, slot] + context * cells[CONTEXT, slot]
    step_s = max(beside_s, read_s) + cells[STEP, slot]
    return step_s * (1.5 if cached_tokens > 0 else 0.5)


@compiled
def reading_step_s(cells: Floats, slot: int, context_tokens: float) -> float:
    """A step that waits for memory: the weights and so many tokens' KV are read."""
    read_s = cells[WEIGHTS, slot] + context_tokens * cells[CONTEXT, slot]
    return read_s + cells[STEP, slot]


@compiled
def fetch_s(cells: Floats, slot: int, tokens: float) -> float:
    """`tokens` over the network: for ever where there is none, or no room for them in the tier."""
    if tokens > cells[SPARE, slot] - cells[PROMISED, slot]:
        return math.inf
    if tokens <= 0:
        return 0.0
    net = cells[NET, slot]
    return tokens / net if net > 0 else math.inf


@compiled
def objective(
    cells: Floats, slots: Slots, priced: Floats, prompt_tokens: float, output_tokens: float,
    slo: Slo,
) -> tuple[float, float, float]:  # fmt: skip
    """Delayed tokens that weigh as much as one first token delayed as long; limits in seconds.

    Returns the tokens, what a token and what the first one may take. By the service objective
    (`kappa.slo`), TTFT over TPOT, of the best and the middle idle worker; but never more tokens
    than there will be. `priced` has rows WORK and LOAD filled in.
    """
    if not len(slots):
        return output_tokens, math.inf, math.inf
    ttft_floor_s, ttft_factor, tpot_factor = slo
    alone_s = np.empty(len(slots))
    idle_s, dilation = math.inf, 0.0
    for i in range(len(slots)):
        slot = slots[i]
        alone_s[i] = reading_step_s(cells, slot, prompt_tokens)
        compute_s = max(priced[OUT_WORK, i], alone_s[i])
        idle_s = min(idle_s, cells[OVERHEAD, slot] + priced[OUT_LOAD, i] + compute_s)
        dilation = max(dilation, cells[DILATION, slot])
    tpot_limit_s = tpot_factor * np.sort(alone_s)[len(alone_s) // 2]
    if tpot_limit_s <= 0:
        return output_tokens, math.inf, math.inf
    ttft_limit_s = max(ttft_floor_s * dilation, ttft_factor * idle_s)
    return min(ttft_limit_s / tpot_limit_s, output_tokens), tpot_limit_s, ttft_limit_s


@compiled
def crowd_share(priced: Floats, ttft_limit_s: float) -> float:
    """How much of the crowd counts, the same for all workers: all of it while first tokens are due.

    Who waits for a first token past its objective gains nothing by quicker tokens after it, and
    spreading those that decode then lengthens the queues. `priced` has row TTFT filled in.
    """
    soonest_s = math.inf
    for ttft_s in priced[OUT_TTFT]:
        soonest_s = min(soonest_s, ttft_s)
    return min(MOST_WAIT * ttft_limit_s / soonest_s, 1.0) if soonest_s > 0 else 1.0


@compiled
def blank_rows(rows: int, columns: int) -> Floats:
    """An array whose rows are no whole memory pages apart, where they would share cache lines."""
    wide = (columns + 7) // 8 * 8
    if wide % 512 == 0:
        wide += 8
    return np.empty((rows, wide))[:, :columns]


@compiled
def price(
    cells: Floats, slots: Slots, now_s: float, window_s: float, prompt_tokens: float,
    output_tokens: float, device_tokens: Floats, cached_tokens: Floats,
    fetch_tokens: Floats, source: int, slo: Slo,
) -> Floats:  # fmt: skip
    """A request on each of `slots`: shape (OUT_ROWS, len(slots)).

    device_tokens, cached_tokens, fetch_tokens: shape (len(slots),); the last is empty where nothing
    is fetched, else how much comes from the worker in column `source`.
    """
    fetches = len(fetch_tokens) > 0
    out = blank_rows(OUT_ROWS, len(slots))
    for i in range(len(slots)):
        slot, cached = slots[i], cached_tokens[i]
        held = device_tokens[i] + cached
        out[OUT_NEW, i] = prompt_tokens - held
        out[OUT_LOAD_TOKEN, i] = cells[LOAD_TOKEN, slot]
        out[OUT_FIXED, i] = cells[OVERHEAD, slot]
        out[OUT_IN_FLIGHT, i] = cells[IN_FLIGHT, slot]
        out[OUT_WAITING, i] = cells[WAITING, slot]
        out[OUT_QUEUED, i] = cells[QUEUED, slot]
        out[OUT_RESIDENT, i] = cells[RESIDENT, slot]
        out[OUT_CAPACITY, i] = cells[CAPACITY, slot]
        out[OUT_LINK_RATE, i] = cells[LINK_RATE, slot]
        out[OUT_FLOPS, i] = cells[FLOPS, slot]
        out[OUT_COST, i] = cells[COST, slot]
        out[OUT_CRIT, i] = cells[CRIT, slot]

        decoding = cells[DECODING, slot]
        work_s, read_s, compute_s = prefill_s(
            cells, slot, prompt_tokens, held, decoding, cells[DECODE_CONTEXT, slot]
        )
        out[OUT_WORK, i], out[OUT_COMPUTE, i] = work_s, compute_s
        out[OUT_HARM, i] = decoding * max(compute_s - read_s, 0.0)
        # A clock that was set back must not make use grow without bound.
        fade = math.exp(min(cells[USE_AT, slot] - now_s, 0.0) / window_s)
        gpu_use = cells[GPU_USE, slot] * fade
        out[OUT_GPU_USE, i] = gpu_use
        out[OUT_LOADS, i] = cells[LOADS, slot] * fade
        out[OUT_PREFILLS, i] = cells[PREFILLS, slot] * fade

        loading_s = load_s(cells, slot, cached)
        link_s, gpu_s = backlogs_s(cells, slot, now_s)
        net_free_s, start_s = cells[NET_FREE, slot], link_s
        if fetches:
            net_free_s = max(net_free_s, cells[NET_FREE, source])
        net_s = max(net_free_s - now_s, 0.0)
        if fetches:
            out[OUT_FETCH, i] = fetch_s(cells, slot, fetch_tokens[i])
            start_s = max(link_s, net_s + out[OUT_FETCH, i])
        out[OUT_LOAD, i], out[OUT_NET_BACKLOG, i] = loading_s, net_s
        out[OUT_LINK_BACKLOG, i], out[OUT_GPU_BACKLOG, i] = link_s, gpu_s
        wait_s = max(start_s + loading_s, gpu_s) + under_way_s(cells, slot, cached)
        out[OUT_TTFT, i] = cells[OVERHEAD, slot] + wait_s + compute_s
        step_s = reading_step_s(cells, slot, prompt_tokens + cells[RESIDENT, slot])
        out[OUT_TPOT, i] = step_s / (1 - min(gpu_use, MOST_USE))
    weighing, tpot_limit_s, ttft_limit_s = objective(
        cells, slots, out, prompt_tokens, output_tokens, slo
    )
    shared = crowd_share(out, ttft_limit_s)
    for i in range(len(slots)):
        slot = slots[i]
        token_s = cells[TOKEN, slot] + prompt_tokens * cells[CONTEXT, slot]
        out[OUT_DECODE, i] = shared * weighing * token_s
        step_s = reading_step_s(cells, slot, prompt_tokens + cells[RESIDENT, slot])
        step_s /= 1 - FELT_USE * min(out[OUT_GPU_USE, i], MOST_USE)
        out[OUT_OWN_LATE, i] = weighing * max(step_s - MOST_STEP * tpot_limit_s, 0.0)
    return out


@compiled
def idle_ttft_s(cells: Floats, slots: Slots, prompt_tokens: float, held_tokens: float) -> Floats:
    """TTFT on idle workers that hold `held_tokens` of the prompt in their host tiers."""
    out = np.empty(len(slots))
    for i in range(len(slots)):
        slot = slots[i]
        compute_s = prefill_s(cells, slot, prompt_tokens, held_tokens, 0.0, 0.0)[2]
        out[i] = cells[OVERHEAD, slot] + load_s(cells, slot, held_tokens) + compute_s
    return out


@compiled
def idle_tpot_s(cells: Floats, slots: Slots, prompt_tokens: float) -> Floats:
    """Time per output token on idle workers."""
    out = np.empty(len(slots))
    for i in range(len(slots)):
        out[i] = reading_step_s(cells, slots[i], prompt_tokens)
    return out
