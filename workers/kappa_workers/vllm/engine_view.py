"""vLLM as a scheduling rule sees it: its requests and its blocks.

What a rule takes here is bookkeeping within one plan; vLLM allocates in its own `schedule()`. A
quote is vLLM's arithmetic over a look-up in the device's cache, plus the decider's estimate of what
is in the host tier: the connector is never asked, since each question counts as a use. Look-ups per
iteration are bounded; a request beyond that is quoted as it was last seen. Names of vLLM:
tests/workers/vllm/test_scheduler_contract.py."""

from __future__ import annotations

from typing import Any

from kappa.protocol import DEVICE_TOKENS_KEY, HOST_TOKENS_KEY
from kappa_scheduler.work import Quote, Work
from kappa_workers.request_metadata import DEFAULT_TENANT, tenant_of, token_count

# Blocks looked up per iteration, at about a microsecond each, and what any look-up costs besides.
_LOOKUP_BLOCKS = 1024
_LOOKUP_COST = 12
_KEY_BYTES = 8


class EngineWork(Work):
    """One of vLLM's requests. expected_tokens: of its prompt, in device and host cache together, as
    the decider believes. seen: version of the memory when `quote` was made. waits_for: how many
    loads had landed when vLLM put it off, because what it needs was on its way; else -1."""

    __slots__ = ("expected_tokens", "extra", "key", "quote", "request", "seen", "waits_for")

    def __init__(self, request: Any, now_s: float) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        tenant = tenant_of(extra) or DEFAULT_TENANT
        super().__init__(
            request.num_tokens, now_s, request.max_tokens, tenant, priority=request.priority
        )
        self.request, self.extra = request, extra
        expected = (extra.get(key) for key in (DEVICE_TOKENS_KEY, HOST_TOKENS_KEY))
        self.expected_tokens = sum(map(token_count, expected))
        hashes = request.block_hashes
        self.key = int.from_bytes(hashes[0][:_KEY_BYTES], "big") if hashes else 0
        self.quote: Quote | None = None
        self.seen = self.waits_for = -1

    def preempted(self) -> None:
        """It waits once more, with what it has generated as part of its prompt."""
        self.total_tokens = self.request.num_tokens
        self.max_tokens = max(self.request.max_tokens - self.request.num_output_tokens, 1)
        self.computed_tokens = 0
        self.quote = None

    def ran(self, block_tokens: int) -> None:
        """An iteration computed a part: note how far the request is."""
        done = self.computed_tokens = self.request.num_computed_tokens
        if done > self.total_tokens:
            prompt_blocks = -(-self.total_tokens // block_tokens)
            self.grown_blocks = max(-(-done // block_tokens) - prompt_blocks, 0)


class EngineMemory:
    """The device's blocks (`kappa_scheduler.work.Memory`). manager: vLLM's KVCacheManager. host:
    whether there is a host tier to load from."""

    def __init__(self, manager: Any, block_tokens: int, host: bool) -> None:
        self.version = 0
        self.block_tokens = block_tokens
        self.changed = False
        """Whether something may fit, or be found, that did not before the next plan."""
        self._manager, self._pool, self._host = manager, manager.block_pool, host
        self._available = self._lookups_left = self._loading = self._landings = 0

    @property
    def capacity_blocks(self) -> int:
        """Blocks on the device, but for vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def begin(self, promised_blocks: int, loading: int, prefilling: bool) -> None:
        """A new plan. promised_blocks: of the free ones, needed by requests that were admitted
        before. loading: loads under way. prefilling: prompts are being computed, so that more of
        them is cached."""
        available = self.free_blocks - promised_blocks
        if available > self._available or prefilling or self.changed:
            self.version += 1
        self.changed = False
        self._available, self._loading = available, loading
        self._lookups_left = _LOOKUP_BLOCKS

    def landed(self) -> None:
        """A load is there: what others waited for may be with it."""
        self._landings += 1
        self.changed = True

    def put_off(self, work: EngineWork) -> None:
        """vLLM does not tell yet which tokens are cached: blocks are on their way."""
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
        if work.quote is not None:
            return work.quote
        # Before the first look-up: all that the decider expects is in the host tier.
        blocks = -(-work.total_tokens // self.block_tokens)
        return Quote(blocks, 0, self._host_tokens(work, 0), 0, work.key)

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """As `kappa_scheduler.work.Memory`; for this plan only."""
        assert isinstance(work, EngineWork)
        if work.seen != self.version:
            quote = self._look_up(work)
        if quote.blocks > self._available:
            return None
        self._available -= quote.blocks
        self.changed = True
        work.computed_tokens = quote.device_tokens + quote.host_tokens
        return quote

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
