"""The arena has the shapes that the kernels expect, and refuses what memory cannot hold."""

import pytest
import torch

from kappa.model import ModelShape
from kappa_engine.kv_cache import Arena, ArenaSize, ArenaTooLarge, free_host_bytes

SHAPE = ModelShape("tiny", 3, 64, 4, 2, 16, 1e5, 1e5, "gqa")


def test_shapes_are_layer_major() -> None:
    arena = Arena(SHAPE, ArenaSize(5, 7, 2, 3, block_tokens=4), dtype=torch.float64)
    assert arena.kv_device.shape == (3, 5, 2, 4, 2, 16)
    assert arena.kv_host.shape == (3, 7, 2, 4, 2, 16)
    assert arena.act_device.shape == (3, 2, 4, 64)
    assert arena.act_host.shape == (3, 3, 4, 64)
    for (kind, place), pool in arena.pools.items():
        tensor = arena.tensor(kind, place)
        assert tensor.shape[1] == pool.count == pool.unused
        assert tensor.nbytes == pool.count * arena.block_bytes(kind)
        # One layer of a run of blocks is one copy.
        assert tensor[1, 1:3].is_contiguous()
    arena.close()


def test_too_large_for_the_host_is_refused_with_both_numbers(monkeypatch) -> None:
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    monkeypatch.setattr("kappa_engine.kv_cache.free_host_bytes", lambda: 10_000)
    with pytest.raises(ArenaTooLarge) as refused:
        Arena(SHAPE, ArenaSize(1, 1000), dtype=torch.float32)
    message = str(refused.value)
    assert f"({1001 * block_bytes} bytes)" in message and "(10000 bytes)" in message
    assert "fewer host blocks" in message


def test_arena_larger_than_the_machine_is_refused_unallocated() -> None:
    free_bytes = free_host_bytes()
    assert free_bytes > 0
    blocks = 2 * free_bytes // (3 * 2 * 16 * 2 * 16 * 4)
    with pytest.raises(ArenaTooLarge, match=str(free_bytes)[:3]):
        Arena(SHAPE, ArenaSize(1, blocks), dtype=torch.float32)


@pytest.mark.parametrize(
    ("blocks", "message"), [((0,), "kv_device is 0"), ((1, -1), "kv_host is -1")]
)
def test_sizes_that_make_no_sense(blocks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArenaSize(*blocks)
