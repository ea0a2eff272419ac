"""`kappa bench tail-recompute`: load all of a cached prefix, or compute its back, in real vLLM.

A bare engine for each way of loading, with our connector and host tier, paced as one node after
another. Scheduling, caching and loading are real, seconds are emulated: a step and a transfer last
as long as the named node would take, times the dilation. Both plans take turns, prompt by prompt,
each with the device cache emptied first, and must give the same log-probabilities. The plan is the
connector's own, made here because the engine keeps one node's rates for life.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kappa.cost import StepModel
from kappa.hardware import NodeProfile, node_profile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.plans.load_plan import layout
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import Cached, Planning, kappa_eff
from kappa.plans.rates import PlanRates
from kappa.protocol import PLAN_KEY
from kappa.shapes import model_shape
from workers.vllm.arguments import CPU_ENV, Pace
from workers.vllm.tail_recompute import LOAD_ALL, TAIL, tail_rates
from workers.vllm.tier_choice import BY_LAYER, TierChoice, TierNeeds, transfer_config

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **CPU_ENV})

from benchmarks.scheduling.vllm_runs import BenchWorker, bench_model
from workers.vllm.link_queue import LinkPace

BLOCK_TOKENS = 32
# More than the tiny model has, with random weights: loading by layers is a pipeline of so many.
LAYERS = 6
_HOST_BYTES = 1 << 27
_VOCABULARY = (100, 4000)
_STORE_LIMIT_S = 60.0
# Least real seconds per emulated one: the tiny model itself must not be slower than its pace.
_LEAST_DILATION = 16.0
# What loading the longest prefix should last, so that a machine's noise is small beside it.
_LOAD_REAL_S = 1.5


@dataclass(frozen=True, slots=True)
class Ratio:
    """A link beside the same gpu; `critical` is κ0: tokens loaded in the time of one computed."""

    critical: float
    shape: ModelShape
    rates: PlanRates
    node: NodeProfile
    load: str


def ratio_of(model: str, node: str, critical: float, longest_tokens: int, load: str) -> Ratio:
    """The node with its link changed so that κ0 is `critical`, in time dilated to be measurable."""
    shape = model_shape(model)
    profile = node_profile(node)
    token_s = 2.0 * shape.params_active / profile.flops_per_s
    link = replace(profile, h2d_bytes_per_s=kv_bytes_per_token(shape) * critical / token_s)
    load_s = longest_tokens * kv_bytes_per_token(shape) / link.h2d_bytes_per_s
    dilation = max(_LOAD_REAL_S / load_s, _LEAST_DILATION)
    paced = replace(link, source="paced", dilation=dilation, name=f"{node} at κ0 {critical:g}")
    apart = LAYERS if load == BY_LAYER else 0
    return Ratio(
        critical,
        shape,
        rates_from_measured(tail_rates(shape, paced, layers_apart=apart)),
        paced,
        load,
    )


class RatioWorker(BenchWorker):
    """Our worker, paced as any node."""

    def kappa_pace_as(self, step: dict[str, Any], link: dict[str, Any]) -> None:
        """Pace steps and transfers so from now on."""
        self._kappa_paces = StepModel.from_dict(step), LinkPace(**link)
        self.kappa_paced(True)


@contextmanager
def engine(load: str, context_tokens: int) -> Iterator[Any]:
    """A vLLM engine that loads so."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    with tempfile.TemporaryDirectory(prefix="kappa-tail-") as folder:
        needs = TierNeeds(host_bytes=_HOST_BYTES, stats_endpoint=f"ipc://{folder}/stats")
        config = transfer_config(TierChoice(load=load), needs)
        llm = LLM(
            model=str(bench_model()), skip_tokenizer_init=True, dtype="float32",
            max_model_len=context_tokens, block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=context_tokens // BLOCK_TOKENS + 8,
            max_num_batched_tokens=context_tokens, max_num_seqs=4, enforce_eager=True,
            enable_prefix_caching=True, disable_log_stats=True, use_tqdm_on_load=False,
            hf_overrides={"num_hidden_layers": LAYERS}, load_format="dummy",
            worker_cls="benchmarks.scheduling.tail_recompute.RatioWorker",
            additional_config={"kappa_pace": StepModel(0, 0, 0, 0).to_dict()},
            kv_transfer_config=KVTransferConfig(**config),
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def measure(
    llm: Any,
    ratio: Ratio,
    sizes: list[tuple[int, int]],
    repeats: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row per (cached, new): medians of both plans' TTFT, in emulated seconds."""
    pace = Pace(ratio.shape, ratio.node)
    llm.collective_rpc("kappa_pace_as", args=(pace.step.to_dict(), pace.link))
    return [
        _row(llm, ratio, cached, new, repeats, progress, seed)
        for seed, (cached, new) in enumerate(sizes)
    ]


def _row(
    llm: Any,
    ratio: Ratio,
    cached: int,
    new: int,
    repeats: int,
    progress: Callable[[str], None],
    seed: int,
) -> dict[str, Any]:
    rng = random.Random(seed)
    prefix = _tokens(rng, cached)
    llm.collective_rpc("kappa_paced", args=(False,))
    _ask(llm, [*prefix, *_tokens(rng, new)], LOAD_ALL)
    _settle(llm)
    llm.collective_rpc("kappa_paced", args=(True,))
    taken: dict[str, list[float]] = {LOAD_ALL: [], TAIL: []}
    plan = Planning(BLOCK_TOKENS, ratio.rates, activations=False).named(TAIL)(Cached(cached, new))
    asked = {LOAD_ALL: LOAD_ALL, TAIL: f"load={plan.crossing_tokens}"}
    loaded: dict[str, int] = {}
    # Before anything is measured both plans answer one prompt: they must say the same.
    prompt = [*prefix, *_tokens(rng, new)]
    answers = {}
    for way in (TAIL, LOAD_ALL):
        _settle(llm)
        llm.reset_prefix_cache()
        answers[way] = _ask(llm, prompt, asked[way])
    for turn in range(repeats):
        for way in (LOAD_ALL, TAIL) if turn % 2 else (TAIL, LOAD_ALL):
            # New tokens of its own each time: those of an earlier prompt would be in the tier.
            prompt = [*prefix, *_tokens(rng, new)]
            _settle(llm)
            llm.reset_prefix_cache()
            start_s = time.perf_counter()
            _, held = _ask(llm, prompt, asked[way])
            taken[way].append((time.perf_counter() - start_s) / ratio.node.dilation)
            loaded[way] = held
    difference = abs(answers[TAIL][0] - answers[LOAD_ALL][0])
    computed = loaded[LOAD_ALL] - loaded[TAIL]
    progress(f"κ0 {ratio.critical:g}: {cached} cached, {new} new")
    return _summary(ratio, cached, new, taken, computed, difference)


def _summary(
    ratio: Ratio,
    cached: int,
    new: int,
    taken: dict[str, list[float]],
    computed: int,
    difference: float,
) -> dict[str, Any]:
    rates = ratio.rates
    planning = Planning(BLOCK_TOKENS, rates, activations=False)
    asked = Cached(cached, new)
    chosen = planning.named(TAIL)(asked)
    plain = planning.priced(asked, layout(cached), "all is loaded")
    load, tail = (statistics.median(taken[way]) for way in (LOAD_ALL, TAIL))
    pairs = [t / p - 1.0 for t, p in zip(taken[TAIL], taken[LOAD_ALL], strict=True)]
    return {
        "load": ratio.load,
        "critical_ratio": ratio.critical,
        "effective_ratio": kappa_eff(rates, "load", new),
        "ratio": cached / new,
        "cached_tokens": cached,
        "new_tokens": new,
        "recomputed_tokens": computed,
        "planned_recomputed_tokens": cached - chosen.crossing_tokens,
        "load_all_s": load,
        "tail_s": tail,
        "change": tail / load - 1.0,
        "change_worst_pair": max(pairs),
        "change_best_pair": min(pairs),
        "predicted_load_all_s": plain.ttft_s,
        "predicted_tail_s": chosen.ttft_s,
        "predicted_change": chosen.ttft_s / plain.ttft_s - 1.0,
        "logprob_difference": difference,
        "runs": len(taken[TAIL]),
        "dilation": ratio.node.dilation,
    }


def _ask(llm: Any, prompt: list[int], plan: str) -> tuple[float, int]:
    """(log-probability of the first token, tokens that were not computed)."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, extra_args={PLAN_KEY: plan})
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return float(answer.outputs[0].cumulative_logprob), int(answer.num_cached_tokens or 0)


def _settle(llm: Any) -> None:
    """Wait until no store is under way, so that none meets the next request."""
    deadline = time.monotonic() + _STORE_LIMIT_S
    while not all(llm.collective_rpc("kappa_idle")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"stores were still under way after {_STORE_LIMIT_S:g} s")
        time.sleep(0.005)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_VOCABULARY) for _ in range(count)]
