"""What a request takes on every worker: arithmetic over the fleet's matrix, and nothing kept.

Each function reads columns of the matrix (`router.fleet_rows`) and gives an array over workers, in
real seconds. `router.fleet` puts them together; the queues' forecast step by step is elsewhere
(`router.shadow`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router import fleet_rows as at
from router.offers import Floats

MOST_USE = 0.95


class Prefill(NamedTuple):
    """A prompt's own gpu work on each worker.

    work_s: what it adds to a busy engine; read_s: the least its steps take, for reading weights and
    KV; compute_s: what they take beside those that decode there.
    """

    new_tokens: Floats
    work_s: Floats
    read_s: Floats
    compute_s: Floats


def prefill(
    cells: Floats,
    prompt_tokens: int,
    held_tokens: Floats,
    decoding: Floats | float = 0.0,
    decode_context: Floats | float = 0.0,
) -> Prefill:
    """The part of a prompt that is not held, beside requests that decode (none: an idle engine)."""
    new = prompt_tokens - held_tokens
    steps = np.ceil(new / cells[at.BUDGET])
    pairs = new * (held_tokens + 0.5 * new)
    work_s = new * cells[at.TOKEN] + pairs * cells[at.PAIR]
    beside_s = decoding * cells[at.TOKEN] + decode_context * cells[at.PAIR]
    read_s = steps * (cells[at.WEIGHTS] + (prompt_tokens + decode_context) * cells[at.CONTEXT])
    compute_s = np.maximum(work_s + steps * beside_s, read_s) + steps * cells[at.STEP]
    return Prefill(new, work_s, read_s, compute_s)


def load_s(cells: Floats, cached_tokens: Floats) -> Floats:
    """The load of a cached prefix; none takes no time."""
    seconds: Floats = (
        cached_tokens * cells[at.LOAD_TOKEN] + (cached_tokens > 0) * cells[at.LOAD_FIXED]
    )
    return seconds


def backlogs_s(cells: Floats, now_s: float) -> tuple[Floats, Floats]:
    """Work queued on link and gpu."""
    link_s = np.minimum(np.maximum(cells[at.LINK_FREE] - now_s, 0.0), cells[at.LINK_OUT])
    done_s = np.minimum(np.maximum(now_s - cells[at.GPU_SINCE], 0.0), cells[at.GPU_HEAD])
    return link_s, np.maximum(cells[at.GPU_OUT] - done_s, 0.0)


def under_way_s(cells: Floats, cached_tokens: Floats) -> Floats:
    """The wait for the step of decoding that is under way, where there is one.

    Half of it on average; a load that has landed is heard of one step later.
    """
    decoding, context = cells[at.DECODING], cells[at.DECODE_CONTEXT]
    beside_s = decoding * cells[at.TOKEN] + context * cells[at.PAIR]
    step_s = np.maximum(beside_s, cells[at.WEIGHTS] + context * cells[at.CONTEXT]) + cells[at.STEP]
    wait_s: Floats = step_s * (decoding > 0) * np.where(cached_tokens > 0, 1.5, 0.5)
    return wait_s


def reading_step_s(cells: Floats, context_tokens: Floats | int) -> Floats:
    """A step that waits for memory: the weights and so many tokens' KV are read."""
    step_s: Floats = cells[at.WEIGHTS] + context_tokens * cells[at.CONTEXT] + cells[at.STEP]
    return step_s


def tpot_s(cells: Floats, prompt_tokens: int, gpu_use: Floats) -> Floats:
    """Time per output token beside all in flight, stretched by the prefills of late."""
    step_s = reading_step_s(cells, prompt_tokens + cells[at.RESIDENT])
    seconds: Floats = step_s / (1 - np.minimum(gpu_use, MOST_USE))
    return seconds


def fetch_s(cells: Floats, tokens: Floats) -> Floats:
    """`tokens` over the network: for ever where there is none, or no room for them in the tier."""
    seconds = np.where(tokens > 0, np.inf, 0.0)
    np.divide(tokens, cells[at.NET], out=seconds, where=(tokens > 0) & (cells[at.NET] > 0))
    seconds[tokens > cells[at.SPARE] - cells[at.PROMISED]] = np.inf
    return seconds


def weighing_tokens(
    cells: Floats, work_s: Floats, load_s: Floats, prompt_tokens: int, output_tokens: int
) -> float:
    """Delayed tokens that weigh as much as one first token delayed as long.

    By the service objective, TTFT over TPOT (`kappa.slo`), of the best and the middle idle worker;
    but never more than there will be.
    """
    alone_s = reading_step_s(cells, prompt_tokens)
    idle_s = cells[at.OVERHEAD] + load_s + np.maximum(work_s, alone_s)
    floor_s = TTFT_FLOOR_S * float(cells[at.DILATION].max())
    ttft_limit_s = max(floor_s, TTFT_IDLE_FACTOR * float(idle_s.min()))
    tpot_limit_s = TPOT_IDLE_FACTOR * float(np.sort(alone_s)[len(alone_s) // 2])
    if tpot_limit_s <= 0:
        return float(output_tokens)
    return min(ttft_limit_s / tpot_limit_s, float(output_tokens))
