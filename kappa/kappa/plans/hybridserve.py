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

from kappa.plans.rates import LineFit, PlanRates


@dataclass(frozen=True, slots=True)
class HostCache:
    """The inputs of Algorithm 1. Seconds are of one layer, bytes of all; lines are in blocks."""

    # T_kv_gen: seconds to project n activation blocks.
    project: LineFit
    # T_load_kv: seconds to load n KV blocks.
    load: LineFit
    # Host memory for blocks.
    host_bytes: float
    # S_KV, S_ACT.
    kv_block_bytes: float
    act_block_bytes: float
    # The rest of a layer's forward pass, which the paper leaves out.
    forward_s: float = 0.0
    # What of it each block adds that is attended to.
    attend_block_s: float = 0.0
    # T_load_w: in which a layer's weights cross the link; 0: they are on the device.
    weights_s: float = 0.0
    # #ACT_GPU: activation blocks on the device, which are projected and do not cross.
    device_act_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks of each type in host memory, and the seconds a layer takes on each resource."""

    act_blocks: int
    kv_blocks: int
    link_s: float
    gpu_s: float
    # Those on the device, all activations.
    device_blocks: int = 0

    @property
    def blocks_per_s(self) -> float:
        """Blocks that a layer attends to per second."""
        blocks = self.act_blocks + self.kv_blocks + self.device_blocks
        longest_s = max(self.link_s, self.gpu_s)
        return blocks / longest_s if longest_s > 0 else math.inf


def host_cache(
    rates: PlanRates, block_tokens: int, host_bytes: float, batch: int = 1, context_tokens: int = 0
) -> HostCache:
    """Algorithm 1's inputs for a model on a node.

    batch, context_tokens: the forward pass that the correction counts is a decoding step of this
    many sequences with this many tokens each.
    """
    per_layer = 1.0 / rates.layers

    def by_block(fit: LineFit) -> LineFit:
        per_block_s = fit.per_token_s * block_tokens * per_layer
        return replace(fit, per_token_s=per_block_s, fixed_s=fit.fixed_s * per_layer)

    tokens, project = batch * context_tokens, rates.project
    half_s, kv_s = (rates.decode_s(batch, int(u * context_tokens))[1] for u in (0.5, 1.0))
    attend_s = max(2.0 * (kv_s - half_s) / tokens, 0.0) if tokens else 0.0
    if rates.from_acts is not None and tokens:
        # As measured in a step, with as many activations as fit, for beyond a cache they are slow.
        most = int(context_tokens / rates.activation_ratio)
        none_s, all_s = (rates.decode_s(batch, most, acts)[1] for acts in (0, most))
        least_s = 0.1 * project.per_token_s
        project = LineFit(project.name, max((all_s - none_s) / (batch * most), least_s))
    return HostCache(
        project=by_block(project),
        load=by_block(rates.load),
        host_bytes=host_bytes,
        kv_block_bytes=rates.kv_bytes * block_tokens,
        act_block_bytes=rates.activation_bytes * block_tokens,
        forward_s=(kv_s - attend_s * tokens) * per_layer,
        attend_block_s=attend_s * block_tokens * per_layer,
        weights_s=rates.weights_s * per_layer,
    )


def initial_blocks(cache: HostCache) -> tuple[float, float]:
    """(ACT_init, KV_init) of lines 10-18, within the memory: what is projected while the weights
    load, or where the device's own blocks take longer than that, what is loaded meanwhile."""
    budget_s = cache.weights_s - cache.project.seconds(cache.device_act_blocks)
    line, size = cache.project, cache.act_block_bytes
    if budget_s < 0:
        line, size = cache.load, cache.kv_block_bytes
    blocks = max(abs(budget_s) - line.fixed_s, 0.0) / line.per_token_s
    blocks = min(blocks, cache.host_bytes / size)
    return (blocks, 0.0) if budget_s >= 0 else (0.0, blocks)


def allocate_paper(cache: HostCache) -> Allocation:
    """Algorithm 1 as printed: the initial blocks, then such as fill the rest of the memory with
    T_kv_gen = T_load_kv (lines 20-27). The seconds are Eq. 9 and 10, without what they forget."""
    s_act, s_kv = cache.act_block_bytes, cache.kv_block_bytes
    a_g, b_g = cache.project.per_token_s, cache.project.fixed_s
    a_l, b_l = cache.load.per_token_s, cache.load.fixed_s
    act_init, kv_init = initial_blocks(cache)
    left = max(cache.host_bytes - s_act * act_init - s_kv * kv_init, 0.0)
    act = (left * a_l + s_kv * (b_l - b_g)) / (s_act * a_l + s_kv * a_g)
    act_blocks = math.floor(act_init + min(max(act, 0.0), left / s_act))
    kv_blocks = math.floor((cache.host_bytes - s_act * act_blocks) / s_kv)
    link_s = cache.weights_s + cache.load.seconds(kv_blocks)
    device = cache.device_act_blocks
    gpu_s = cache.project.seconds(act_blocks + device)
    return Allocation(act_blocks, kv_blocks, link_s, gpu_s, device)


def allocate_corrected(cache: HostCache) -> Allocation:
    """The allocation that brings most cached blocks per second, with what the paper forgets.

    T_load_w + T_load(ρ·A + K) = T_kv_gen(A + ACT_GPU) + t_forward with the memory full. A full
    memory takes the same link time whatever the types, so until the two are equal an activation
    block is a token run for nothing. Beyond, each costs gpu time: blocks per second is then a ratio
    of two lines, best at one end, so the two ends are priced as well.
    """
    most = math.floor(cache.host_bytes / cache.act_block_bytes)
    link_s = cache.weights_s + cache.load.seconds(cache.host_bytes / cache.kv_block_bytes)
    device, ratio = cache.device_act_blocks, cache.act_block_bytes / cache.kv_block_bytes
    attended = cache.host_bytes / cache.kv_block_bytes + device
    spare_s = link_s - cache.forward_s - cache.attend_block_s * attended - cache.project.fixed_s
    # An activation block more is 1 - ratio more to attend to.
    each_s = cache.project.per_token_s + cache.attend_block_s * (1.0 - ratio)
    balance = math.floor((spare_s - cache.project.per_token_s * device) / each_s)
    acts = {0, most, *(min(max(balance + i, 0), most) for i in (0, 1))}
    return max((priced(cache, act) for act in sorted(acts)), key=lambda one: one.blocks_per_s)


def priced(cache: HostCache, act_blocks: int) -> Allocation:
    """The allocation with `act_blocks` activation blocks and KV in the rest, with its seconds."""
    kv = math.floor((cache.host_bytes - cache.act_block_bytes * act_blocks) / cache.kv_block_bytes)
    ratio, device = cache.act_block_bytes / cache.kv_block_bytes, cache.device_act_blocks
    link_s = cache.weights_s + cache.load.seconds(ratio * act_blocks + kv)
    gpu_s = cache.project.seconds(act_blocks + device) + cache.forward_s
    gpu_s += cache.attend_block_s * (act_blocks + kv + device)
    return Allocation(act_blocks, kv, link_s, gpu_s, device)


def planned_share(
    rates: PlanRates, block_tokens: int, host_bytes: float, batch: int,
    allocate: Callable[[HostCache], Allocation] = allocate_corrected, device_act_blocks: int = 0,
) -> float:  # fmt: skip
    """The share of blocks to keep as activations instead of KV; 0 where these are no smaller.

    Args:
        batch: requests that decode together and fill the host memory.
        device_act_blocks: #ACT_GPU, which count as blocks, too, and are activations.
    """
    if rates.activation_ratio >= 1.0 or host_bytes < rates.kv_bytes * block_tokens:
        return 0.0
    context_tokens = int(host_bytes / rates.kv_bytes / batch)
    cache = host_cache(rates, block_tokens, host_bytes, batch, context_tokens)
    found = allocate(replace(cache, device_act_blocks=device_act_blocks))
    act_blocks = found.act_blocks + found.device_blocks
    return act_blocks / max(act_blocks + found.kv_blocks, 1)


class Blocks(NamedTuple):
    """Blocks of each type: a request's, a mini-batch's, or what the buffers hold."""

    act: int
    kv: int


def imbalance(blocks: Blocks, project: LineFit, load: LineFit, weights_s: float = 0.0) -> float:
    """F_b = max(r, 1/r) of r = T_kv_gen(ACT) / T_load_kv(KV); infinite without either,
    which the paper leaves open (Eq. 12 and 13). weights_s: of weights that cross meanwhile."""
    project_s, load_s = project.seconds(blocks.act), weights_s + load.seconds(blocks.kv)
    if project_s <= 0 or load_s <= 0:
        return math.inf
    return max(project_s / load_s, load_s / project_s)


def pack(
    requests: Sequence[Blocks], most: Blocks, project: LineFit, load: LineFit,
    weights_s: float = 0.0,
) -> list[list[int]]:  # fmt: skip
    """Mini-batches as lists of indices into `requests`; each request is in exactly one.

    Requests join in their order if they fit `most`, what the two buffers hold (each of them alone
    does), and do not make the imbalance F_b worse; when none can, the next mini-batch begins. The
    first one is packed beside the next layer's weights, which cross for `weights_s`. Lines are in
    blocks, and all seconds of as many layers.
    """
    waiting = list(range(len(requests)))
    batches: list[list[int]] = []
    while waiting:
        batch = [waiting.pop(0)]
        total, beside_s = requests[batch[0]], 0.0 if batches else weights_s
        joined = True
        while joined:
            joined = False
            for i in list(waiting):
                grown = Blocks(total.act + requests[i].act, total.kv + requests[i].kv)
                fits = grown.act <= most.act and grown.kv <= most.kv
                before, after = (imbalance(b, project, load, beside_s) for b in (total, grown))
                if fits and after <= before:
                    waiting.remove(i)
                    batch.append(i)
                    total, joined = grown, True
        batches.append(batch)
    return batches
