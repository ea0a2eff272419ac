"""vLLM as a scheduling rule sees it: its requests, its blocks, its next iteration.

vLLM allocates in its own `schedule()`; what a rule takes here is bookkeeping within one plan. A
quote is vLLM's own arithmetic over a look-up of the prefix in the device's cache, plus the ingress'
estimate of how much of the rest is in the host tier: the connector itself is never asked, since
every question to it counts as a use of what is found. Look-ups take Python time per block, so each
iteration makes a bounded number of them; a request beyond it is quoted as it was last seen.

Duck-typed over vLLM's objects, so that it is imported without vLLM. The names that are read are
listed in tests/workers/vllm/test_scheduler_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kappa.protocol import DEVICE_TOKENS_KEY, HOST_TOKENS_KEY
from scheduler.work import Quote, Room, Work
from workers.request_metadata import DEFAULT_TENANT, tenant_of, token_count

# Blocks looked up per iteration, at about a microsecond each, and what any look-up costs besides.
_LOOKUP_BLOCKS = 1024
_LOOKUP_COST = 12
_KEY_BYTES = 8


class EngineWork(Work):
    """One of vLLM's requests.

    expected_tokens: of its prompt, in device and host cache together, as the ingress believes.
    seen: version of the memory when `quote` was made. waits_for: how many loads had landed when
    vLLM put it off, because what it needs was on its way; -1 if it was not.
    """

    __slots__ = ("expected_tokens", "extra", "key", "quote", "request", "seen", "waits_for")

    def __init__(self, request: Any, now_s: float) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        super().__init__(
            request.num_tokens,
            now_s,
            max_tokens=request.max_tokens,
            tenant=tenant_of(extra) or DEFAULT_TENANT,
            priority=request.priority,
        )
        self.request = request
        self.extra = extra
        expected = (extra.get(key) for key in (DEVICE_TOKENS_KEY, HOST_TOKENS_KEY))
        self.expected_tokens = sum(map(token_count, expected))
        hashes = request.block_hashes
        self.key = int.from_bytes(hashes[0][:_KEY_BYTES], "big") if hashes else 0
        self.quote: Quote | None = None
        self.seen = -1
        self.waits_for = -1

    def preempted(self) -> None:
        """It waits once more, with what it has generated as part of its prompt."""
        self.total_tokens = self.request.num_tokens
        self.max_tokens = max(self.request.max_tokens - self.request.num_output_tokens, 1)
        self.computed_tokens = 0
        self.quote = None


class EngineMemory:
    """The device's blocks (`scheduler.work.Memory`).

    Args:
        manager: vLLM's KVCacheManager.
        block_tokens: tokens per block.
        host: whether there is a host tier to load from.
    """

    def __init__(self, manager: Any, block_tokens: int, host: bool) -> None:
        self.version = 0
        self.block_tokens = block_tokens
        self._manager = manager
        self._host = host
        self._available = 0
        self._lookups_left = 0
        self._loading = 0
        self._landings = 0
        self._changed = False

    @property
    def capacity_blocks(self) -> int:
        """Blocks on the device, but for vLLM's null block."""
        return int(self._manager.block_pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def begin(self, promised_blocks: int, loading: int, prefilling: bool) -> None:
        """A new plan.

        Args:
            promised_blocks: of the free ones, needed by requests that were admitted before.
            loading: how many loads are under way.
            prefilling: whether prompts are being computed, so that more of them is cached.
        """
        available = self.free_blocks - promised_blocks
        if available > self._available or prefilling or self._changed:
            self.version += 1
        self._changed = False
        self._available = available
        self._loading = loading
        self._lookups_left = _LOOKUP_BLOCKS

    def landed(self) -> None:
        """A load is there: what others waited for may be with it."""
        self._landings += 1
        self._changed = True

    def put_off(self, work: EngineWork) -> None:
        """vLLM will not tell yet what of it is cached: something it needs is on its way."""
        work.waits_for = self._landings

    def available(self) -> int:
        """Blocks unused or evictable, and not promised."""
        return self._available

    def quote(self, work: Work) -> Quote | None:
        assert isinstance(work, EngineWork)
        if work.waits_for == self._landings and self._loading:
            return None
        if work.quote is not None and work.seen == self.version:
            return work.quote
        if self._lookups_left > 0:
            return self._look_up(work)
        return work.quote or self._guess(work)

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """As `scheduler.work.Memory`; for this plan only."""
        assert isinstance(work, EngineWork)
        if work.seen != self.version:
            quote = self._look_up(work)
        if quote.blocks > self._available:
            return None
        self._available -= quote.blocks
        self._changed = True
        work.computed_tokens = quote.device_tokens + quote.host_tokens
        return quote

    def _guess(self, work: EngineWork) -> Quote:
        """Before the first look-up: all that the ingress expects is in the host tier."""
        blocks = -(-work.total_tokens // self.block_tokens)
        return Quote(blocks, 0, self._host_tokens(work, 0), 0, work.key)

    def _host_tokens(self, work: EngineWork, device_tokens: int) -> int:
        """To be loaded behind what the device has, in whole blocks, less the last token."""
        if not self._host:
            return 0
        behind = max(min(work.expected_tokens, work.total_tokens - 1) - device_tokens, 0)
        return behind - behind % self.block_tokens

    def _look_up(self, work: EngineWork) -> Quote:
        manager, request = self._manager, work.request
        found, device_tokens, _ = manager.get_computed_blocks(request)
        blocks = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=work.total_tokens,
            new_computed_blocks=found.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=device_tokens,
            num_local_computed_tokens=device_tokens,
            num_tokens_main_model=work.total_tokens,
            apply_admission_cap=True,
        )
        hits = sum(len(group) for group in found.blocks)
        whole = -(-work.total_tokens // self.block_tokens) * len(found.blocks)
        shared = max(min(whole - blocks, hits), 0)
        host_tokens = self._host_tokens(work, device_tokens)
        work.quote = Quote(blocks, device_tokens, host_tokens, shared, work.key)
        work.seen = self.version
        self._lookups_left -= _LOOKUP_COST + hits
        return work.quote


@dataclass(slots=True)
class Headroom:
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


def headroom(
    engine: Any,
    memory: EngineMemory,
    works: Mapping[str, EngineWork],
    loaded: Sequence[Any],
    loading: int,
) -> Headroom:
    """What the coming iteration has to give: vLLM serves running requests first, in order, then
    everything else. What admitted requests still need to complete their prompts is promised.

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
        return Headroom([], None)
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
    return Headroom(going, Room(memory, budget, slots - len(going), holding))


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


def by_tenant(tokens: Mapping[str, int], works: Mapping[str, EngineWork]) -> dict[str, int]:
    """Tokens of each request, summed up by tenant; those of requests that are gone are left out."""
    sums: dict[str, int] = {}
    for request_id, count in tokens.items():
        work = works.get(request_id)
        if work is not None:
            sums[work.tenant] = sums.get(work.tenant, 0) + count
    return sums
