"""vLLM's manager of the host tier, in the scheduler's process, with bounded stores. A tier with
something behind host memory extends it (`kappa_workers.paced.disk_tier`): the connector asks either
by the same methods."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext

from kappa_workers.vllm.versions.installed import ManagerNames


class HostTierManager(ManagerNames):
    """Refuses stores that the link has no time for. A refused one is reported as "store_dropped";
    vLLM takes it for stored, asks no more, and finds nothing when it looks."""

    def __init__(
        self,
        *args: Any,
        block_tokens: int,
        backlog_s: float,
        report: Callable[[dict[str, object]], None],
        **kwargs: Any,
    ) -> None:
        """`backlog_s`: bound on the seconds of stores that are queued when another is taken."""
        super().__init__(*args, **kwargs)
        self._block_tokens, self._backlog_s, self._report = block_tokens, backlog_s, report
        self._block_s = 0.0
        # Keys of stores under way, with each one's share of its transfer's seconds.
        self._pending: dict[OffloadKey, float] = {}
        self._pending_s = 0.0
        self._lost: set[OffloadKey] = set()
        # Blocks that came from a peer, which has them, too: the oldest first.
        self._copies: OrderedDict[OffloadKey, None] = OrderedDict()
        self.before_reset: Callable[[], None] = lambda: None
        """Returns when nothing writes to the tier any more."""
        self.copying: Callable[[], bool] = lambda: False
        """Whether the engine must go on until a peer's blocks came."""

    def stores_lost(self, lost: Collection[OffloadKey], block_s: float) -> None:
        """A worker gave up storing `lost`: that store fails, whatever others say. `block_s`:
        seconds that it measured per block."""
        self._lost.update(lost)
        self._block_s = block_s

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As vLLM's, unless the link is too far behind: then nothing is to be stored."""
        new = sum(self._policy.get(key) is None for key in keys)
        if new and self._pending and self._pending_s + self._store_s(new) > self._backlog_s:
            tokens = new * self._block_tokens
            self._report(
                {"kind": "store_dropped", "blocks": new, "tokens": tokens, "why": "backlog"}
            )
            return PrepareStoreOutput([], self._get_load_store_spec([], []), [])
        output = super().prepare_store(keys, req_context)
        for key in output.evicted_keys if output is not None else ():
            self._copies.pop(key, None)
        if output is not None and output.keys_to_store:
            seconds = self._store_s(len(output.keys_to_store))
            self._pending_s += seconds
            share_s = seconds / len(output.keys_to_store)
            self._pending.update(dict.fromkeys(output.keys_to_store, share_s))
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As vLLM's; a store that any worker gave up has failed, and is never announced."""
        whole = self._lost.isdisjoint(keys)
        for key in keys:
            self._pending_s -= self._pending.pop(key, 0.0)
        self._lost.difference_update(keys)
        super().complete_store(keys, req_context, success and whole)

    def has_pending_work(self) -> bool:
        return bool(super().has_pending_work() or self.copying())

    def reset_cache(self) -> None:
        self.before_reset()
        self._copies.clear()
        self._pending.clear()
        self._pending_s = 0.0
        self._lost.clear()
        super().reset_cache()

    # -- what a tier behind it adds -----------------------------------------------------------

    def take_work(self) -> Any:
        """What the tier's worker is to do besides transfers from the coming step on
        (`TierWorker.begin_work`); None: nothing."""

    def take_news(self, news: Any) -> None:
        """What became of that, as the tier's worker says (`TierWorker.take_news`)."""

    def take_loaded(self) -> int:
        """Blocks of the last load that come from behind host memory; forgets them."""
        return 0

    # -- what peers have, too -----------------------------------------------------------------

    @property
    def room_blocks(self) -> int:
        """Places that are free, or hold a copy."""
        return self.free_blocks + len(self._copies)

    def knows(self, key: bytes) -> bool:
        """Whether a block is here, or being stored."""
        return self._policy.get(OffloadKey(key)) is not None

    def place(self, key: bytes) -> tuple[Any, int] | None:
        """Of a block that may be read, what stands for it while it is here, and its slot. Called
        from other threads, too."""
        block = self._policy.get(OffloadKey(key))
        if block is None or not block.is_ready:
            return None
        try:
            return block, self.slot(OffloadKey(key))
        except AssertionError:  # it went in between
            return None

    def reserve(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, displacing: bool = False
    ) -> list[int]:
        """Slots for copies of blocks that are not here, as many as can be had without displacing
        others (`displacing`: as any store does); they count as being stored until `copied`."""
        short = len(keys) - self.free_blocks
        idle = (key for key in self._copies if self._is_idle(key))
        old = [key for key, _ in zip(idle, range(short), strict=False)]
        for key in old:
            del self._copies[key]
        self.drop(old)
        if not displacing:
            keys = keys[: self.free_blocks]
        if not keys:
            return []
        output = super().prepare_store(keys, req_context)
        for key in output.evicted_keys if output is not None else ():
            self._copies.pop(key, None)
        return [] if output is None else [self.slot(key) for key in output.keys_to_store]

    def copied(
        self,
        came: Sequence[OffloadKey],
        lost: Sequence[OffloadKey],
        req_context: ReqContext,
        *,
        displaceable: bool = True,
    ) -> None:
        """What became of reserved blocks; whether they go before the tier's own."""
        super().complete_store(came, req_context)
        super().complete_store(lost, req_context, success=False)
        if displaceable:
            self._copies.update(dict.fromkeys(came))

    def _is_idle(self, key: OffloadKey) -> bool:
        block = self._policy.get(key)
        return block is not None and block.ref_cnt == 0

    def _store_s(self, blocks: int) -> float:
        """Seconds that the link takes to store so many blocks, as measured."""
        return blocks * self._block_s
