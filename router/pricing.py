"""What a request takes on every worker: arithmetic over the fleet's matrix, and nothing kept.

Each formula is for one worker, a column of the matrix (`router.fleet_rows`), in real seconds; the
loops over workers stand at the end. All is compiled. `router.fleet` keeps the matrix; the queues'
forecast step by step is elsewhere (`router.shadow`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router import fleet_rows as at
from router import offer_rows as row
from router.offers import Floats

MOST_USE = 0.95
MOST_STEP = 0.5

Slots = NDArray[np.intp]


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
    steps = np.ceil(new / cells[at.BUDGET, slot])
    pairs = new * (held_tokens + 0.5 * new)
    token_s, pair_s = cells[at.TOKEN, slot], cells[at.PAIR, slot]
    work_s = new * token_s + pairs * pair_s
    beside_s = decoding * token_s + decode_context * pair_s
    read_s = steps * (
        cells[at.WEIGHTS, slot] + (prompt_tokens + decode_context) * cells[at.CONTEXT, slot]
    )
    compute_s = max(work_s + steps * beside_s, read_s) + steps * cells[at.STEP, slot]
    return work_s, read_s, compute_s


@compiled
def load_s(cells: Floats, slot: int, cached_tokens: float) -> float:
    """The load of a cached prefix; none takes no time."""
    if cached_tokens <= 0:
        return 0.0
    return cached_tokens * cells[at.LOAD_TOKEN, slot] + cells[at.LOAD_FIXED, slot]


@compiled
def backlogs_s(cells: Floats, slot: int, now_s: float) -> tuple[float, float]:
    """Work queued on link and gpu."""
    link_s = min(max(cells[at.LINK_FREE, slot] - now_s, 0.0), cells[at.LINK_OUT, slot])
    done_s = min(max(now_s - cells[at.GPU_SINCE, slot], 0.0), cells[at.GPU_HEAD, slot])
    return max(link_s, 0.0), max(cells[at.GPU_OUT, slot] - done_s, 0.0)


@compiled
def under_way_s(cells: Floats, slot: int, cached_tokens: float) -> float:
    """The wait for the step of decoding that is under way, where there is one.

    Half of it on average; a load that has landed is heard of one step later.
    """
    decoding, context = cells[at.DECODING, slot], cells[at.DECODE_CONTEXT, slot]
    if decoding <= 0:
        return 0.0
    beside_s = decoding * cells[at.TOKEN, slot] + context * cells[at.PAIR, slot]
    read_s = cells[at.WEIGHTS, slot] + context * cells[at.CONTEXT, slot]
    step_s = max(beside_s, read_s) + cells[at.STEP, slot]
    return step_s * (1.5 if cached_tokens > 0 else 0.5)


@compiled
def reading_step_s(cells: Floats, slot: int, context_tokens: float) -> float:
    """A step that waits for memory: the weights and so many tokens' KV are read."""
    read_s = cells[at.WEIGHTS, slot] + context_tokens * cells[at.CONTEXT, slot]
    return read_s + cells[at.STEP, slot]


@compiled
def fetch_s(cells: Floats, slot: int, tokens: float) -> float:
    """`tokens` over the network: for ever where there is none, or no room for them in the tier."""
    if tokens > cells[at.SPARE, slot] - cells[at.PROMISED, slot]:
        return math.inf
    if tokens <= 0:
        return 0.0
    net = cells[at.NET, slot]
    return tokens / net if net > 0 else math.inf


@compiled
def objective(
    cells: Floats, slots: Slots, priced: Floats, prompt_tokens: float, output_tokens: float
) -> tuple[float, float]:
    """Delayed tokens that weigh as much as one first token delayed as long; seconds for each.

    By the service objective, TTFT over TPOT (`kappa.slo`), of the best and the middle idle worker;
    but never more tokens than there will be. `priced` has rows WORK and LOAD filled in.
    """
    if not len(slots):
        return output_tokens, math.inf
    alone_s = np.empty(len(slots))
    idle_s, dilation = math.inf, 0.0
    for i in range(len(slots)):
        slot = slots[i]
        alone_s[i] = reading_step_s(cells, slot, prompt_tokens)
        compute_s = max(priced[row.WORK, i], alone_s[i])
        idle_s = min(idle_s, cells[at.OVERHEAD, slot] + priced[row.LOAD, i] + compute_s)
        dilation = max(dilation, cells[at.DILATION, slot])
    tpot_limit_s = TPOT_IDLE_FACTOR * np.sort(alone_s)[len(alone_s) // 2]
    if tpot_limit_s <= 0:
        return output_tokens, math.inf
    ttft_limit_s = max(TTFT_FLOOR_S * dilation, TTFT_IDLE_FACTOR * idle_s)
    return min(ttft_limit_s / tpot_limit_s, output_tokens), tpot_limit_s


@compiled
def price(
    cells: Floats, slots: Slots, now_s: float, window_s: float, prompt_tokens: float,
    output_tokens: float, device_tokens: Floats, cached_tokens: Floats,
    fetch_tokens: Floats, source: int,
) -> Floats:  # fmt: skip
    """A request on each of `slots`: shape (ROWS of `router.offer_rows`, len(slots)).

    device_tokens, cached_tokens, fetch_tokens: shape (len(slots),); the last is empty where nothing
    is fetched, else how much comes from the worker in column `source`.
    """
    fetches = len(fetch_tokens) > 0
    out = np.empty((row.ROWS, len(slots)))
    for i in range(len(slots)):
        slot, cached = slots[i], cached_tokens[i]
        held = device_tokens[i] + cached
        out[row.NEW, i] = prompt_tokens - held
        out[row.LOAD_TOKEN, i] = cells[at.LOAD_TOKEN, slot]
        out[row.FIXED, i] = cells[at.OVERHEAD, slot]
        out[row.IN_FLIGHT, i] = cells[at.IN_FLIGHT, slot]
        out[row.WAITING, i] = cells[at.WAITING, slot]
        out[row.QUEUED, i] = cells[at.QUEUED, slot]
        out[row.RESIDENT, i] = cells[at.RESIDENT, slot]
        out[row.CAPACITY, i] = cells[at.CAPACITY, slot]
        out[row.LINK_RATE, i] = cells[at.LINK_RATE, slot]
        out[row.FLOPS, i] = cells[at.FLOPS, slot]
        out[row.COST, i] = cells[at.COST, slot]
        out[row.CRIT, i] = cells[at.CRIT, slot]

        decoding = cells[at.DECODING, slot]
        work_s, read_s, compute_s = prefill_s(
            cells, slot, prompt_tokens, held, decoding, cells[at.DECODE_CONTEXT, slot]
        )
        out[row.WORK, i], out[row.COMPUTE, i] = work_s, compute_s
        out[row.HARM, i] = decoding * max(compute_s - read_s, 0.0)
        # A clock that was set back must not make use grow without bound.
        fade = math.exp(min(cells[at.USE_AT, slot] - now_s, 0.0) / window_s)
        gpu_use = cells[at.GPU_USE, slot] * fade
        out[row.GPU_USE, i] = gpu_use
        out[row.LOADS, i] = cells[at.LOADS, slot] * fade
        out[row.PREFILLS, i] = cells[at.PREFILLS, slot] * fade

        loading_s = load_s(cells, slot, cached)
        link_s, gpu_s = backlogs_s(cells, slot, now_s)
        net_free_s, start_s = cells[at.NET_FREE, slot], link_s
        if fetches:
            net_free_s = max(net_free_s, cells[at.NET_FREE, source])
        net_s = max(net_free_s - now_s, 0.0)
        if fetches:
            out[row.FETCH, i] = fetch_s(cells, slot, fetch_tokens[i])
            start_s = max(link_s, net_s + out[row.FETCH, i])
        out[row.LOAD, i], out[row.NET_BACKLOG, i] = loading_s, net_s
        out[row.LINK_BACKLOG, i], out[row.GPU_BACKLOG, i] = link_s, gpu_s
        wait_s = max(start_s + loading_s, gpu_s) + under_way_s(cells, slot, cached)
        out[row.TTFT, i] = cells[at.OVERHEAD, slot] + wait_s + compute_s
        step_s = reading_step_s(cells, slot, prompt_tokens + cells[at.RESIDENT, slot])
        out[row.TPOT, i] = step_s / (1 - min(gpu_use, MOST_USE))
    weighing, tpot_limit_s = objective(cells, slots, out, prompt_tokens, output_tokens)
    for i in range(len(slots)):
        slot = slots[i]
        token_s = cells[at.TOKEN, slot] + prompt_tokens * cells[at.CONTEXT, slot]
        out[row.DECODE, i] = weighing * token_s
        step_s = reading_step_s(cells, slot, prompt_tokens + cells[at.RESIDENT, slot])
        # The rest of what the objective allows is for the prefills that come in between.
        out[row.OWN_LATE, i] = weighing * max(step_s - MOST_STEP * tpot_limit_s, 0.0)
    return out


@compiled
def busier_s(cells: Floats, slots: Slots, now_s: float) -> Floats:
    """Work queued on the busier of link and gpu."""
    out = np.empty(len(slots))
    for i in range(len(slots)):
        link_s, gpu_s = backlogs_s(cells, slots[i], now_s)
        out[i] = max(link_s, gpu_s)
    return out


@compiled
def idle_ttft_s(cells: Floats, slots: Slots, prompt_tokens: float, held_tokens: float) -> Floats:
    """TTFT on idle workers that hold `held_tokens` of the prompt in their host tiers."""
    out = np.empty(len(slots))
    for i in range(len(slots)):
        slot = slots[i]
        compute_s = prefill_s(cells, slot, prompt_tokens, held_tokens, 0.0, 0.0)[2]
        out[i] = cells[at.OVERHEAD, slot] + load_s(cells, slot, held_tokens) + compute_s
    return out


@compiled
def idle_tpot_s(cells: Floats, slots: Slots, prompt_tokens: float) -> Floats:
    """Time per output token on idle workers."""
    out = np.empty(len(slots))
    for i in range(len(slots)):
        out[i] = reading_step_s(cells, slots[i], prompt_tokens)
    return out
