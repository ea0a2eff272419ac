"""The rungs: each measures one thing and yields rows, so that what was measured before its time was
up is kept.

A row has a `kind`. "note" is progress; "skipped" and "failed" name an engine and say why, and the
rung goes on with what else there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappa.model import kv_bytes_per_token
from kappa_benchmarks.hardware.device import Sizes, read_shape
from kappa_benchmarks.hardware.engines import (
    BLOCK_TOKENS,
    Answer,
    Bench,
    Ids,
    Missing,
    Played,
    Served,
    VllmServed,
)
from kappa_benchmarks.offload.cells import setting
from kappa_benchmarks.offload.run import Run
from kappa_engine.peaks import finish, repeating
from kappa_engine.transfer import Copies, mover_for
from kappa_engine.weights import DTYPES

EQUAL = "equal"
"""The verdict of a check that passed."""

Row = dict[str, Any]
Rows = Iterator[Row]

_REPEATS = 5
_VOCABULARY = 1_000
# Copies in pieces: a host call for each.
_MOST_PIECES_BYTES = 1 << 26
# Of a prefix, its last block may be one that is computed.
_MOST_BLOCK_TOKENS = 64
# Log-probabilities nearer than this are the same, whatever the noise.
_SAME = 1e-3
_DECODED_TOKENS = 32
# As the groups of the settings "gpu" and "smallest".
_PAPERS = ("KVPR", "HybridServe", "CPU attention", "weights", "CLO")
_COMPARED_TOKENS, _LIKELIEST = 8, 20


def prompt(length: int, seed: int) -> Ids:
    """Random ids, the same for the same seed and length; none is the beginning of another."""
    ids: Ids = np.random.default_rng((seed, length)).integers(2, _VOCABULARY, length).tolist()
    return ids


def rates(bench: Bench, arm: str) -> Rows:
    """Copies by size, pinned and pageable, whole and in blocks, both ways, alone and at once, and
    beside computing; and what vLLM measures of itself, through its host tier and its steps."""
    device, sizes = bench.device, bench.device.sizes
    largest, shape = sizes.copy_bytes[-1], read_shape(bench.model, sizes.dtype)
    # One layer's part of a block: what the engines' layouts leave in one piece.
    block_bytes = int(kv_bytes_per_token(shape) / shape.layers) * BLOCK_TOKENS
    if arm == "vllm":
        with closing(VllmServed(device, bench.model, eager=True)) as served:
            yield from _of_engine(served.measured())
        return
    if arm == "pinned" and not device.cuda:
        raise Missing("pinned memory is a GPU driver's")
    there = torch.zeros(largest, dtype=torch.int8, device=device.torch)
    # A buffer for each way, so that both may go at once.
    back, forth = (device.host(largest, pinned=arm == "pinned") for _ in range(2))
    side = 4 * shape.hidden
    square = torch.randn(side, side, device=device.torch).to(DTYPES[sizes.dtype])
    mover = mover_for(device.torch)

    def compute() -> None:
        torch.mm(square, square)
        finish(device.torch)

    def copy_s(ways: Mapping[str, Copies]) -> float:
        start_s = time.perf_counter()
        for event in [getattr(mover, way)(copies) for way, copies in ways.items()]:
            event.block()
        return time.perf_counter() - start_s

    cut = [size for size in sizes.copy_bytes if block_bytes <= size <= _MOST_PIECES_BYTES]
    layouts = {"whole": sizes.copy_bytes, "blocks": cut}
    for layout, size in ((layout, size) for layout, most in layouts.items() for size in most):
        down = _copies(there, forth, size, block_bytes, layout)
        up = _copies(back, there, size, block_bytes, layout)
        for way, copies in {
            "to the device": {"h2d": down}, "to the host": {"d2h": up},
            "both at once": {"h2d": down, "d2h": up}, "to the device, computing": {"h2d": down},
        }.items():  # fmt: skip
            with repeating(compute) if "computing" in way else nullcontext():
                seconds = statistics.median([copy_s(copies) for _ in range(_REPEATS)])
            yield {
                "kind": "copy", "way": f"{way}, {arm}", "layout": layout, "bytes": size,
                "seconds": seconds, "bytes_per_s": size / seconds,
                "largest": size == layouts[layout][-1],
            }  # fmt: skip
    mover.stop()


def _of_engine(found: Row) -> Rows:
    yield {"kind": "memory", "bytes_per_s": found["hbm_bytes_per_s"]}
    yield from ({"kind": "product", **row} for row in found["gemm"])
    yield {"kind": "engine", "unmeasured": found["unmeasured"], "step": found.get("step")}
    rates = {"": "bytes_per_s", ", computing": "beside_bytes_per_s"}
    # Without a link that was measured these are copies of the machine, not of the host tier.
    ways = {"to the device": found["h2d"], "to the host": found["d2h"]}
    for way, rows in ways.items() if "load_fixed_s" in found else ():
        for what, key in rates.items():
            for row in rows:
                yield {
                    "kind": "copy", "way": f"{way}{what}, vLLM", "layout": "blocks",
                    "bytes": row["bytes"], "bytes_per_s": row[key], "largest": row is rows[-1],
                }  # fmt: skip


def _copies(target: Tensor, source: Tensor, size: int, block_bytes: int, layout: str) -> Copies:
    if layout == "whole":
        return [(target[:size], source[:size])]
    order = np.random.default_rng(0).permutation(size // block_bytes) * block_bytes
    places = zip(range(0, size, block_bytes), order.tolist(), strict=True)
    return [(target[t : t + block_bytes], source[s : s + block_bytes]) for t, s in places]


def roundtrip(bench: Bench, name: str) -> Rows:
    """A prompt computed, found on the device, and, once that was emptied, in host memory; and
    another prompt, which must look different."""
    sizes = bench.device.sizes
    length = sizes.cached[1] + sizes.new[0]
    same, other = (prompt(length, seed) for seed in (1, 2))
    with bench.opened(name, eager=True) as served:
        ask = partial(served.play, tokens=_COMPARED_TOKENS, likeliest=_LIKELIEST)
        fresh, device = (ask([same]).answers[0] for _ in range(2))
        complete = served.evict()
        host = ask([same])
        control = ask([other]).answers[0]
        yield {
            "kind": "compare", "tier": served.tier, "tokens": length, "all_stored": complete,
            "load_s": host.load_s, **compare(fresh, device, host.answers[0], control),
        }  # fmt: skip


def compare(fresh: Answer, device: Answer, host: Answer, control: Answer) -> Row:
    """Compare a prompt's KV from host memory with the same on the device.

    Both runs compute the same last tokens, so they differ by less than a run that computed all of
    the prompt differs from either (`noise`); a prompt of other tokens (`control`) differs by far
    more, or the comparison could show nothing.
    """
    noise, moved = _distance(fresh, device), _distance(device, host)
    far = _distance(fresh, control)
    bound = max(noise, _SAME)
    verdict = EQUAL
    if host.cached_tokens == 0:
        verdict = "nothing was loaded"
    elif far < 10 * bound:
        verdict = "nothing shown: another prompt looks the same"
    elif moved > bound:
        verdict = "different"
    return {
        "verdict": verdict, "moved": moved, "noise": noise, "control": far,
        "same_tokens": host.tokens == device.tokens, "cached_tokens": host.cached_tokens,
    }  # fmt: skip


def _distance(one: Answer, other: Answer) -> float:
    """The largest difference of a log-probability, up to the first token that differs.

    A token that only one of them lists is taken to have the least listed value in the other.
    """
    most = 0.0
    for number, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
        least_a, least_b = min(a.values()), min(b.values())
        gaps = (abs(a.get(t, least_a) - b.get(t, least_b)) for t in a.keys() | b.keys())
        most = max(most, *gaps)
        if one.tokens[number] != other.tokens[number]:
            break
    return most


def ttft(bench: Bench, name: str) -> Rows:
    """The grid of cached and new tokens: from host memory, and with the prefix on the device."""
    sizes = bench.device.sizes
    with bench.opened(name) as served:
        # Kernels, and memory that is there.
        served.play([prompt(sizes.cached[0] + sizes.new[-1], 3)], 2)
        yield {
            "kind": "engine", "tier": served.tier, "kv_bytes": served.kv_bytes,
            "serial_share": served.serial_share,
        }  # fmt: skip
        for cached in sizes.cached:
            prefix = prompt(cached, 100 + cached)
            served.play([prefix])
            for new in sizes.new:
                news = [prompt(new, n) for n in range(2 * sizes.repeats)]
                yield {"kind": "ttft", "cached": cached, "new": new} | _cell(served, prefix, news)


def _cell(served: Served, prefix: Ids, news: Sequence[Ids]) -> Row:
    loaded: list[Played] = []
    computed: list[float] = []
    complete = True
    for one, another in zip(news[::2], news[1::2], strict=True):
        complete &= served.evict()
        loaded.append(served.play([[*prefix, *one]]))
        computed.append(served.play([[*prefix, *another]]).answers[0].ttft_s)
    times = [played.answers[0].ttft_s for played in loaded]
    found = min(played.answers[0].cached_tokens for played in loaded)
    short = found < len(prefix) - _MOST_BLOCK_TOKENS
    return {
        "measured_s": statistics.median(times), "least_s": min(times), "most_s": max(times),
        "load_s": statistics.median(played.load_s for played in loaded),
        "compute_s": statistics.median(computed), "all_stored": complete,
        "found": found, "verdict": f"found {found} of {len(prefix)} tokens" if short else EQUAL,
    }  # fmt: skip


def graphs(bench: Bench, arm: str) -> Rows:
    """Seconds of vLLM's decoding steps by batch, with and without CUDA graphs."""
    if arm == "graphs" and not bench.device.cuda:
        raise Missing("CUDA graphs need a GPU")
    with bench.opened("vllm", eager=arm == "eager") as served:
        for batch in bench.device.sizes.batches:
            prompts = [prompt(64, n) for n in range(batch)]
            yield {"kind": "decode", "batch": batch} | _decode(served, prompts)


def _decode(served: Served, prompts: Sequence[Ids]) -> Row:
    served.play(prompts, _DECODED_TOKENS)
    played = served.play(prompts, _DECODED_TOKENS)
    steps = [seconds for tokens, seconds in played.steps if tokens == len(prompts)]
    between = [gap for answer in played.answers for gap in gaps_s(answer)]
    return {
        "steps": len(steps),
        "step_s": statistics.median(steps) if steps else None,
        "between_tokens_s": statistics.median(between),
    }


def gaps_s(answer: Answer, after_s: float = 0.0, before_s: float = float("inf")) -> list[float]:
    """Seconds between its tokens, of those gaps that lie within a time, or partly."""
    return [b - a for a, b in pairwise(answer.times_s) if b >= after_s and a <= before_s]


def just_in_time(bench: Bench, name: str) -> Rows:
    """A burst beside a request that decodes: prefixes loaded just in time, loaded when vLLM's own
    order admits them, and computed."""
    sizes = bench.device.sizes
    for rule in ("fair", "stock" if name == "vllm" else "fcfs"):
        with bench.opened(name, rule, eager=True) as served:
            served.play([prompt(sizes.cached[0] + sizes.new[-1], 3)], 2)
            loads = "just in time" if rule == "fair" else "in order"
            yield {"kind": "burst", "loads": loads} | _burst(sizes, served, hit=True)
            if rule == "fair":
                yield {"kind": "burst", "loads": "none"} | _burst(sizes, served, hit=False)


def _burst(sizes: Sizes, served: Served, *, hit: bool) -> Row:
    ttfts, gaps, loads = list[float](), list[float](), list[float]()
    for number in range(sizes.repeats):
        seed = 1_000 * (number + 1) + 500 * hit
        prefixes = [prompt(sizes.cached[1], seed + n) for n in range(sizes.burst)]
        if hit:
            served.play(prefixes)
        served.evict()
        ends = [prompt(sizes.new[1], seed - n - 1) for n in range(sizes.burst)]
        whole = [[*prefix, *end] for prefix, end in zip(prefixes, ends, strict=True)]
        played = served.play(whole, beside=prompt(64, seed + 99))
        assert played.beside is not None
        first_s = min(answer.submitted_s for answer in played.answers)
        last_s = max(answer.times_s[0] for answer in played.answers)
        ttfts += [answer.ttft_s for answer in played.answers]
        gaps += gaps_s(played.beside, first_s, last_s)
        loads.append(played.load_s)
    return {
        "requests": sizes.burst, "cached": sizes.cached[1], "new": sizes.new[1],
        "ttft_s": statistics.median(ttfts), "ttft_most_s": max(ttfts),
        "load_s": statistics.median(loads),
        "step_s": statistics.median(gaps) if gaps else None, "step_most_s": max(gaps, default=None),
    }  # fmt: skip


def offload(bench: Bench, arm: str) -> Rows:
    """A paper's ways and their baseline, in our engine."""
    whole = setting("gpu" if bench.device.cuda else "smallest")
    run = Run([replace(whole, groups=(whole.groups[_PAPERS.index(arm)],))], _REPEATS)
    found = run.run()
    yield from ({"kind": "policy", **row} for row in found["rows"])
    for one in found["left_out"]:
        yield {"kind": "skipped", "why": f"{one['what']}: {one['why']}"}


@dataclass(frozen=True, slots=True)
class Rung:
    """One measurement of the ladder."""

    # After which it is ended.
    bound_s: float
    # The subject, in a line.
    what: str
    measure: Callable[[Bench, str], Rows]
    # Measured one after the other.
    arms: tuple[str, ...] = ("torch", "vllm")

    def rows(self, bench: Bench) -> Rows:
        """Rows of every arm; an arm that lacks something or fails does not end the rung."""
        for arm in self.arms:
            yield {"kind": "note", "text": arm}
            try:
                yield from ({"arm": arm, **row} for row in self.measure(bench, arm))
            except Missing as error:
                yield {"kind": "skipped", "arm": arm, "why": str(error)}
            except Exception as error:
                yield {"kind": "failed", "arm": arm, "why": f"{type(error).__name__}: {error}"}


RUNGS = {
    "rates": Rung(100, "copies by size, layout and memory; what vLLM measures of itself", rates,
                  ("pinned", "pageable", "vllm")),
    "roundtrip": Rung(90, "store, evict, load: the same log-probabilities?", roundtrip),
    "ttft": Rung(130, "TTFT over cached and new tokens, by the cost model", ttft),
    "graphs": Rung(110, "vLLM's decoding steps and CUDA graphs", graphs, ("eager", "graphs")),
    "just_in_time": Rung(100, "a burst of loads beside decoding", just_in_time),
    "offload": Rung(60, "each paper's way to offload", offload, _PAPERS),
}  # fmt: skip
"""In this order; bounds add up to less than ten minutes."""
