"""Predictions for plans, given or chosen: time to first token, time between tokens, bytes kept.

`predict` prices any list of segments, so that an experiment's own plan and a planner's are judged
alike; `plan_of` turns a split into a plan. `tbt_s` is a decoding step that brings the cached
tokens of every sequence again, as engines with their KV in host memory do (KVPR, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from kappa.cost import decode_work
from kappa.plan.costs import Costs, Split
from kappa.plan.rates import PlanRates
from kappa.plan.segments import LoadPlan, Segment, layout


def plan_of(costs: Costs, split: Split, why: str = "") -> LoadPlan:
    """The plan of a whole-token split, laid out R, A, K (or A, K, R at the tail)."""
    segments = layout(
        int(costs.cached),
        recompute=int(split.recompute),
        activations=int(split.activations),
        tail=split.tail,
    )
    return _priced(costs, segments, split, why)


def predict(costs: Costs, segments: Sequence[Segment], why: str = "as given") -> LoadPlan:
    """Price segments in any order that a `LoadPlan` allows.

    A run that stays in host memory (C) crosses the link once for the first token, as one of K does:
    many queries are more than a CPU can attend with. What it costs later is `step_s`, which
    `kappa.plan.planners` adds.

    Raises:
        ValueError: segments that do not cover the cached tokens, or of a kind (S) whose cost is not
            of link and gpu alone.
    """
    other = [s for s in segments if s.kind not in ("K", "A", "R", "C")]
    if other:
        raise ValueError(
            f"segment {other[0].kind} [{other[0].start_tokens}, {other[0].end_tokens}): "
            "only K, A, R and C are priced by link and gpu seconds"
        )
    shape = LoadPlan(tuple(segments))
    if shape.cached_tokens != costs.cached:
        raise ValueError(
            f"segments cover {shape.cached_tokens} tokens of {costs.cached:g} cached ones: "
            "cover them all"
        )
    tail = len(segments) > 1 and segments[0].kind != "R" and segments[-1].kind == "R"
    split = Split(shape.tokens("R"), shape.tokens("A"), tail)
    return _priced(costs, shape.segments, split, why)


def _priced(costs: Costs, segments: tuple[Segment, ...], split: Split, why: str) -> LoadPlan:
    load_s, compute_s = costs.load_s(split), costs.compute_s(split)
    rates = costs.rates
    loaded = costs.cached - split.recompute - split.activations
    return LoadPlan(
        segments=segments,
        ttft_s=costs.ttft_s(load_s, compute_s),
        load_s=load_s,
        compute_s=compute_s,
        load_bytes=loaded * rates.kv_bytes + split.activations * rates.activation_bytes,
        why=why,
    )


def decode_s(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    activations: float = 0.0,
    *,
    streamed: bool = False,
) -> tuple[float, float]:
    """(link, gpu) seconds of a decoding step over all layers.

    Args:
        rates: the model on the node.
        batch: sequences, a new token each.
        context_tokens: of each sequence, all in host memory.
        activations: of them, how many per sequence come from activations; the rest is loaded.
        streamed: weights come over the link too, once per step.

    Raises:
        ValueError: no sequence, or more activations than context.
    """
    if batch < 1 or not 0 <= activations <= context_tokens:
        raise ValueError(
            f"batch {batch}, activations {activations} of {context_tokens} context tokens: give "
            "one sequence or more, and no more activations than context"
        )
    loaded = context_tokens - activations + rates.activation_ratio * activations
    link_s = rates.load.seconds(batch * loaded) + (rates.weights_load_s if streamed else 0.0)
    step_s = decode_gpu_s(rates, batch, context_tokens)
    return link_s, step_s + rates.project.seconds(batch * activations)


def decode_gpu_s(rates: PlanRates, batch: int, context_tokens: float) -> float:
    """Gpu seconds of a decoding step with all keys and values there.

    By the cost model; where decoding steps are measured, what they last longer (or shorter) than
    it has at the nearest measured point is added, as of a prefill step's grid.
    """
    resident = batch * context_tokens
    modelled_s = rates.step_s(decode_work(float(batch), resident))
    if rates.decode is None:
        return modelled_s
    point = rates.decode.clamp(batch, resident)
    excess_s = rates.decode.seconds_at(*point) - rates.step_s(decode_work(*point))
    return max(0.0, modelled_s + excess_s)


def tbt_s(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    activations: float = 0.0,
    *,
    streamed: bool = False,
    ahead: bool = False,
) -> float:
    """Seconds between tokens of a decoding step; arguments as for `decode_s`.

    `ahead` says that the engine loads for the next step's first layer while this step's last one
    computes, so that no layer's load is waited for; else each step fills the pipeline anew.
    """
    link_s, gpu_s = decode_s(rates, batch, context_tokens, activations, streamed=streamed)
    if ahead:
        return max(link_s, gpu_s)
    return max(link_s, gpu_s) + rates.serial_share * min(link_s, gpu_s)


def storage_bytes_per_token(rates: PlanRates, segments: Sequence[Segment], dual: bool) -> float:
    """Mean host bytes of a cached token that segments like these need.

    Args:
        rates: the model on the node.
        segments: how the tokens come back; a recomputed one needs its id alone.
        dual: keep the KV of every token beside the activations and ids, so that the split can be
            moved later (KVPR does: its split grows with the sequence), rather than either.
    """
    plan = LoadPlan(tuple(segments), exact=not any(s.kind == "S" for s in segments))
    if not plan.cached_tokens:
        return 0.0
    no_kv = 0 if dual else plan.tokens("A") + plan.tokens("R")
    kept_bytes = (plan.cached_tokens - no_kv) * rates.kv_bytes
    kept_bytes += plan.tokens("A") * rates.activation_bytes
    return kept_bytes / plan.cached_tokens
