"""Stores are published when they are there, and dropped, with a reason, when they cannot be."""

import torch

from kappa.model import ModelShape
from kappa.plans.planners import Planning
from kappa_engine import host_store as module
from kappa_engine.block_manager import BlockManager
from kappa_engine.host_store import HostStore
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.prefix_cache import extend_keys
from kappa_engine.settings import EngineOptions
from tests.engine.books import check_memory
from tests.engine.engines import Link

SHAPE = ModelShape("tiny", 2, 8, 2, 1, 4, 1e3, 1e3, "gqa")
BLOCK = 2


class Rig:
    def __init__(self, host: int = 8) -> None:
        size = ArenaSize(8, host, 8, host, block_tokens=BLOCK)
        self.arena = Arena(SHAPE, size, dtype=torch.float32)
        self.arena.kv_device.copy_(torch.rand(self.arena.kv_device.shape))
        self.link = Link()
        settings = EngineOptions()
        self.memory = BlockManager(self.arena, Planning(BLOCK), settings, lambda sequence: None)
        self.device, self.host = self.memory.device, self.memory.host["kv"]
        self.store = HostStore(self.arena, self.link, self.memory, settings)
        self.keys = []
        extend_keys(self.keys, list(range(2 * 6)), BLOCK)

    def put(self, first: int, end: int) -> list[int]:
        """Store blocks [first, end) of the sequence; the device blocks they were in."""
        blocks = self.device.take(end - first)
        self.store.store("kv", self.keys[first:end], blocks, self.keys[:first])
        return blocks

    def found(self) -> int:
        return self.host.prefix(self.keys, 6)[0]

    def end(self) -> None:
        self.link.open.set()
        self.store.drain(10)
        assert len(self.store) == 0 and self.device.pool.used == 0
        check_memory(self.memory)
        self.link.stop(10)


def test_a_store_is_found_when_its_copy_has_ended_and_not_before() -> None:
    rig = Rig()
    rig.link.open.clear()
    blocks = rig.put(0, 3)
    content = rig.arena.kv_device[:, blocks].clone()
    rig.store.poll()
    assert rig.found() == 0 and len(rig.store) == 3
    assert rig.device.pool.used == 3 and not rig.store.wants("kv", rig.keys[2])
    assert rig.store.wants("act", rig.keys[2]) and rig.store.wants("kv", rig.keys[3])
    rig.link.open.set()
    rig.store.drain(10)
    host = [rig.host.find(key) for key in rig.keys[:3]]
    assert rig.found() == 3 and torch.equal(rig.arena.kv_host[:, host], content)
    rig.end()


def test_what_is_there_or_on_its_way_is_not_stored_twice() -> None:
    rig = Rig()
    rig.link.open.clear()
    rig.put(0, 3)
    rig.put(1, 4)
    # The device blocks of the two that are on their way already are free at once.
    assert rig.device.pool.used == 4
    rig.end()
    assert rig.found() == 4
    assert rig.link.counters["d2h"].copied_bytes == 4 * rig.arena.block_bytes("kv")


def test_full_host_drops_and_counts_blocks_and_those_behind_them() -> None:
    rig = Rig(host=3)
    held = rig.host.take(1)
    rig.put(0, 4)
    assert rig.store.dropped == 2
    rig.put(4, 6)
    assert rig.store.dropped == 2
    rig.store.drain(10)
    assert rig.found() == 2
    rig.host.release(held)
    # Its own front does not give way to it.
    rig.put(2, 5)
    rig.end()
    assert rig.found() == 3
    assert rig.store.dropped == 4


def test_a_link_too_far_behind_drops_and_counts(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING_BLOCKS", 2)
    rig = Rig()
    rig.link.open.clear()
    rig.put(0, 1)
    rig.put(1, 4)
    assert rig.store.dropped == 2
    rig.end()
    assert rig.found() == 2


def test_a_store_that_fails_leaves_nothing() -> None:
    rig = Rig()
    rig.link.breaks = lambda direction, copies: True
    rig.put(0, 3)
    rig.store.drain(10)
    assert rig.found() == 0 and rig.host.pool.used == 0
    rig.link.breaks = lambda direction, copies: False
    rig.put(0, 3)
    rig.end()
    assert rig.found() == 3
