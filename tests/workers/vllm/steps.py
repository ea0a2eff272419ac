"""Steps of a vLLM worker without vLLM's own parts: what is to be computed, and who is told."""

import threading

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from kappa_workers.vllm.metered_worker import StepMeter


def new(req_id, prompt, context=0, name=None):
    params = SamplingParams(extra_args={"kappa_request_id": name or f"ours-{req_id}"})
    return NewRequestData(
        req_id=req_id, prompt_token_ids=list(range(prompt)), mm_features=[],
        sampling_params=params, pooling_params=None, block_ids=([],), num_computed_tokens=context,
        lora_request=None,
    )  # fmt: skip


def scheduled(tokens, *fresh, cached=(), finished=()):
    """One step: `tokens` by request, `fresh` requests, `cached` ones as (id, context)."""
    return SchedulerOutput(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[r for r, _ in cached], resumed_req_ids=set(), new_token_ids=[],
            all_token_ids={}, new_block_ids=[None for _ in cached],
            num_computed_tokens=[c for _, c in cached], num_output_tokens=[0 for _ in cached],
        ),
        num_scheduled_tokens=dict(tokens), total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, num_common_prefix_blocks=[],
        finished_req_ids=set(finished), free_encoder_mm_hashes=[],
    )  # fmt: skip


def metered(kind, model=None, stats=None, reports=True):
    """A worker without vLLM's own parts."""
    worker = object.__new__(kind)
    worker._kappa_step_model, worker._kappa_stats = model, stats
    worker._kappa_meter, worker._kappa_step = StepMeter(), None
    worker._kappa_last_end_s, worker._kappa_reports = 0.0, reports
    worker._kappa_lock = threading.Lock()
    return worker


class Reports:
    """The stats channel, read in place."""

    def __init__(self):
        self.sent = []

    def send(self, message, *, urgent=True):
        self.sent.append(message)


class Later(AsyncModelRunnerOutput):
    """Outputs that the device has yet to make."""

    def get_output(self):
        return "tokens"


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
