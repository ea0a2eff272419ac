"""How alike a model's queries are from step to step: ŝ of Eq. 11, into a file of head importance.

Decodes prompts exactly (a share of 1) and takes the cosine of each query head with the step before,
per KV head joined as look-ups join them (Eq. 10), averaged.
`python -m benchmarks.offload.sparse_measure FOLDER --importance IN.json --out OUT.json` does it for
a model on disk, on prompts from a seed: the paper takes tens of random sequences, but of text.
Importance itself has to be learned elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload.sparse_decoder import SparseDecoder
from engine.arena import Arena, ArenaSize
from engine.config import read_config
from engine.forward import Forward
from engine.sparse.cache import Pending, SimilarityCache, aggregate, cosines
from engine.sparse.forward import SparseForward
from engine.sparse.settings import SparseSettings
from engine.sparse.view import View
from engine.step import Ids
from engine.transfer import mover_for
from engine.weights import load_weights
from kappa.plans.clo import CloConfig, HeadProfile, equal_heads, heads_to_dict, read_heads

_BLOCK_TOKENS = 16


class _Follower(SimilarityCache):
    """Looks at the queries of every step, and lets all choices stay."""

    def follow(self, heads: HeadProfile) -> None:
        """Begin; `sums` (layers, kv_heads) of cosines over `steps` of each layer."""
        config = self.lanes.config
        self.weights = torch.from_numpy(heads.importance).view(config.layers, config.kv_heads, -1)
        self.sums = torch.zeros((config.layers, config.kv_heads), dtype=torch.float64)
        self.steps = np.zeros(config.layers, np.int64)
        self._before: dict[int, Tensor] = {}

    def look_up(self, layer: int, queries: Tensor, view: View) -> Pending | None:
        """Note how like the last step's queries these are; look up all the same."""
        now = queries.view(len(view.lanes), self.lanes.config.kv_heads, self.lanes.layout.group, -1)
        before = self._before.get(layer)
        if before is not None:
            like = aggregate(cosines(now, before).double().cpu(), self.weights[layer])
            self.sums[layer] += like.mean(dim=0)
            self.steps[layer] += 1
        self._before[layer] = now.clone()
        return super().look_up(layer, queries, view)


def measure(
    forward: Forward, prompts: Sequence[Ids], steps: int, heads: HeadProfile
) -> HeadProfile:
    """The profile with the mean cosine of each KV head (layers, kv_heads) added.

    Args:
        forward: the model, with blocks for the prompts.
        prompts: all decoded together.
        steps: tokens generated for each; two or more.
        heads: importance, which weighs query heads.

    Raises:
        ValueError: too few steps to compare any.
    """
    if steps < 2:
        raise ValueError(f"{steps} steps have no neighbours: give 2 or more")
    most = max(len(prompt) for prompt in prompts) + steps + 1
    whole = CloConfig(share=1.0, code_bits=64)
    settings = SparseSettings(
        whole, len(prompts), most, "hash", prefetch=False, chunk_tokens=1, injected_hits=1.0
    )
    nobody = ((),) * forward.config.layers
    decoder = SparseDecoder(forward, settings, persistent=nobody, heads=heads)
    follower = _Follower(decoder.lanes, heads)
    follower.follow(heads)
    decoder.sparse = SparseForward(forward, follower)
    try:
        decoder.prefill(prompts)
        for _ in range(steps):
            decoder.step()
    finally:
        decoder.close()
    similarity = follower.sums.numpy() / follower.steps[:, None]
    return HeadProfile(heads.importance, np.clip(similarity, -1.0, 1.0), heads.source)


def main(arguments: list[str] | None = None) -> int:
    """Measure a model on disk; 0, or 2 with the reason where it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload.sparse_measure", description=__doc__
    )
    add = parser.add_argument
    add("folder", type=Path, help="of the model, in safetensors")
    add("--importance", type=Path, help="file of head importance; without: all heads alike")
    add("--out", type=Path, required=True, help="file to write")
    add("--prompts", type=int, default=8)
    add("--length", type=int, default=512, help="tokens of a prompt")
    add("--steps", type=int, default=64, help="tokens generated")
    add("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    try:
        config = read_config(asked.folder)
        known = read_heads(asked.importance, config.shape) if asked.importance else None
        heads = known or equal_heads(config.shape)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = load_weights(asked.folder, config, device=device)
        each = -(-(asked.length + asked.steps + 1) // _BLOCK_TOKENS)
        size = ArenaSize(each, asked.prompts * each, block_tokens=_BLOCK_TOKENS)
        arena = Arena(config.shape, size, dtype=weights.dtype, device=device)
        mover = mover_for(device)
        try:
            rng = np.random.default_rng(asked.seed)
            prompts = list(rng.integers(0, config.vocab, (asked.prompts, asked.length)))
            profile = measure(Forward(weights, arena, mover), prompts, asked.steps, heads)
        finally:
            mover.stop()
            arena.close()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    note = f"similarity: {asked.prompts} prompts of {asked.length} random tokens"
    asked.out.write_text(json.dumps(heads_to_dict(profile, config.shape.name, note)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
