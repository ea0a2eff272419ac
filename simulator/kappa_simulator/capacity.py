"""What a cluster could serve at most: a linear-programming bound on the request arrival rate.

A load is a fraction of this rate, so it has to owe nothing to any policy. Requests are split over
nodes and over three ways to have their cached prefix there: *load* it over the link, *recompute*
it on the gpu, or find it on the *device*. Per node, the seconds that a request takes of

    link     bytes loaded / B, and the fixed cost of a load,
    compute  GEMMs and attention of prefill and decode,
    read     KV reads of prefill and decode, and its share of a step's weights,

may not exceed one per second; `compute` and `read` are bounded apart because a step lasts the
longer of the two. Both include a step's fixed cost, shared by as many sequences as a step holds.
Byte-seconds of device memory (reused bytes x time since their last use, and a request's own KV
while it decodes) may not exceed the node's KV memory, and reused bytes x time since their last use
may not exceed all memory of the cluster.

What is relaxed, each of which can only raise the bound: queueing and integrality (a fluid); every
prefix is wherever it is wanted, at no transfer between nodes; caches know the future; a prefix
that is first wanted twice at once is computed once; steps batch perfectly, up to the limit of
sequences alone; stores to the host tier, noise, failures, preemption, and links shared by a group
of nodes cost nothing. Plans that hold any *prefix* on the device, load any stretch after it, and
compute the rest are covered: they cost no less than the mixture of the three that has the same
bytes, because attention pairs are concave in the tokens held. A plan that recomputes the front and
loads what follows is not. Sessions start evenly; think times alone part their turns.

The program is solved over clusters of like requests; its prices then bound the program over all
single requests by duality (any prices do), and that certified bound is the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kappa.cost import StepWork, chunk_work, load_s, step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa_simulator.clusters import NodeSpec
from kappa_simulator.reuse import Turns, turns_of
from kappa_workload.replay import expand
from kappa_workload.shapes import SessionShape, Workload

Floats = NDArray[np.float64]

RESOURCES = ("link", "compute", "read", "device")
"""Seconds of each per second, per node; `device` is in byte-seconds of KV memory."""
OPTIONS = ("load", "recompute", "device")
"""Where a request's cached prefix comes from."""

MAX_SEQS = 256.0
"""Sequences in one step, as the engines default to."""

_ROUNDS = 3
_REFINEMENTS = 4
_CLARITIES = 6
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class NodeClass:
    """`count` like nodes, by the profile of the first."""

    profile: NodeProfile
    host_bytes: float
    count: int


def node_classes(nodes: Iterable[NodeSpec | NodeClass]) -> list[NodeClass]:
    """Nodes that differ by name only, counted together."""
    alike: dict[tuple[NodeProfile, float], list[NodeProfile]] = {}
    for node in nodes:
        anonymous = replace(node.profile, name="", link_group="")
        alike.setdefault((anonymous, node.host_bytes), []).append(node.profile)
    return [NodeClass(some[0], key[1], len(some)) for key, some in alike.items()]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """rps: no policy serves more requests per second for long; lp_rps: what the clustered program
    reaches, at most `rps`, by the flows flow_rps[cluster of requests, node class, option].
    """

    rps: float
    lp_rps: float
    flow_rps: Floats


def capacity_rps(
    workload: Workload,
    nodes: Sequence[NodeSpec | NodeClass],
    shape: ModelShape,
    *,
    warm: bool = False,
    requests: int = 25_000,
    seed: int = 0,
) -> float:
    """The bound, in requests/s, for the first `requests` turns of the expanded workload.

    Args:
        workload: the session shapes.
        nodes: the cluster.
        shape: the model they serve.
        warm: whether the documents that sessions are about are in the caches beforehand.
        requests: turns to count; a run of that many finds that much reuse.
        seed: order of the sessions.

    Raises:
        ValueError: no nodes, an empty workload, or a model that leaves a node no KV memory.
    """
    if not workload.sessions:
        raise ValueError(f"workload {workload.name!r} has no sessions: give one that has")
    sessions = _first_sessions(expand(workload, seed), requests)
    classes = node_classes(nodes)
    # The rate sets how long prefixes shared by sessions must be held: the faster, the shorter.
    # From an endless rate down, every round is a bound; the rounds shrink to a fixed point.
    found_rps = math.inf
    for _ in range(_ROUNDS):
        rate_rps = found_rps
        turns = turns_of(sessions, workload.block_tokens, rate_rps, warm=warm)
        found_rps = bound_of(turns, classes, shape).rps
        if found_rps >= rate_rps * (1 - _TOLERANCE):
            break
    return found_rps


def _first_sessions(sessions: Iterable[SessionShape], requests: int) -> list[SessionShape]:
    taken: list[SessionShape] = []
    turns = 0
    for session in islice(sessions, requests):
        taken.append(session)
        turns += len(session.turns)
        if turns >= requests:
            break
    return taken


def bound_of(turns: Turns, nodes: Sequence[NodeClass], shape: ModelShape) -> Bound:
    """The bound for requests like `turns`, whose holding times are given."""
    if not nodes:
        raise ValueError("the cluster has no nodes: give at least one")
    costs = np.stack([request_costs(turns, node, shape) for node in nodes], axis=1)
    supply = np.array([_supply(node, shape) for node in nodes])
    host_bytes = sum(node.count * node.host_bytes for node in nodes)
    memory_bytes = float(host_bytes + supply[:, RESOURCES.index("device")].sum())
    held = np.zeros((len(turns), len(OPTIONS)))
    held[:, (0, 2)] = (turns.held_token_s * kv_bytes_per_token(shape))[:, None]

    label = _by_size(turns)
    bound_rps = math.inf
    best: _Plan | None = None
    for _ in range(1 + _REFINEMENTS):
        plan = _solve(costs, held, label, supply, memory_bytes)
        # Weak duality over single requests: what all supply is worth / a mean request's least cost.
        worth = float((plan.prices * supply).sum() + plan.memory_price * memory_bytes)
        priced = np.einsum("rgok,gk->rgo", costs, plan.prices)
        priced = (priced + plan.memory_price * held[:, None, :]).reshape(len(turns), -1)
        bound_rps = min(bound_rps, worth / float(priced.min(axis=1).mean()))
        if best is None or plan.rps > best.rps:
            best = plan
        if best.rps > (1 - _TOLERANCE) * bound_rps:
            break
        label = _by_choice(priced)
    assert best is not None
    # The plan is one for single requests too: rounding must not let the bound undercut it.
    return Bound(max(bound_rps, best.rps), best.rps, best.flow_rps)


def request_costs(turns: Turns, node: NodeClass, shape: ModelShape) -> Floats:
    """What each request takes of one node, [request, option, resource], at the very least."""
    step = step_model(shape, node.profile)
    token_bytes = kv_bytes_per_token(shape)
    cached, new = turns.cached_tokens, turns.new_tokens
    prompt = cached + new
    # The prefill gives the first token; every other one is a token of a step.
    decoded = np.maximum(turns.output_tokens - 1.0, 0.0)
    pairs = decoded * (prompt + 0.5 * (decoded + 1.0))
    # Its weights and fixed cost are shared by as many sequences as a step holds.
    decode = step.parts(StepWork(decoded, pairs, prompt + pairs), steps=decoded / MAX_SEQS)
    decode_s, least_s = decode.compute_s + decode.fixed_s, step.parts(StepWork(1, 0, 0)).read_s
    prefill_s = step.parts(chunk_work(new, cached)).compute_s
    anew_s = step.parts(chunk_work(prompt, np.zeros_like(prompt))).compute_s

    costs = np.zeros((len(turns), len(OPTIONS), len(RESOURCES)))
    costs[:, 0, 0] = load_s(shape, node.profile, cached)
    costs[:, (0, 2), 1] = (prefill_s + decode_s)[:, None]
    costs[:, 1, 1] = anew_s + decode_s
    costs[:, :, 2] = (decode.read_s + decode.fixed_s)[:, None]
    # Blocks that nobody else holds, for as many steps as there are tokens to decode.
    own_bytes = token_bytes * (new + 0.5 * decoded)
    costs[:, :, 3] = (own_bytes * decoded * (least_s + step.fixed_s))[:, None]
    costs[:, 2, 3] += turns.held_token_s * token_bytes
    costs[:, :, :3] *= step.dilation
    return costs


def _supply(node: NodeClass, shape: ModelShape) -> tuple[float, float, float, float]:
    profile = node.profile
    weights_bytes = shape.params_total * shape.weight_dtype_bytes
    kv_bytes = profile.hbm_bytes - weights_bytes
    if kv_bytes <= 0:
        raise ValueError(
            f"node {profile.name!r} has {profile.hbm_bytes / 1e9:.0f} GB, and {shape.name} weighs "
            f"{weights_bytes / 1e9:.0f} GB: choose a smaller model or larger nodes"
        )
    return (node.count, node.count, node.count, node.count * kv_bytes)


def _by_size(turns: Turns) -> NDArray[np.int64]:
    """At most 60 clusters: quantiles of cached, new and output tokens."""
    label = np.zeros(len(turns), np.int64)
    sizes = ((turns.cached_tokens, 5), (turns.new_tokens, 4), (turns.output_tokens, 3))
    for values, buckets in sizes:
        label = label * buckets + _quantile(values, buckets)
    return np.unique(label, return_inverse=True)[1].astype(np.int64)


def _by_choice(priced: Floats) -> NDArray[np.int64]:
    """Clusters by the node and option that is cheapest at these prices, and by how clearly."""
    ranked = np.sort(priced, axis=1)[:, :2]
    clearly = ranked[:, -1] - ranked[:, 0]
    label = priced.argmin(axis=1) * _CLARITIES
    for choice in np.unique(label):
        mine = label == choice
        label[mine] += _quantile(clearly[mine], _CLARITIES)
    return np.unique(label, return_inverse=True)[1].astype(np.int64)


def _quantile(values: Floats, buckets: int) -> NDArray[np.int64]:
    edges = np.unique(np.quantile(values, np.linspace(0, 1, buckets + 1)[1:-1]))
    return np.searchsorted(edges, values, side="left").astype(np.int64)


def _means(values: Floats, label: NDArray[np.int64]) -> Floats:
    counts = np.bincount(label)
    flat = values.reshape(len(values), -1)
    sums = np.stack([np.bincount(label, column) for column in flat.T], axis=1)
    return (sums / counts[:, None]).reshape(len(counts), *values.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Flows [cluster, node class, option], their sum, and the price of each unit of supply."""

    rps: float
    flow_rps: Floats
    prices: Floats
    memory_price: float


def _solve(
    costs: Floats, held: Floats, label: NDArray[np.int64], supply: Floats, memory_bytes: float
) -> _Plan:
    """Most requests/s with each cluster's requests alike. Variables: the flows, and their sum.

    Rows are scaled to their supply, so that seconds and bytes meet the solver alike.
    """
    # Half a second to import: only where it is used, or every command would wait for it.
    from scipy.optimize import linprog

    mean_costs, mean_held = _means(costs, label), _means(held, label)
    clusters, nodes, options, resources = mean_costs.shape
    flows = clusters * nodes * options
    use = np.zeros((nodes, resources, clusters, nodes, options))
    for g in range(nodes):
        use[g, :, :, g, :] = np.moveaxis(mean_costs[:, g] / supply[g], -1, 0)
    memory = np.broadcast_to(mean_held[:, None, :], (clusters, nodes, options)) / memory_bytes
    rows = np.vstack([use.reshape(nodes * resources, flows), memory.reshape(1, flows)])
    totals = np.repeat(np.eye(clusters), nodes * options, axis=1)
    shares = np.bincount(label) / len(label)
    result = linprog(
        c=np.append(np.zeros(flows), -1.0),
        A_ub=np.hstack([rows, np.zeros((len(rows), 1))]),
        b_ub=np.ones(len(rows)),
        A_eq=np.hstack([totals, -shares[:, None]]),
        b_eq=np.zeros(clusters),
        method="highs",
    )
    if result.status != 0:
        raise ValueError(f"no capacity for this cluster and workload: {result.message}")
    duals = np.maximum(-result.ineqlin.marginals, 0.0)
    flow_rps = result.x[:-1].reshape(clusters, nodes, options)
    return _Plan(
        rps=float(result.x[-1]),
        flow_rps=flow_rps,
        prices=duals[:-1].reshape(nodes, resources) / supply,
        memory_price=float(duals[-1] / memory_bytes),
    )
