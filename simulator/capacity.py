"""What a cluster could serve at most: a linear-programming bound on the request arrival rate.

A load is a fraction of this rate, so it has to owe nothing to any policy. Requests are split over
nodes and over three ways to have their cached prefix there: *load* it over the link, *recompute*
it on the gpu, or find it on the *device*. Per node, the seconds that a request takes of

    link     bytes loaded / B,
    compute  GEMMs and attention of prefill and decode,
    read     KV reads of prefill and decode (and a step's weights, shared by `max_seqs` sequences),

may not exceed one per second; `compute` and `read` are bounded apart because a step lasts the
longer of the two. Byte-seconds of device memory (reused bytes x time since their last use, and a
request's own KV while it decodes) may not exceed the node's KV memory, and reused bytes x time
since their last use may not exceed all memory of the cluster.

What is relaxed, each of which can only raise the bound: queueing and integrality (a fluid); every
prefix is wherever it is wanted, at no transfer between nodes; caches know the future; a prefix
that is first wanted twice at once is computed once; steps batch perfectly and read the weights for
free but for the `max_seqs` limit; stores to the host tier, fixed costs of loads, noise, failures,
and links shared by a group of nodes cost nothing. Plans that hold any *prefix* on the device, load
any stretch after it, and compute the rest are covered: they cost no less than the mixture of the
three that has the same bytes, because attention pairs are concave in the tokens held. A plan that
recomputes the front and loads what follows is not.

The program is solved over clusters of like requests; its prices then bound the program over all
single requests by duality (any prices do), and that certified bound is the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from kappa.model import kv_bytes_per_token
from kappa.step import step_model
from kappa.types import ModelShape, NodeProfile
from simulator.reuse import Turns, turns_of
from workload.expansion import expand
from workload.shapes import SessionShape, Workload

Floats = NDArray[np.float64]

RESOURCES = ("link", "compute", "read", "device")
"""Seconds of each per second, per node; `device` is in byte-seconds of KV memory."""
OPTIONS = ("load", "recompute", "device")
"""Where a request's cached prefix comes from."""

_ROUNDS = 3
_TOLERANCE = 1e-3


class NodeClass(Protocol):
    """Some like nodes of a cluster."""

    @property
    def profile(self) -> NodeProfile:
        """One node's true rates."""

    @property
    def host_bytes(self) -> float:
        """Host memory for KV of one node."""

    @property
    def count(self) -> int:
        """How many there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """The bound, and the plan and the prices behind it.

    rps: no policy serves more requests per second for long; lp_rps: what the clustered program
    reaches, at most `rps`; flow_rps[cluster, node class, option]: its plan; use[node class,
    resource]: share of each resource that the plan takes; prices[node class, resource]: requests
    per second that one more unit would add; memory_price: the same for a byte of all memory.
    """

    rps: float
    lp_rps: float
    nodes: tuple[str, ...]
    shares: Floats
    cached_tokens: Floats
    new_tokens: Floats
    output_tokens: Floats
    flow_rps: Floats
    use: Floats
    prices: Floats
    memory_price: float

    def summary(self) -> dict[str, Any]:
        """What binds, ready for JSON."""
        option_rps = self.flow_rps.sum(axis=0)
        return {
            "rps": self.rps,
            "lp_rps": self.lp_rps,
            "clusters": len(self.shares),
            "nodes": [
                {
                    "node": name,
                    "rps": float(option_rps[i].sum()),
                    "options": dict(zip(OPTIONS, option_rps[i].tolist(), strict=True)),
                    "use": dict(zip(RESOURCES, self.use[i].tolist(), strict=True)),
                }
                for i, name in enumerate(self.nodes)
            ],
        }


def capacity_rps(
    workload: Workload,
    nodes: Sequence[NodeClass],
    shape: ModelShape,
    *,
    requests: int = 25_000,
    seed: int = 0,
    max_seqs: float = math.inf,
) -> float:
    """The bound on requests/s alone; see `capacity`."""
    return capacity(workload, nodes, shape, requests=requests, seed=seed, max_seqs=max_seqs).rps


def capacity(
    workload: Workload,
    nodes: Sequence[NodeClass],
    shape: ModelShape,
    *,
    requests: int = 25_000,
    seed: int = 0,
    max_seqs: float = math.inf,
    clusters: int = 60,
) -> Capacity:
    """The bound for the first `requests` turns of the expanded workload.

    Args:
        workload: the session shapes.
        nodes: the cluster, like nodes grouped.
        shape: the model they serve.
        requests: turns to count; a run of that many finds that much reuse.
        seed: order of the sessions.
        max_seqs: sequences that one step can hold.
        clusters: most groups of like requests in the program.

    Raises:
        ValueError: no nodes, an empty workload, or a model that leaves a node no KV memory.
    """
    sessions = _first_sessions(expand(workload, seed), requests)
    if not sessions:
        raise ValueError(f"workload {workload.name!r} has no sessions: give one that has")
    # The rate sets how long prefixes shared by sessions must be held: the faster, the shorter.
    # From an endless rate down, every round is a bound; the rounds shrink to a fixed point.
    rate_rps = math.inf
    found = None
    for _ in range(_ROUNDS):
        turns = turns_of(sessions, workload.block_tokens, rate_rps)
        found = capacity_of(turns, nodes, shape, max_seqs=max_seqs, clusters=clusters)
        if found.rps >= rate_rps * (1 - _TOLERANCE):
            break
        rate_rps = found.rps
    assert found is not None
    return found


def _first_sessions(sessions: Iterable[SessionShape], requests: int) -> list[SessionShape]:
    taken: list[SessionShape] = []
    turns = 0
    for session in islice(sessions, requests):
        taken.append(session)
        turns += len(session.turns)
        if turns >= requests:
            break
    return taken


def capacity_of(
    turns: Turns,
    nodes: Sequence[NodeClass],
    shape: ModelShape,
    *,
    max_seqs: float = math.inf,
    clusters: int = 60,
) -> Capacity:
    """The bound for requests like `turns`, whose holding times are given."""
    if not nodes:
        raise ValueError("the cluster has no nodes: give at least one")
    costs = np.stack([request_costs(turns, node, shape, max_seqs) for node in nodes], axis=1)
    supply = np.array([_supply(node, shape) for node in nodes])
    host_bytes = sum(node.count * node.host_bytes for node in nodes)
    memory_bytes = float(host_bytes + supply[:, RESOURCES.index("device")].sum())
    token_bytes = kv_bytes_per_token(shape)
    held = np.zeros((len(turns), len(OPTIONS)))
    held[:, (0, 2)] = (turns.held_token_s * token_bytes)[:, None]

    label = _clusters(turns, clusters)
    weight = np.bincount(label) / len(turns)
    program = _Program(weight, _means(costs, label), _means(held, label), supply, memory_bytes)
    flow_rps, prices, memory_price = program.solve()
    lp_rps = float(flow_rps.sum())
    # Weak duality at the level of single requests: prices . supply / mean cheapest cost.
    cheapest = (np.einsum("rgok,gk->rgo", costs, prices) + memory_price * held[:, None, :]).min(
        axis=(1, 2)
    )
    worth = float((prices * supply).sum() + memory_price * program.memory)
    # The clustered plan is one for single requests too, so rounding must not undercut it.
    rps = max(worth / float(cheapest.mean()), lp_rps)
    return Capacity(
        rps=rps,
        lp_rps=lp_rps,
        nodes=tuple(node.profile.name for node in nodes),
        shares=weight,
        cached_tokens=_means(turns.cached_tokens, label),
        new_tokens=_means(turns.new_tokens, label),
        output_tokens=_means(turns.output_tokens, label),
        flow_rps=flow_rps,
        use=np.einsum("cgo,cgok->gk", flow_rps, program.costs) / supply,
        prices=prices,
        memory_price=memory_price,
    )


def request_costs(
    turns: Turns, node: NodeClass, shape: ModelShape, max_seqs: float = math.inf
) -> Floats:
    """What each request takes of one node, [request, option, resource], at the very least."""
    step = step_model(shape, node.profile)
    token_bytes = kv_bytes_per_token(shape)
    cached, new = turns.cached_tokens, turns.new_tokens
    prompt = cached + new
    # The prefill gives the first token; every other one is a token of a step.
    decoded = np.maximum(turns.output_tokens - 1.0, 0.0)
    pairs = decoded * (prompt + 0.5 * (decoded + 1.0))
    step_s = step.weights_s + step.fixed_s
    decode_s = decoded * step.token_s + pairs * step.pair_s
    prefill_s = new * step.token_s + new * (cached + 0.5 * new) * step.pair_s
    anew_s = prompt * step.token_s + 0.5 * prompt * prompt * step.pair_s

    costs = np.zeros((len(turns), len(OPTIONS), len(RESOURCES)))
    costs[:, 0, 0] = cached * token_bytes / node.profile.h2d_bytes_per_s
    costs[:, (0, 2), 1] = (prefill_s + decode_s)[:, None]
    costs[:, 1, 1] = anew_s + decode_s
    costs[:, :, 2] = ((prompt + pairs) * step.context_token_s + decoded * step_s / max_seqs)[
        :, None
    ]
    # Blocks that nobody else holds, for as many steps as there are tokens to decode.
    own_bytes = token_bytes * (new + 0.5 * decoded)
    costs[:, :, 3] = (own_bytes * decoded * step_s)[:, None]
    costs[:, 2, 3] += turns.held_token_s * token_bytes
    costs[:, :, :3] *= step.dilation
    return costs


def _supply(node: NodeClass, shape: ModelShape) -> tuple[float, float, float, float]:
    profile = node.profile
    weights = shape.params_total * shape.weight_dtype_bytes
    kv_bytes = profile.hbm_bytes - weights
    if kv_bytes <= 0:
        raise ValueError(
            f"node {profile.name!r} has {profile.hbm_bytes / 1e9:.0f} GB and the weights of "
            f"{shape.name} take {weights / 1e9:.0f} GB: choose a smaller model or larger nodes"
        )
    return (node.count, node.count, node.count, node.count * kv_bytes)


def _clusters(turns: Turns, most: int) -> NDArray[np.int64]:
    """Groups of like requests: quantiles of new, then cached, then output tokens."""
    per_axis = (max(1, most // 12), 4, 3) if most >= 12 else (most, 1, 1)
    label = np.zeros(len(turns), np.int64)
    for values, buckets in zip(
        (turns.cached_tokens, turns.new_tokens, turns.output_tokens), per_axis, strict=True
    ):
        edges = np.unique(np.quantile(values, np.linspace(0, 1, buckets + 1)[1:-1]))
        label = label * (len(edges) + 1) + np.searchsorted(edges, values, side="left")
    return np.unique(label, return_inverse=True)[1].astype(np.int64)


def _means(values: Floats, label: NDArray[np.int64]) -> Floats:
    counts = np.bincount(label)
    flat = values.reshape(len(values), -1)
    sums = np.stack([np.bincount(label, column) for column in flat.T], axis=1)
    return (sums / counts[:, None]).reshape(len(counts), *values.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """Most requests/s over clusters: variables are flows [cluster, node class, option], and λ."""

    weight: Floats
    costs: Floats
    held: Floats
    supply: Floats
    memory: float

    def solve(self) -> tuple[Floats, Floats, float]:
        """Flows, prices of each resource, and the price of all memory.

        Rows are scaled to their supply, so that seconds and bytes meet the solver alike.
        """
        clusters, nodes, options, resources = self.costs.shape
        flows = clusters * nodes * options
        use = np.zeros((nodes, resources, clusters, nodes, options))
        for g in range(nodes):
            use[g, :, :, g, :] = (
                np.moveaxis(self.costs[:, g], -1, 0) / self.supply[g][:, None, None]
            )
        held = np.broadcast_to(self.held[:, None, :], (clusters, nodes, options)) / self.memory
        rows = np.vstack([use.reshape(nodes * resources, flows), held.reshape(1, flows)])
        totals = np.repeat(np.eye(clusters), nodes * options, axis=1)
        result = linprog(
            c=np.append(np.zeros(flows), -1.0),
            A_ub=np.hstack([rows, np.zeros((len(rows), 1))]),
            b_ub=np.ones(len(rows)),
            A_eq=np.hstack([totals, -self.weight[:, None]]),
            b_eq=np.zeros(clusters),
            method="highs",
        )
        if result.status != 0:
            raise ValueError(f"no capacity for this cluster and workload: {result.message}")
        duals = np.maximum(-result.ineqlin.marginals, 0.0)
        prices = duals[:-1].reshape(nodes, resources) / self.supply
        flow_rps = result.x[:-1].reshape(clusters, nodes, options)
        return flow_rps, prices, float(duals[-1] / self.memory)
