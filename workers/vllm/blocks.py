"""vLLM's blocks as a rule sees them, and vLLM's requests as its work.

vLLM allocates in its own `schedule()`; what a rule takes here is bookkeeping within one plan. A
quote is vLLM's own arithmetic over a look-up of the prefix in the device's cache, plus the ingress'
word on how much of the rest is in the host tier: the connector itself is never asked, since every
question to it counts as a use of what is found. Look-ups take Python time per block, so each
iteration makes a bounded number of them; a request beyond it is quoted as it was last seen.

Duck-typed over vLLM's objects, so that it is imported without vLLM. The names used are listed in
tests/workers/vllm/test_scheduler_contract.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kappa.protocol import (
    CHARGES_KEY,
    DEVICE_TOKENS_KEY,
    HOST_TOKENS_KEY,
    TENANT_KEY,
    WEIGHT_KEY,
    Charge,
)
from scheduler.work import Quote, Work

DEFAULT_TENANT = "default"
# Blocks looked up per iteration, at about a microsecond each, and what any look-up costs besides.
_LOOKUP_BLOCKS = 1024
_LOOKUP_COST = 12
_KEY_BYTES = 8
# A number beyond it is nonsense, and may be an int that no float can hold.
_MOST_NUMBER = 2.0**63


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
        self.expected_tokens = _count(extra.get(DEVICE_TOKENS_KEY)) + _count(
            extra.get(HOST_TOKENS_KEY)
        )
        hashes = request.block_hashes
        self.key = int.from_bytes(hashes[0][:_KEY_BYTES], "big") if hashes else 0
        self.quote: Quote | None = None
        self.seen = -1
        self.waits_for = -1

    def again(self) -> None:
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
        """vLLM will not say yet what of it is cached: something it needs is on its way."""
        work.waits_for = self._landings

    def available(self) -> int:
        """Blocks unused or evictable, and not promised."""
        return self._available

    def quote(self, work: Work) -> Quote | None:
        """As `scheduler.work.Memory`."""
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


def by_tenant(tokens: Mapping[str, int], works: Mapping[str, EngineWork]) -> dict[str, int]:
    """Tokens of each request, summed up by tenant; those of requests that are gone are left out."""
    sums: dict[str, int] = {}
    for request_id, count in tokens.items():
        work = works.get(request_id)
        if work is not None:
            sums[work.tenant] = sums.get(work.tenant, 0) + count
    return sums


def heard(work: EngineWork) -> tuple[dict[str, Charge], dict[str, float]]:
    """What the ingress sent along: what other workers charged whom, and this tenant's weight."""
    return told(work.extra, work.tenant)


def tenant_of(extra: Mapping[str, Any] | None) -> str:
    """Whose a request is, as the ingress says; "" if nothing usable says so."""
    tenant = (extra or {}).get(TENANT_KEY)
    return tenant if isinstance(tenant, str) else ""


def told(extra: Mapping[str, Any], tenant: str) -> tuple[dict[str, Charge], dict[str, float]]:
    """Charges and weight among the ingress' words; what cannot be read is left out."""
    weight: Any = extra.get(WEIGHT_KEY)
    weights = {tenant: float(weight)} if _is_number(weight) and weight > 0 else {}
    text = extra.get(CHARGES_KEY)
    if not text:
        return {}, weights
    try:
        charges = {str(tenant): Charge(*seconds) for tenant, seconds in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}, weights
    return {t: c for t, c in charges.items() if all(_is_number(s) and s >= 0 for s in c)}, weights


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST_NUMBER


def _count(value: Any) -> int:
    """Tokens as the ingress gave them; nothing usable is nothing known."""
    return max(int(value), 0) if _is_number(value) else 0
