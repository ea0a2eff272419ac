"""Bounds on a step in tokens, as vLLM has them or was proposed to: all first come, first served.

Beside `fair`, which bounds a step in seconds (`kappa.cost.StepLimit`). Each bounds the steps of the
simulator's engines; a real vLLM has them as options of its own.
"""

from __future__ import annotations

from typing import ClassVar

from kappa_scheduler.fcfs import Fcfs
from kappa_scheduler.work import StepBound, StepState

_PRESSED_PROMPTS, _PRESSED_TOKENS = 2, 2048


class Budget512(Fcfs):
    """vLLM's `max_num_batched_tokens` at 512."""

    name = "budget_512"
    tokens: ClassVar[int] = 512

    def bound(self, state: StepState) -> StepBound:
        """The same in every step."""
        return StepBound(self.tokens, self.tokens)


class Budget2048(Budget512):
    """vLLM's `max_num_batched_tokens` at 2,048: its default on GPUs with less than 70 GB."""

    name = "budget_2048"
    tokens: ClassVar[int] = 2048


class PPas(Fcfs):
    """Prefill-pressure adaptive scheduling (Saemann, arXiv 2608.15171; vLLM issue 52906).

    While anything decodes and two or more requests have a prompt to compute, waiting ones counted,
    a step computes at most 2,048 tokens of prompts; else the token budget alone bounds it. The two
    figures are the evaluated ones (TimoSaemann/ppas-vllm, scheduler/ppas_vllm_0.22.1.patch). Its
    token budget was 16,384; here it is the node's.
    """

    name = "p_pas"

    def bound(self, state: StepState) -> StepBound:
        """Fewer tokens of prompts under pressure."""
        if state.decoding and state.prompts >= _PRESSED_PROMPTS:
            return StepBound(state.decoding + _PRESSED_TOKENS, _PRESSED_TOKENS)
        return StepBound(state.budget_tokens, state.budget_tokens)


class LongPrefill(Fcfs):
    """vLLM 0.33's `long_prefill_token_threshold` with `adaptive_long_prefill_threshold`.

    Of one prompt a step computes at most the threshold, or the requests' equal shares of the budget
    where that is more; a request that is alone is not bounded (vLLM PR 57951 and the scheduler of
    0.33 as quoted in public notes; its source was not at hand). Off by default there; 512 here, as
    public recipes that set it have 512 to 2,048.
    """

    name = "long_prefill"
    threshold_tokens: ClassVar[int] = 512

    def bound(self, state: StepState) -> StepBound:
        """A share of the budget for each prompt."""
        requests = state.decoding + state.prompts
        most = state.budget_tokens
        if requests > 1:
            most = max(self.threshold_tokens, state.budget_tokens // requests)
        return StepBound(state.budget_tokens, most)
