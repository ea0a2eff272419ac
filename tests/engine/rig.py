"""An engine's model half over small shuffled pools, with the reference that it must agree with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappa_engine.block_pool import BlockType, Ids, Place
from kappa_engine.config import read_config
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.step import Pages, prompt_row
from kappa_engine.transfer import LinkMover, mover_for
from kappa_engine.weights import HostWeights, Weights, load_weights
from tests.engine import hf

BLOCK = 4
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@cache
def weights(
    family: str, dtype: torch.dtype, device: str, host: HostWeights | None = None
) -> Weights:
    with tempfile.TemporaryDirectory() as folder:
        path = hf.save(hf.reference(family, dtype), Path(folder))
        config = read_config(path)
        return load_weights(path, config, dtype=dtype, device=device, host=host)


@dataclass
class Rig:
    forward: Forward
    arena: Arena
    mover: LinkMover
    model: Any
    dtype: torch.dtype
    rng: np.random.Generator

    def blocks(self, type: BlockType, place: Place, count: int) -> Ids:
        """Blocks in no order."""
        pool = self.arena.pools[type, place]
        spare = pool.allocate(min(pool.unused, 2 * count))
        chosen = self.rng.permutation(spare)
        pool.free(int(i) for i in chosen[count:])
        return chosen[:count]

    def pages(self, tokens: int, *where: tuple[BlockType, Place]) -> Pages:
        count = -(-tokens // BLOCK)
        pages = Pages()
        for type, place in where:
            pages.put(0, type, place, self.blocks(type, place, count))
        return pages

    def stored(self, tokens: Ids, count: int) -> Pages:
        """Host pages of both types that hold the first `count` tokens."""
        pages = self.pages(count, ("kv", "host"), ("act", "host"))
        if count:
            here = self.pages(count, ("kv", "device"), ("act", "device"))
            self.forward.compute([prompt_row(tokens[:count], here)])
            for type in ("kv", "act"):
                device, host = (pages_.column(type, place) for pages_, place in (
                    (here, "device"), (pages, "host")))  # fmt: skip
                held = self.arena.tensor(type, "device")[:, device]
                self.arena.tensor(type, "host")[:, host] = held.to("cpu")
        return pages

    def expected(self, tokens: Ids) -> Tensor:
        return hf.logits(self.model, tokens)

    def agrees(self, got: Tensor, want: Tensor) -> bool:
        assert got.shape == want.shape
        return float((got.cpu() - want).abs().max()) <= hf.TOLERANCE[self.dtype]


@contextmanager
def rig(
    family: str,
    dtype: torch.dtype = torch.float64,
    *,
    device: str = "cpu",
    made_with: Callable[[Weights, Arena, LinkMover, int], Forward] = Forward,
    blocks: int = 96,
    cpu_threads: int = 0,
    seed: int = 0,
    host: HostWeights | None = None,
    mover: LinkMover | None = None,
) -> Iterator[Rig]:
    made = weights(family, dtype, device, host)
    size = ArenaSize(blocks, blocks, blocks, blocks, block_tokens=BLOCK)
    arena = Arena(made.config.shape, size, dtype=dtype, device=device)
    for type, place in arena.pools:
        # What was never written must not matter.
        arena.tensor(type, place).fill_(torch.nan)
    mover = mover or mover_for(device)
    forward = made_with(made, arena, mover, cpu_threads)
    try:
        yield Rig(
            forward, arena, mover, hf.reference(family, dtype), dtype, np.random.default_rng(seed)
        )
    finally:
        forward.close()
        mover.stop()
        arena.close()


def prompt(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng(1000 * seed + length).integers(3, hf.VOCAB, length)
