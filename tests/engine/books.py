"""Whether the books of an engine's blocks and threads are right; `AssertionError` if not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kappa_engine.block_manager import BlockManager
from kappa_engine.block_pool import BlockPool
from kappa_engine.llm_engine import Engine
from kappa_engine.prefix_cache import PrefixPool


def check_pool(pool: BlockPool) -> None:
    """Every block is either used or in exactly one unused run."""
    unused: list[int] = []
    for start in pool._starts:
        assert start < pool._ends[start] <= pool.count, "an unused run is empty, or too long"
        unused += range(start, pool._ends[start])
    free = [block for block, refs in enumerate(pool._refs) if not refs]
    assert unused == free, "unused runs do not match the counts of users"
    assert len(unused) == pool.unused and min(pool._refs, default=0) >= 0


def check_cache(cache: PrefixPool) -> None:
    """Idle blocks are those that only the cache uses."""
    check_pool(cache.pool)
    assert cache._digests == {block: digest for digest, block in cache._blocks.items()}
    only_here = {block for block in cache._digests if cache.pool.refs(block) == 1}
    assert only_here == set(cache._idle), (only_here, set(cache._idle))


def check_memory(memory: BlockManager) -> None:
    for pool in memory._arena.pools.values():
        check_pool(pool)
    for cache in (memory.device, *memory.host.values()):
        check_cache(cache)


def check_engine(engine: Engine) -> None:
    """With nothing to do, no request holds a block."""
    check_memory(engine.memory)
    if not engine.busy and not len(engine.store):
        for cache in (engine.memory.device, *engine.memory.host.values()):
            assert cache.pool.used == len(cache._idle) == len(cache), (
                "a block without a holder is kept"
            )
        assert not engine.arena.pools["act", "device"].used, "a captured block has no holder"


def _own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kappa-")}


@contextmanager
def no_thread_left() -> Iterator[None]:
    """A block that leaves no thread of an engine's; those of others in this process come and go."""
    before = _own_threads()
    yield
    for thread in _own_threads() - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
