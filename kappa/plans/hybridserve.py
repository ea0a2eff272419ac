"""HybridServe's allocation of host memory between KV and activation blocks, and what follows.

Algorithm 1 of the paper (activation checkpointing with a hybrid cache, Section 4.3) as printed, for
the bench, and corrected, for serving: Eq. 9 forgets that activations cross the link too, Eq. 10 the
forward pass, and the two steps count the projection's fixed cost thrice. A request's blocks keep
the allocation's ratio (Eq. 11, `engine.settings`). Mini-batches (Section 4.3.3), what the device's
two buffers hold at once, are packed so that projecting and loading take equally long (`pack`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kappa.checks import check_not_negative, check_positive
from kappa.plans.rates import LineFit, PlanRates


@dataclass(frozen=True, slots=True)
class HostCache:
    """What Algorithm 1 is given. Seconds are of one layer, bytes of all; lines are in blocks.

    project: T_kv_gen, seconds to project n activation blocks. load: T_load_kv, to load n KV
    blocks. weights_load_s: T_load_w. forward_s: the rest of a layer's forward pass, which the
    paper leaves out. device_blocks: activation blocks in device memory. host_bytes, weight_bytes:
    host memory, and what the weights take of it. kv_block_bytes, act_block_bytes: S_KV, S_ACT.
    """

    project: LineFit
    load: LineFit
    weights_load_s: float
    host_bytes: float
    weight_bytes: float
    kv_block_bytes: float
    act_block_bytes: float
    device_blocks: int = 0
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        self.project.require()
        self.load.require()
        check_not_negative(self, "weights_load_s", "weight_bytes", "device_blocks", "forward_s")
        check_positive(self, "kv_block_bytes", "act_block_bytes")
        if self.host_bytes < self.weight_bytes:
            raise ValueError(
                f"HostCache: weights of {self.weight_bytes:.4g} bytes do not fit host memory of "
                f"{self.host_bytes:.4g} bytes: give more memory, or a smaller model"
            )

    @property
    def free_bytes(self) -> float:
        """Host memory for blocks."""
        return self.host_bytes - self.weight_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks of each type in host memory, and the seconds a layer takes on each resource."""

    act_blocks: int
    kv_blocks: int
    link_s: float
    gpu_s: float

    @property
    def blocks_per_s(self) -> float:
        """Host blocks that a layer attends to per second: what a full memory is worth."""
        longest_s = max(self.link_s, self.gpu_s)
        return (self.act_blocks + self.kv_blocks) / longest_s if longest_s > 0 else math.inf


def host_cache(
    rates: PlanRates, block_tokens: int, host_bytes: float, *, weight_bytes: float,
    batch: int = 1, context_tokens: int = 0,
) -> HostCache:  # fmt: skip
    """Algorithm 1's inputs for a model on a node.

    host_bytes: for weights and blocks. weight_bytes: of the weights that are streamed; 0 where they
    stay on the device. batch, context_tokens: sequences, and tokens of each, whose decoding step is
    the forward pass that the correction counts.
    """
    per_layer = 1.0 / rates.layers

    def by_block(fit: LineFit) -> LineFit:
        per_block_s = fit.per_token_s * block_tokens * per_layer
        return replace(fit, per_token_s=per_block_s, fixed_s=fit.fixed_s * per_layer)

    return HostCache(
        project=by_block(rates.project),
        load=by_block(rates.load),
        weights_load_s=rates.weights_load_s * per_layer if weight_bytes else 0.0,
        host_bytes=host_bytes,
        weight_bytes=weight_bytes,
        kv_block_bytes=rates.kv_bytes * block_tokens,
        act_block_bytes=rates.activation_bytes * block_tokens,
        forward_s=rates.decode_s(batch, context_tokens)[1] * per_layer,
    )


def initial_blocks(cache: HostCache) -> tuple[int, int]:
    """Algorithm 1, lines 10-18: (ACT, KV) blocks that fill what the other resource leaves idle.

    Where the weights load longer than the device's blocks project, more activations; else KV.
    Blocks that do not fit the memory are not counted.
    """
    budget_s = cache.weights_load_s - cache.project.seconds(cache.device_blocks)
    activations = budget_s >= 0
    fit = cache.project if activations else cache.load
    block_bytes = cache.act_block_bytes if activations else cache.kv_block_bytes
    wanted = max(0.0, (abs(budget_s) - fit.fixed_s) / fit.per_token_s)
    blocks = math.floor(min(wanted, cache.free_bytes / block_bytes))
    return (blocks, 0) if activations else (0, blocks)


def remaining_blocks(cache: HostCache, act_init: int, kv_init: int) -> tuple[int, int]:
    """Algorithm 1, lines 20-27: (ACT, KV) blocks that fill the rest with T_kv_gen = T_load_kv."""
    s_act, s_kv = cache.act_block_bytes, cache.kv_block_bytes
    left = cache.free_bytes - (s_act * act_init + s_kv * kv_init)
    a_g, b_g = cache.project.per_token_s, cache.project.fixed_s
    a_l, b_l = cache.load.per_token_s, cache.load.fixed_s
    act = (left * a_l + s_kv * (b_l - b_g)) / (s_act * a_l + s_kv * a_g)
    act_blocks = math.floor(min(max(act, 0.0), left / s_act))
    return act_blocks, math.floor((left - s_act * act_blocks) / s_kv)


def allocate_paper(cache: HostCache) -> Allocation:
    """Algorithm 1 as printed; the seconds are Eq. 9 and 10, without what they forget."""
    act_init, kv_init = initial_blocks(cache)
    act_rest, kv_rest = remaining_blocks(cache, act_init, kv_init)
    act, kv = act_init + act_rest, kv_init + kv_rest
    link_s = cache.weights_load_s + cache.load.seconds(kv)
    return Allocation(act, kv, link_s, cache.project.seconds(act + cache.device_blocks))


def allocate_corrected(cache: HostCache) -> Allocation:
    """The allocation that brings most cached blocks per second, with what the paper forgets.

    T_load_w + T_load(ρ·A + K) = T_kv_gen(A + A_device) + t_forward with the memory full. A full
    memory takes the same link time whatever the types, so until the two are equal an activation
    block is a token run for nothing. Beyond, each costs gpu time: blocks per second is then a
    ratio of two lines, best at one end, so the two ends are priced as well.
    """
    most = math.floor(cache.free_bytes / cache.act_block_bytes)
    link_s = cache.weights_load_s + cache.load.seconds(cache.free_bytes / cache.kv_block_bytes)
    spare_s = link_s - cache.forward_s - cache.project.fixed_s
    balance = math.floor(spare_s / cache.project.per_token_s - cache.device_blocks)
    acts = {0, most, *(min(max(balance + i, 0), most) for i in (0, 1))}
    return max((priced(cache, act) for act in sorted(acts)), key=lambda one: one.blocks_per_s)


def priced(cache: HostCache, act_blocks: int) -> Allocation:
    """The allocation with so many activation blocks and KV in the rest, and all its seconds."""
    kv = math.floor((cache.free_bytes - cache.act_block_bytes * act_blocks) / cache.kv_block_bytes)
    ratio = cache.act_block_bytes / cache.kv_block_bytes
    link_s = cache.weights_load_s + cache.load.seconds(ratio * act_blocks + kv)
    gpu_s = cache.project.seconds(act_blocks + cache.device_blocks) + cache.forward_s
    return Allocation(act_blocks, kv, link_s, gpu_s)


def planned_share(
    rates: PlanRates, block_tokens: int, host_bytes: float, batch: int,
    allocate: Callable[[HostCache], Allocation] = allocate_corrected,
) -> float:  # fmt: skip
    """Of a host memory for blocks alone, the share of blocks to keep as activations instead of KV;
    0 where those are no smaller. batch: requests that decode together and fill it."""
    if rates.activation_ratio >= 1.0 or host_bytes < rates.kv_bytes * block_tokens:
        return 0.0
    context_tokens = int(host_bytes / rates.kv_bytes / batch)
    cache = host_cache(
        rates, block_tokens, host_bytes, weight_bytes=0.0, batch=batch,
        context_tokens=context_tokens,
    )  # fmt: skip
    found = allocate(cache)
    return found.act_blocks / max(found.act_blocks + found.kv_blocks, 1)


class Blocks(NamedTuple):
    """Blocks of each type: a request's, a mini-batch's, or what the buffers hold."""

    act: int
    kv: int


def imbalance(blocks: Blocks, project: LineFit, load: LineFit) -> float:
    """F_b = max(r, 1/r) of r = T_kv_gen(ACT) / T_load_kv(KV); infinite without either,
    which the paper leaves open (Eq. 12 and 13)."""
    project_s, load_s = project.seconds(blocks.act), load.seconds(blocks.kv)
    if project_s <= 0 or load_s <= 0:
        return math.inf
    return max(project_s / load_s, load_s / project_s)


def pack(
    requests: Sequence[Blocks], most: Blocks, project: LineFit, load: LineFit
) -> list[list[int]]:
    """Mini-batches as lists of indices into `requests`; each request is in exactly one.

    Requests join in their order if they fit `most`, what the two buffers hold, and do not make the
    imbalance F_b worse; when none can, the next mini-batch begins. Lines are in blocks.

    Raises:
        ValueError: a request that exceeds a buffer by itself.
    """
    for i, request in enumerate(requests):
        if request.act > most.act or request.kv > most.kv:
            raise ValueError(
                f"request {i} has {request.act} activation and {request.kv} KV blocks, and the "
                f"buffers hold {most.act} and {most.kv}: enlarge them, or change its ratio"
            )
    waiting = list(range(len(requests)))
    batches: list[list[int]] = []
    while waiting:
        batch = [waiting.pop(0)]
        total = requests[batch[0]]
        joined = True
        while joined:
            joined = False
            for i in list(waiting):
                grown = Blocks(total.act + requests[i].act, total.kv + requests[i].kv)
                fits = grown.act <= most.act and grown.kv <= most.kv
                worse = imbalance(grown, project, load) > imbalance(total, project, load)
                if fits and not worse:
                    waiting.remove(i)
                    batch.append(i)
                    total, joined = grown, True
        batches.append(batch)
    return batches
