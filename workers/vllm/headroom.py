"""What vLLM's next iteration has to give, after those that run and those whose loads are there.

vLLM serves running requests first, in order, then everything else. This reads its state, and says
what will be left: tokens, slots, and blocks, of which those that admitted requests still need to
complete their prompts are promised. Duck-typed over vLLM's scheduler; the names that are read of it
are listed in tests/workers/vllm/test_scheduler_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.work import Room
from workers.vllm.blocks import EngineMemory, EngineWork


@dataclass(slots=True)
class Offer:
    """going: loaded requests that fit now. room: for the rule; None if running ones need more
    blocks than there are, so that vLLM will preempt and admit nobody."""

    going: list[Any]
    room: Room | None


@dataclass(slots=True)
class _Growth:
    """What running requests take: tokens left after them, blocks, and those of decoding ones."""

    budget_tokens: int
    blocks: int = 0
    decode_blocks: int = 0


def offer(
    engine: Any,
    memory: EngineMemory,
    works: Mapping[str, EngineWork],
    loaded: Sequence[Any],
    loading: int,
) -> Offer:
    """What the coming iteration has to give.

    Args:
        engine: vLLM's scheduler.
        memory: its blocks; a plan over it begins here.
        works: by request id.
        loaded: requests whose loads are there, oldest first.
        loading: how many loads are under way.
    """
    running = engine.running
    growth = _grow(engine, memory.block_tokens, works)
    free_blocks = memory.free_blocks - growth.blocks
    if free_blocks < 0:
        return Offer([], None)
    slots = engine.max_num_running_reqs - len(running) - engine.num_waiting_for_streaming_input
    budget = growth.budget_tokens
    going: list[Any] = []
    for request in loaded:
        blocks = engine._request_remaining_blocks(request)
        if blocks <= free_blocks and budget > 0 and len(going) < slots:
            going.append(request)
            free_blocks -= blocks
            budget -= min(request.num_tokens - request.num_computed_tokens, budget)
    # As vLLM does when it admits a load: what was admitted before must still fit as a whole.
    watermark = engine.kv_cache_manager.watermark_blocks if running or going else 0
    promised = growth.decode_blocks + engine._inflight_prefill_reserved_blocks() + watermark
    memory.begin(promised, loading, bool(engine._inflight_prefills))
    holding = len(running) + len(loaded) + loading
    return Offer(going, Room(memory, budget, slots - len(going), holding))


def _grow(engine: Any, block_tokens: int, works: Mapping[str, EngineWork]) -> _Growth:
    """What running requests will take; notes on each work how far it is."""
    growth = _Growth(engine.max_num_scheduled_tokens)
    prefilling = engine._inflight_prefills
    for request in engine.running:
        done = request.num_computed_tokens
        wanted = request.num_tokens_with_spec + request.num_output_placeholders - done
        tokens = min(wanted, growth.budget_tokens)
        held = -(-done // block_tokens)
        more = -(-(done + tokens) // block_tokens) - held
        growth.budget_tokens -= tokens
        growth.blocks += more
        if request not in prefilling:
            growth.decode_blocks += more
        work = works[request.request_id]
        work.computed_tokens = done
        work.grown_blocks = max(held - -(-work.total_tokens // block_tokens), 0)
    return growth
