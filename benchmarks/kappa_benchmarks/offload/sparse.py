"""Decoding with a sparse choice of a cache in host memory (paper 004): seconds, and answers.

The contexts of some texts are computed exactly; then a model reads on, one token a step, in each of
the ways: exactly, by CLO as it is served and otherwise, and by an LRU cache of blocks in as much
memory.
Queries, hits and misses are the model's own. With `depths` the cell is about answers: perplexity of
the tokens read, and numbers hidden in a context that the model is asked for; else about seconds.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kappa.model import ModelShape
from kappa.plans.clo import (
    HeadProfile,
    SparseSettings,
    equal_heads,
    persistent_heads,
    persistent_share,
    read_heads,
)
from kappa.plans.head_codes import CodeMaps
from kappa_benchmarks.harness import half_width, paired, quartiles
from kappa_benchmarks.offload.cells import (
    HEADS,
    TEXT,
    Group,
    Setting,
    SparseCell,
    model,
    trained_folder,
)
from kappa_benchmarks.offload.lru import LruCache
from kappa_benchmarks.offload.rig import Arm, Loaded, Sample, loaded, ratios
from kappa_engine.block_pool import Ids
from kappa_engine.kv_cache import ArenaSize
from kappa_engine.sparse.cache import SimilarityCache, cosines
from kappa_engine.sparse.forward import SparseForward
from kappa_engine.sparse.serving import promote_from_device
from kappa_engine.sparse.slots import Slots, View
from kappa_engine.step import (
    Pages,
    Source,
    StepRow,
    TokenSpan,
    held_spans,
    joined,
    prompt_row,
)

EXACT, LRU, HOST_KV = "exact", "lru", "host-kv"


class LeastAlike(SimilarityCache):
    """Compares the least cosine of a group with the threshold, without Eq. 10."""

    def _similar(self, layer: int, last: Tensor, view: View) -> Tensor:
        least = cosines(last, view.of(self.slots.labels[layer])).amin(dim=-1)
        return least >= self._tau[layer]


@dataclass(frozen=True, slots=True)
class Way:
    """How a choice is made, kept and fetched."""

    # Changes of the served settings.
    settings: dict[str, Any] = field(default_factory=dict)
    kind: type[SimilarityCache] = SimilarityCache
    # Thresholds by importance as `kappa heads` measured it (T); else all heads count alike.
    adapts: bool = False
    # Hard heads keep all their KV on the device (P), none of them hidden by the link.
    persists: bool = False
    # Bits of codes behind calibrated maps; 0: as in the settings, without maps.
    calibrated_bits: int = 0


WAYS = {
    "clo": Way(),
    "clo-waited": Way({"prefetch": False}),
    "clo-oracle": Way({"retriever": "oracle"}),
    "clo-anew": Way({"max_age": 1}),
    "clo-cal": Way(calibrated_bits=256),
    "clo-cal-128": Way(calibrated_bits=128),
    # Paper 004, Fig. 12, with calibrated codes: a fixed threshold, and T, G, P on top of it.
    "clo-fixed": Way(kind=LeastAlike, calibrated_bits=256),
    "clo-t": Way(kind=LeastAlike, adapts=True, calibrated_bits=256),
    "clo-tg": Way(adapts=True, calibrated_bits=256),
    "clo-tgp": Way(adapts=True, persists=True, calibrated_bits=256),
    "clo-tgp-waited": Way({"prefetch": False}, adapts=True, persists=True, calibrated_bits=256),
    LRU: Way({"prefetch": False}, LruCache),
    EXACT: Way({"prefetch": False}),
}
"""As it is served; choosing by the actual query; by the keys themselves; again at every step; by
calibrated codes; the parts of the paper one by one; an LRU cache; all on the device."""
_CHUNK_TOKENS = 512
_ANSWER_TOKENS = 8
_NEEDLE = " The secret number is {}."
_QUESTION = (
    "\n\nQuestion: What is the secret number in the text above?\nAnswer: The secret number is"
)


@dataclass(slots=True, kw_only=True)
class SparseRig(Loaded):
    """Sequences with their contexts on the device and in host memory; the cell's texts, then those
    with a hidden number."""

    setting: Setting
    cell: SparseCell
    # (sequences, tokens): the tokens behind the contexts.
    following: Tensor
    device_blocks: list[list[int]]
    host_blocks: list[list[int]]
    # That are to be found.
    numbers: list[str]
    facts: dict[str, Any]
    # Text of token ids.
    words: Callable[[list[int]], str] = str
    # As `kappa heads` measured them.
    heads: HeadProfile
    # Share of KV heads that keep all their KV on the device, by way.
    kept: dict[str, float] = field(default_factory=dict)
    # Of a way's last run; None: it looks nothing up.
    hits: dict[str, float | None] = field(default_factory=dict)

    @contextmanager
    def opened(self, way: str, share: float, which: range) -> Iterator[SparseForward]:
        """The model with a slot for each of these sequences, as after its context."""
        context, shape, how = self.cell.context, self.config.shape, WAYS[way]
        longest = context + self.following.shape[1] + _ANSWER_TOKENS
        clo = replace(self.setting.clo, share=share)
        clo = replace(clo, code_bits=how.calibrated_bits or clo.code_bits)
        settings = SparseSettings(clo, len(which), longest, chunk_tokens=1)
        settings = replace(settings, **how.settings)
        heads = self.heads if how.adapts else equal_heads(shape)
        persistent = persistent_heads(
            shape, clo, heads if how.persists else equal_heads(shape), 0.0
        )
        if way == EXACT:
            persistent = (tuple(range(shape.kv_heads)),) * shape.layers
        maps = self.heads.codes if how.calibrated_bits else None
        slots = Slots(self.forward, settings, persistent, maps)
        for slot, index in enumerate(which):
            blocks = self.host_blocks[index]
            promote_from_device(slots, slot, context, self.device_blocks[index], blocks, [])
        self.kept[way] = persistent_share(shape, persistent)
        yield SparseForward(self.forward, how.kind(slots, heads))
        self.mover.drain()
        for slot, index in enumerate(which):
            grown = slots.close(slot)[len(self.host_blocks[index]) :]
            self.arena.pools["kv", "host"].free(grown)

    def read(self, sparse: SparseForward, tokens: Tensor) -> Tensor:
        """Each column of tokens (slots, n) as a step; logits (slots, vocabulary) of the last."""
        for column in tokens.T:
            logits = sparse.run(range(len(column)), column[:, None], self.take_block)
        return logits

    def take_block(self) -> int:
        """A host block for what gets old."""
        return self.arena.pools["kv", "host"].allocate(1)[0]


@contextmanager
def sparse_rig(setting: Setting, group: Group, cell: SparseCell) -> Iterator[SparseRig]:
    """A rig for one cell.

    Raises:
        ArenaTooLarge: it does not fit.
        ValueError: the trained model, or the text, is not here.
    """
    contexts, following, numbers, facts, words = _sequences(group, cell)
    size, count = setting.block_tokens, len(contexts)
    longest = cell.context + following.shape[1] + _ANSWER_TOKENS
    blocks = -(-longest // size)
    arena = ArenaSize(count * blocks, count * blocks, block_tokens=size)
    with loaded(setting, group, arena) as made:
        on_device, in_host = [], []
        pools = made.arena.pools
        for tokens in contexts:
            mine = pools["kv", "device"].allocate(blocks)
            for stop in range(_CHUNK_TOKENS, cell.context + _CHUNK_TOKENS, _CHUNK_TOKENS):
                row = prompt_row(tokens[:stop], Pages(np.array(mine)), start=stop - _CHUNK_TOKENS)
                made.compute([row])
            whole = max(0, cell.context - setting.clo.recent_tokens) // size
            kept = pools["kv", "host"].allocate(whole)
            made.mover.d2h(made.arena.copies("kv", "host", kept, mine[:whole])).block()
            on_device.append(mine)
            in_host.append(kept)
        yield SparseRig(
            forward=made, setting=setting, cell=cell, following=following.to(made.arena.device),
            device_blocks=on_device, host_blocks=in_host, numbers=numbers, facts=facts, words=words,
            heads=heads_of(group.model, made.config.shape),
        )  # fmt: skip


def heads_of(name: str, shape: ModelShape) -> HeadProfile:
    """A trained model's heads as they were measured; drawn ones of a random model."""
    if trained_folder(name) is not None:
        return read_heads(HEADS, shape)
    rng, size = np.random.default_rng(6), (shape.layers, shape.kv_heads)
    maps = CodeMaps(
        np.zeros((*size, shape.head_dim)), np.tile(np.eye(shape.head_dim), (*size, 1, 1))
    )
    return HeadProfile(rng.random((shape.layers, shape.heads)), rng.random(size), "drawn", maps)


def _sequences(
    group: Group, cell: SparseCell
) -> tuple[list[Ids], Tensor, list[str], dict[str, Any], Callable[[list[int]], str]]:
    """Contexts, what follows them, hidden numbers, what they are made of, and words of ids."""
    rng, steps = np.random.default_rng(5), cell.steps + 1
    folder = trained_folder(group.model)
    if folder is None:
        drawn = rng.integers(3, model(group.model).vocab, (cell.texts, cell.context + steps))
        ids = torch.from_numpy(drawn)
        return list(drawn[:, : cell.context]), ids[:, cell.context :], [], {"text": "random"}, str
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXT.glob("[0-9]*.md")))

    def ids_of(words: str) -> list[int]:
        return list(tokenizer(words, verbose=False)["input_ids"])

    every, longest = np.array(ids_of(text)), cell.context + steps
    if len(every) < (cell.texts + 1) * longest:
        raise ValueError(
            f"{TEXT} has {len(every)} tokens of text: {cell.texts} texts of {longest} and one to "
            "hide numbers in need more; run from a checkout, or name fewer"
        )
    pieces = every[: cell.texts * longest].reshape(cell.texts, longest)
    contexts, following = (
        list(pieces[:, : cell.context]),
        torch.from_numpy(pieces[:, cell.context :]),
    )
    filler, numbers = every[cell.texts * longest :], []
    for depth in cell.depths:
        numbers.append(str(rng.integers(10_000, 100_000)))
        needle = ids_of(_NEEDLE.format(numbers[-1]))
        room = cell.context - len(needle)
        at = int(depth * room)
        contexts.append(np.concatenate((filler[:at], needle, filler[at:room])))
    question = torch.tensor(ids_of(_QUESTION))
    if numbers:
        longer = max(steps, len(question))
        held = torch.zeros((len(contexts), longer), dtype=torch.int64)
        held[: cell.texts, :steps], held[cell.texts :, : len(question)] = following, question
        following = held
    facts = {"text": str(TEXT.name), "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    return (
        contexts,
        following,
        numbers,
        {**facts, "question_tokens": len(ids_of(_QUESTION))},
        tokenizer.decode,
    )


# Answers ------------------------------------------------------------------------------------------


def answer_rows(rig: SparseRig) -> Iterator[dict[str, Any]]:
    """Perplexity and hidden numbers found, by way and share, beside exact attention."""
    exact = _losses(rig, EXACT, 1.0)
    for way, share in ((EXACT, 1.0), *((w, s) for s in rig.cell.shares for w in rig.cell.ways)):
        losses, hits, moved = exact if way == EXACT else _losses(rig, way, share)
        more = (losses - exact[0]).mean(dim=1).tolist()
        mean, half = math.fsum(more) / len(more), half_width(more)
        found = _found(rig, way, share)
        yield {
            "batch": rig.cell.texts, "context": rig.cell.context, "share": share,
            "policy": label(way, share), "hits": hits, "bytes_h2d": moved,
            "tokens_scored": losses.numel(), "perplexity": math.exp(float(losses.mean())),
            "perplexity_loss": math.expm1(mean), "perplexity_loss_low": math.expm1(mean - half),
            "perplexity_loss_high": math.expm1(mean + half),
            "found": sum(found) / len(found) if found else None, "found_by_depth": found,
            "persistent": rig.kept[way],
            "depths": rig.cell.depths, **rig.facts,
        }  # fmt: skip


def label(way: str, share: float) -> str:
    """A way and its share as rows name them: "clo 1/8"."""
    return way if way == EXACT else f"{way} {Fraction(share).limit_denominator(64)}"


def _losses(rig: SparseRig, way: str, share: float) -> tuple[Tensor, float | None, float]:
    """-ln p of each token read (texts, steps); hits of all look-ups, and bytes of a step."""
    which = range(rig.cell.texts)
    tokens = rig.following[: len(which), : rig.cell.steps + 1]
    found = []
    with rig.opened(way, share, which) as sparse:
        for step in range(rig.cell.steps):
            logits = rig.read(sparse, tokens[:, step : step + 1])
            found.append(F.cross_entropy(logits.float(), tokens[:, step + 1], reduction="none"))
        counts = sparse.cache.counts()
    hits = counts.hits / counts.lookups if counts.lookups else None
    return torch.stack(found, dim=1), hits, counts.gathered_bytes / rig.cell.steps


def _found(rig: SparseRig, way: str, share: float) -> list[bool]:
    """Whether the answer is the hidden number, by number; question and answer are read sparsely."""
    which = range(rig.cell.texts, rig.cell.texts + len(rig.numbers))
    if not which:
        return []
    question = rig.following[which.start :, : rig.facts["question_tokens"]]
    with rig.opened(way, share, which) as sparse:
        logits = rig.read(sparse, question)
        tokens = [logits.argmax(dim=-1)]
        for _ in range(_ANSWER_TOKENS - 1):
            tokens.append(rig.read(sparse, tokens[-1][:, None]).argmax(dim=-1))
    answers = [rig.words(one.tolist()) for one in torch.stack(tokens, dim=1)]
    return [
        re.findall(r"\d+", answer)[:1] == [number]
        for answer, number in zip(answers, rig.numbers, strict=True)
    ]


# Seconds ------------------------------------------------------------------------------------------


def sparse_arms(rig: SparseRig) -> list[Arm]:
    """All ways at all shares, exact attention, and exact attention that loads all KV."""
    ways = [(EXACT, 1.0), *((way, share) for share in rig.cell.shares for way in rig.cell.ways)]
    arms = [Arm(label(*one), partial(_timed, rig, *one)) for one in ways]
    return [*arms, Arm(HOST_KV, partial(_loading, rig))]


def _loading(rig: SparseRig) -> Sample:
    """The same steps with whole blocks in host memory, all of which cross the link at each step, a
    layer ahead, as the engine does for planner `host-kv`."""
    size, texts = rig.arena.block_tokens, range(rig.cell.texts)
    pages = []
    for text in texts:
        mine = Pages(np.array(rig.device_blocks[text]))
        mine.column("kv", "device")[: len(rig.host_blocks[text])] = -1
        mine.put(0, "kv", "host", rig.host_blocks[text])
        pages.append(mine)

    def read(steps: range) -> None:
        for step in steps:
            at = rig.cell.context + step
            new = TokenSpan(Source.NEW, at, at + 1)
            spans = [joined([*held_spans(pages[text], at, size), new]) for text in texts]
            tokens = rig.following[:, step].tolist()
            rig.forward.compute([StepRow([tokens[t]], spans[t], pages[t]) for t in texts])

    read(range(1))
    rig.hits[HOST_KV] = None
    return rig.timed(lambda: read(range(1, rig.cell.steps)))


def _timed(rig: SparseRig, way: str, share: float) -> Sample:
    """The steps of all texts together."""
    which = range(rig.cell.texts)
    with rig.opened(way, share, which) as sparse:
        # The first step has nothing to hit.
        rig.read(sparse, rig.following[:, :1])
        before = sparse.cache.counts()
        steps = rig.following[:, 1 : rig.cell.steps]
        sample, counts = rig.timed(lambda: rig.read(sparse, steps)), sparse.cache.counts()
    looked = counts.lookups - before.lookups
    rig.hits[label(way, share)] = (counts.hits - before.hits) / looked if looked else None
    return replace(sample, h2d_bytes=counts.gathered_bytes - before.gathered_bytes)


def sparse_rows(
    rig: SparseRig, arms: Sequence[Arm], samples: dict[str, list[Sample]]
) -> list[dict[str, Any]]:
    """One per arm, seconds of a step; speed-ups over the LRU cache of the same share.

    ranked: whether the quartiles of both do not overlap; speedup_low, _high: of the mean of ratios
    within a round, by Student's t.
    """
    rows, steps = [], rig.cell.steps - 1
    for arm in arms:
        share = arm.name.rpartition(" ")[2]
        base = f"{LRU} {share}" if f"{LRU} {share}" in samples else arm.name
        loading = paired(*([s.latency_s for s in samples[name]] for name in (HOST_KV, arm.name)))
        low, latency_s, high = quartiles([s.latency_s / steps for s in samples[arm.name]])
        base_low, _, base_high = quartiles([s.latency_s / steps for s in samples[base]])
        gain_low, gain, gain_high = quartiles(ratios(samples, base, arm.name))
        mean = paired(*([s.latency_s for s in samples[name]] for name in (base, arm.name)))
        rates = [s.h2d_bytes / s.link_s / 1e9 for s in samples[arm.name] if s.link_s]
        rows.append({
            "batch": rig.cell.texts, "context": rig.cell.context, "policy": arm.name,
            "hits": rig.hits[arm.name], "latency_s": latency_s, "latency_iqr_s": high - low,
            "latency_least_s": min(s.latency_s for s in samples[arm.name]) / steps,
            "latencies_s": [s.latency_s / steps for s in samples[arm.name]],
            "repeats": len(samples[arm.name]), "tokens_per_s": rig.cell.texts / latency_s,
            "bytes_h2d": quartiles([s.h2d_bytes for s in samples[arm.name]])[1] / steps,
            "link_gbps": quartiles(rates)[1] if rates else None, "predicted_s": None,
            "baseline": base, "speedup": gain, "speedup_iqr": gain_high - gain_low,
            "speedup_low": mean.low, "speedup_high": mean.high,
            "ranked": high < base_low or base_high < low,
            "loading": loading.mean, "loading_low": loading.low, "loading_high": loading.high,
            **rig.facts,
        })  # fmt: skip
    return rows
