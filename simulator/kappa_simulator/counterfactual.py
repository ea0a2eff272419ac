"""Counterfactual replay: recorded requests under another policy, with the same arrivals.

Differences of predictions, request by request, do not show how another choice changes queues and
caches. So a journal's requests are played twice through simulated engines with the constants that
were learnt of the real ones: as they were sent, and as the other policy sends them. A
conversation's next request comes as long after its last answer as it did. The first play is
compared with the measurement, and both are corrected by its error, quantile by quantile. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Announcement
from kappa_router.config import RouterConfig
from kappa_router.policy import Policy
from kappa_router.rollout_journal import JournaledRequest, JournaledWorker, RolloutSegment
from kappa_router.router import Router
from kappa_simulator.clusters import NodeModel
from kappa_simulator.dispatch import Dispatcher, PlanDispatch, RouterDispatch
from kappa_simulator.faults import Faults
from kappa_simulator.play import Play
from kappa_simulator.traffic import Traffic, shared_prefix
from kappa_workload.shapes import TurnShape, Workload, key_of, stream_ids

Floats = NDArray[np.float64]

LEAST_REQUESTS = 50
_QUANTILES = 50
_EARLY_SHARE = 5  # the first fifth of the requests is left out: earlier caches are not known
_RESAMPLES = 400
_MOST_BLOCKS = 1 << 22
_STEP_FLOOR_S = 1e-9


class Figures(NamedTuple):
    """Statistics of TTFTs, in seconds."""

    p50: float
    mean: float
    p99: float


class Saving(NamedTuple):
    """Seconds saved, and its 95 % interval."""

    saved_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured figures of one policy, and those of another, replayed or measured."""

    measured: Figures
    other: Figures
    # Of each figure.
    saved: tuple[Saving, Saving, Saving]
    # That were measured.
    requests: int
    conversations: int
    # Median of |replayed / measured - 1| before correction; NaN where nothing was replayed.
    model_error: float = math.nan


def counterfactual(segment: RolloutSegment, policy: Policy) -> Comparison:
    """Compare `policy` with the measured choices for a segment's requests.

    Raises:
        ValueError: there are too few requests, or one went to an engine that is not described.
    """
    requests = sorted(segment.requests, key=lambda r: r.arrival_s)
    timed = sum(not math.isnan(request.ttft_s) for request in requests)
    if timed < LEAST_REQUESTS:
        raise ValueError(
            f"{timed} streamed requests are answered in this journal, {LEAST_REQUESTS} are the "
            "least that say anything: let more come"
        )
    workers = list(segment.workers.values())
    traffic, order = traffic_of(requests, workers[0].announcement.block_tokens)
    played = [requests[k] for k in order]
    names = {worker.announcement.worker: i for i, worker in enumerate(workers)}
    strangers = {r.worker for r in played} - set(names)
    if strangers:
        raise ValueError(f"no line of the journal describes {', '.join(sorted(strangers))}")
    models = [node_model(worker) for worker in workers]
    overhead_s = np.array([worker.overhead_s for worker in workers])
    plan = PlanDispatch([names[r.worker] for r in played])
    as_sent = _replayed(models, traffic, plan, overhead_s)
    held = sum(model.device_blocks + model.host_blocks for model in models)
    router = Router(
        RouterConfig(
            policy, secret=1, index_blocks=min(held, _MOST_BLOCKS),
            stale_after_s=math.inf, forecast_workers=0,
        )
    )  # fmt: skip
    announced = [_announced(worker) for worker in workers]
    otherwise = _replayed(models, traffic, RouterDispatch([router], announced), overhead_s)
    measured_s = np.array([r.ttft_s for r in played])
    late = np.argsort([r.arrival_s for r in played], kind="stable")[len(played) // _EARLY_SHARE :]
    names_of = np.array([played[k].conversation for k in late])
    return compared(measured_s[late], as_sent[late], otherwise[late], names_of)


def _replayed(
    models: Sequence[NodeModel], traffic: Traffic, dispatcher: Dispatcher, overhead_s: Floats
) -> Floats:
    play = Play(models, traffic, dispatcher, Faults(), seed=0)
    play.run()
    return np.array(play.ttft_s) + overhead_s[np.array(play.node)]


# -- what was recorded, as the simulator takes it --------------------------------------------------


def traffic_of(
    requests: Sequence[JournaledRequest], block_tokens: int
) -> tuple[Traffic, list[int]]:
    """Requests in the order of arrival as traffic, and the request at each of its places.

    A request that came after its conversation's last answer waits for that in a replay, too; others
    keep their time of arrival.
    """
    chains: list[list[int]] = []
    open_chains: dict[str, list[int]] = {}
    for k, request in enumerate(requests):
        chain = open_chains.get(request.conversation)
        if chain is None or requests[chain[-1]].end_s > request.arrival_s:
            chain = open_chains[request.conversation] = []
            chains.append(chain)
        chain.append(k)
    traffic = Traffic(Workload("journal", block_tokens, (), "journal"), rate_rps=0.0)
    start_s, order = requests[0].arrival_s, list[int]()
    for chain in chains:
        rows = [requests[k] for k in chain]
        turns = [_turn(rows, i, block_tokens, number) for i, number in enumerate(chain)]
        traffic.add(rows[0].arrival_s - start_s, turns, rows[0].conversation)
        order += chain
    return traffic, order


def _turn(rows: Sequence[JournaledRequest], i: int, size: int, number: int) -> TurnShape:
    """Turn `i` of a conversation. The next prompt shows the blocks of its answer, if it holds them;
    otherwise they are never used again."""
    row = rows[i]
    blocks = row.blocks[: row.prompt_tokens // size]
    kept = blocks
    stop = (row.prompt_tokens + row.output_tokens) // size
    if i + 1 < len(rows):
        following = rows[i + 1].blocks
        if shared_prefix(blocks, following) == len(blocks):
            kept = following[:stop]
    if len(kept) < stop:
        own = stream_ids(key_of("journal", number), len(kept), stop)
        kept = np.concatenate([kept, own])
    after_s = max(row.arrival_s - rows[i - 1].end_s, 0.0) if i else 0.0
    return TurnShape(after_s, row.prompt_tokens, row.output_tokens, blocks, kept)


def node_model(worker: JournaledWorker) -> NodeModel:
    """The engine by its learnt constants, in real seconds."""
    known, speed = worker.announcement, worker.speed
    size = known.block_tokens
    load_block_s = max(speed.load_token_s * size, _STEP_FLOOR_S)
    return NodeModel(
        step=speed.step.real(), block_tokens=size, device_blocks=known.device_blocks,
        host_blocks=known.host_blocks, load_block_s=load_block_s, store_block_s=load_block_s,
        load_fixed_s=speed.load_fixed_s, budget_tokens=speed.budget_tokens,
        max_running=known.max_sequences or 256, factors=speed.factors,
    )  # fmt: skip


def _announced(worker: JournaledWorker) -> Announcement:
    """The announcement that the replay's router starts from: the constants that were learnt."""
    known, speed = worker.announcement, worker.speed
    rate = known.kv_bytes_per_token * speed.step.dilation / max(speed.load_token_s, _STEP_FLOOR_S)
    node = replace(known.node, h2d_bytes_per_s=rate, load_fixed_s=speed.load_fixed_s)
    return replace(known, step=speed.step, node=node)


# -- arithmetic of the report ----------------------------------------------------------------------


def compared(
    measured_s: Floats, as_sent_s: Floats, otherwise_s: Floats, conversations: NDArray[np.str_]
) -> Comparison:
    """Compare a measured policy with a replayed one; all arrays have the shape (requests,).

    as_sent_s: a replay of the measured policy. The interval resamples conversations.
    """
    sure = ~np.isnan(measured_s + as_sent_s + otherwise_s)
    measured_s, as_sent_s, otherwise_s = (x[sure] for x in (measured_s, as_sent_s, otherwise_s))
    conversations = conversations[sure]

    def saved(rows: NDArray[np.intp]) -> Floats:
        corrected = corrected_by(as_sent_s[rows], measured_s[rows], otherwise_s[rows])
        return np.subtract(figures(measured_s[rows]), figures(corrected))

    everything = np.arange(len(measured_s))
    other = figures(corrected_by(as_sent_s, measured_s, otherwise_s))
    return Comparison(
        figures(measured_s), other,
        _intervals(saved(everything), _resampled(saved, conversations)),
        len(measured_s), len(np.unique(conversations)),
        float(np.median(np.abs(as_sent_s / measured_s - 1))),
    )  # fmt: skip


def arms(requests: Sequence[JournaledRequest]) -> Comparison | None:
    """Compare the measured arms, the present policy's with ours; None if one has too few."""
    timed = [r for r in requests if not math.isnan(r.ttft_s)]
    theirs = [r for r in timed if r.steered != "kappa"]
    ours = [r for r in timed if r.steered == "kappa"]
    if min(len(theirs), len(ours)) < LEAST_REQUESTS:
        return None
    pairs = [
        (np.array([r.ttft_s for r in rows]), np.array([r.conversation for r in rows]))
        for rows in (theirs, ours)
    ]
    drawn = []
    for number, (ttft_s, conversations) in enumerate(pairs):
        drawn.append(_resampled(partial(_figures_of, ttft_s), conversations, number))
    measured, other = (figures(ttft_s) for ttft_s, _ in pairs)
    saved = np.subtract(measured, other)
    return Comparison(
        measured, other, _intervals(saved, drawn[0] - drawn[1]), len(timed),
        len({r.conversation for r in timed}),
    )  # fmt: skip


def figures(ttft_s: Floats) -> Figures:
    """Median, mean and 99th percentile."""
    p50, p99 = np.quantile(ttft_s, (0.5, 0.99)).tolist()
    return Figures(p50, float(ttft_s.mean()), p99)


def _figures_of(ttft_s: Floats, rows: NDArray[np.intp]) -> Floats:
    return np.array(figures(ttft_s[rows]))


def corrected_by(replayed_s: Floats, measured_s: Floats, other_s: Floats) -> Floats:
    """Correct `other_s` by the error of `replayed_s` against `measured_s`.

    Quantiles of the replay are mapped to those of the measurement, on logarithms; beyond the ends
    the ratio at the end holds.
    """
    shares = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    known = np.log(np.maximum(np.quantile(replayed_s, shares), _STEP_FLOOR_S))
    off = np.log(np.maximum(np.quantile(measured_s, shares), _STEP_FLOOR_S)) - known
    return np.asarray(other_s * np.exp(np.interp(np.log(other_s), known, off)))


def _resampled(
    of: Callable[[NDArray[np.intp]], Floats], conversations: NDArray[np.str_], seed: int = 0
) -> Floats:
    """`of` rows of conversations drawn with replacement, shape (resamples, 3)."""
    _, place = np.unique(conversations, return_inverse=True)
    by_place = np.argsort(place, kind="stable")
    groups = np.split(by_place, np.cumsum(np.bincount(place))[:-1])
    rng = np.random.default_rng((seed, 5))
    draws = rng.integers(len(groups), size=(_RESAMPLES, len(groups)))
    return np.array([of(np.concatenate([groups[g] for g in draw])) for draw in draws])


def _intervals(saved: Floats, drawn: Floats) -> tuple[Saving, Saving, Saving]:
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    p50, mean, p99 = (Saving(*map(float, row)) for row in zip(saved, low, high, strict=True))
    return p50, mean, p99
