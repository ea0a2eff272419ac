"""What a step computes, which prompts it finishes, and how long a paced one lasts."""

import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from kappa.cost import StepModel
from workers.request_metadata import request_id_of
from workers.stats_channel import StatsSender
from workers.vllm import metered_worker
from workers.vllm.metered_worker import (
    MeteredCPUWorker,
    MeteredGPUWorker,
    StepMeter,
    mark_generators,
)

pytestmark = pytest.mark.vllm


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


class Meter(StepMeter):
    """One whose steps come one at a time: the last one is that which took so long."""

    def work(self, scheduled):
        self.last = super().work(scheduled)
        return self.last.chunks, self.last.prefilled

    def took(self, seconds):
        return self.last.took(seconds)


@pytest.fixture
def meter():
    return Meter()


@pytest.mark.parametrize(
    ("prompt", "context", "tokens", "prefilled"),
    [
        (10, 0, 10, ["ours-a"]),
        (10, 0, 9, []),
        (66, 64, 2, ["ours-a"]),  # cached tokens are context, not work
    ],
)
def test_a_prompt_is_finished_by_the_step_that_computes_the_last_of_it(
    meter, prompt, context, tokens, prefilled
):
    step = scheduled({"a": tokens}, new("a", prompt, context))
    assert meter.work(step) == ([(tokens, context)], prefilled)


def test_a_prompt_in_chunks_is_finished_by_the_last_one(meter):
    assert meter.work(scheduled({"a": 6}, new("a", 10, context=1))) == ([(6, 1)], [])
    assert meter.work(scheduled({"a": 3}, cached=[("a", 7)])) == ([(3, 7)], ["ours-a"])
    assert meter.work(scheduled({"a": 1}, cached=[("a", 10)])) == ([(1, 10)], [])


def test_a_prompt_has_taken_the_steps_that_computed_it_and_no_others(meter):
    meter.work(scheduled({"a": 6, "b": 2}, new("a", 10), new("b", 2)))
    assert meter.took(0.5) == [("b", "ours-b", 0.5)]
    meter.work(scheduled({"a": 4, "b": 1}, cached=[("a", 6), ("b", 2)]))
    assert meter.took(0.25) == [("a", "ours-a", 0.75)]
    meter.work(scheduled({"a": 1, "b": 1}, cached=[("a", 10), ("b", 3)]))
    assert meter.took(0.25) == []


def test_a_request_that_ends_in_its_prompt_leaves_nothing_behind(meter):
    meter.work(scheduled({"a": 6}, new("a", 10)))
    meter.took(1.0)
    meter.work(scheduled({"a": 5}, new("a", 5), finished=["a"]))
    meter.work(scheduled({"a": 10}, new("a", 10)))
    assert meter.took(0.5) == [("a", "ours-a", 0.5)]


def test_decodes_and_prompts_share_a_step(meter):
    meter.work(scheduled({"a": 4}, new("a", 4)))
    step = scheduled({"a": 1, "b": 5}, new("b", 9), cached=[("a", 4)], finished=["z"])
    work, prefilled = meter.work(step)
    assert (sorted(work), prefilled) == ([(1, 4), (5, 0)], [])


def test_a_finished_requests_id_may_come_again(meter):
    meter.work(scheduled({"a": 4}, new("a", 4)))
    meter.work(scheduled({}, finished=["a"]))
    assert meter._prompts == {}
    assert meter.work(scheduled({"a": 4}, new("a", 4, name="second")))[1] == ["second"]


def test_requests_without_our_id_have_an_empty_one():
    assert request_id_of(SamplingParams()) == request_id_of(None) == ""


def metered(kind, model=None, stats=None, reports=True):
    """A worker without vLLM's own parts."""
    worker = object.__new__(kind)
    worker._kappa_step_model, worker._kappa_stats = model, stats
    worker._kappa_meter, worker._kappa_step = StepMeter(), None
    worker._kappa_last_end_s, worker._kappa_reports = 0.0, reports
    worker._kappa_lock = threading.Lock()
    return worker


@pytest.fixture
def run(stats):
    """A function that runs steps on a worker without vLLM's own parts; returns their reports."""
    endpoint, next_report = stats

    def play(model, *steps):
        worker = metered(MeteredCPUWorker, model, StatsSender(endpoint))
        for step in steps:
            worker._kappa_begin(step)
            worker._kappa_end(None)
        worker._kappa_stats.flush()
        return [next_report() for step in steps if step.total_num_scheduled_tokens]

    return play


def test_a_paced_step_lasts_its_pace(run):
    model = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, dilation=2.0)
    (step,) = run(model, scheduled({"a": 20}, new("a", 20)))
    assert step["pace_s"] == pytest.approx(0.04)
    assert step["took_s"] >= step["pace_s"]
    assert (step["tokens"], step["prefilled"]) == (20, ["ours-a"])
    assert step["spent"] == [["ours-a", 0, step["took_s"]]]
    assert step["overrun"] is False


def test_a_step_slower_than_its_pace_is_an_overrun(run):
    (step,) = run(StepModel(1e-12, 0.0, 0.0, 0.0), scheduled({"a": 1}, new("a", 1)))
    assert step["overrun"] is True and step["took_s"] >= step["real_s"] > step["pace_s"]


def test_an_unpaced_step_is_reported_and_never_an_overrun(run):
    (step,) = run(None, scheduled({"a": 1}, new("a", 1)))
    assert (step["pace_s"], step["overrun"]) == (0.0, False)


@pytest.mark.parametrize("model", [None, StepModel(1e-6, 0.0, 0.0, 0.0)])
def test_every_step_reports_its_work_paced_or_not(run, model):
    later = scheduled({"a": 1, "b": 6}, new("b", 9, context=3), cached=[("a", 4)])
    first, second = run(model, scheduled({"a": 4}, new("a", 4)), later)
    # Tokens, pairs, tokens of context that are read, requests.
    assert first["work"] == [4, 8.0, 4, 1]
    assert second["work"] == [7, 1 * 4.5 + 6 * 6.0, 5 + 9, 2]


def test_steps_back_to_back_keep_the_pace_together(run):
    model = StepModel(token_s=5e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0)
    later = [scheduled({"a": 1}, cached=[("a", context)]) for context in range(1, 5)]
    steps = run(model, scheduled({"a": 1}, new("a", 1)), *later)
    assert all(step["took_s"] >= step["pace_s"] for step in steps)


def test_steps_that_complete_no_prompt_are_reported_together(run, monkeypatch):
    urgencies, send = [], StatsSender.send

    def noted(sender, step, *, urgent=True):
        urgencies.append(urgent)
        send(sender, step, urgent=urgent)

    monkeypatch.setattr(StatsSender, "send", noted)
    later = [scheduled({"a": 1}, cached=[("a", context)]) for context in (1, 2)]
    run(None, scheduled({"a": 1}, new("a", 2)), *later)
    assert urgencies == [False, True, False]


def test_an_empty_step_reports_nothing(run):
    (step,) = run(
        None, scheduled({}, finished=["x"]), scheduled({"a": 1}, new("a", 1, name="next"))
    )
    assert step["prefilled"] == ["next"]


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


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metered_worker, "time", clock)
    return clock


def test_a_step_that_is_handed_out_early_lasts_from_the_end_of_the_one_before(clock):
    worker = metered(MeteredCPUWorker, stats=Reports())
    worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
    first = worker._kappa_end(Later())
    clock.now_s = 101.0  # vLLM hands the next one out before it asks for the tokens of the first
    worker._kappa_begin(scheduled({"a": 1, "b": 4}, new("b", 4), cached=[("a", 8)]))
    second = worker._kappa_end(Later())
    assert worker._kappa_stats.sent == [], "launching is no end"
    clock.now_s = 103.0
    assert first.get_output() == "tokens"
    clock.now_s = 103.5
    assert second.get_output() == "tokens"
    one, two = worker._kappa_stats.sent
    assert (one["took_s"], two["took_s"]) == (3.0, 0.5)
    assert (one["spent"], two["spent"]) == ([("ours-a", 0, 3.0)], [("ours-b", 0, 0.5)])


@pytest.mark.parametrize(
    ("token_s", "beyond_s", "took_s", "end_s"),
    [
        (0.0, 2.0, 1.0, 103.0),  # as long as it took, less what it waited
        (0.5, 2.5, 4.0, 106.5),  # its pace, and what of the load is not hidden behind it
    ],
)
def test_a_step_that_waits_for_a_load_by_layers_has_computed_less_long(
    clock, monkeypatch, token_s, beyond_s, took_s, end_s
):
    asked = []

    class Source:
        def take_waits(self, *step):
            asked.append(step)
            return 2.0, beyond_s

        def take_load_s(self, _):
            return beyond_s

    monkeypatch.setattr(metered_worker, "LOAD_SOURCES", [Source()])
    model = StepModel(token_s, 0.0, 0.0, 0.0) if token_s else None
    worker = metered(MeteredCPUWorker, model, Reports())
    worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
    clock.now_s = 103.0
    worker._kappa_end(None)
    (step,) = worker._kappa_stats.sent
    assert asked == [(100.0, 8 * token_s)] and clock.now_s == end_s
    assert (step["took_s"], step["real_s"], step["overrun"]) == (took_s, 1.0, False)
    assert step["spent"] == [("ours-a", beyond_s, took_s)]


def test_after_a_pause_a_step_lasts_from_its_hand_out(clock):
    worker = metered(MeteredCPUWorker, stats=Reports())
    for start_s in (100.0, 200.0):
        clock.now_s = start_s
        worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
        output = worker._kappa_end(Later())
        clock.now_s += 2.0
        output.get_output()
    assert [step["took_s"] for step in worker._kappa_stats.sent] == [2.0, 2.0]


class Event:
    """A mark on a device's stream; `reached`: at which milliseconds each is passed, in order."""

    reached: ClassVar[list] = []

    def __init__(self, enable_timing=False):
        assert enable_timing, "or the driver would refuse to compare it"
        self.at_ms = None

    def record(self):
        self.at_ms = Event.reached.pop(0)

    def query(self):
        return self.at_ms is not None

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_on_a_gpu_a_step_lasts_as_the_device_says_and_without_its_word_as_the_clock_does(
    clock, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.reached = [0.0, 40.0, 40.0, None]
    worker = metered(MeteredGPUWorker, stats=Reports())
    for _ in range(2):
        worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
        output = worker._kappa_end(Later())
        clock.now_s += 3.0
        output.get_output()
    one, two = worker._kappa_stats.sent
    assert one["took_s"] == one["real_s"] == pytest.approx(0.04)
    assert one["spent"] == [("ours-a", 0, pytest.approx(0.04))]
    assert two["took_s"] == 3.0, "a drafter still runs behind the tokens"


def test_of_several_ranks_one_reports_each_step():
    worker = metered(MeteredGPUWorker, stats=Reports(), reports=False)
    worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
    later = Later()
    assert worker._kappa_end(later) is later
    assert worker._kappa_stats.sent == []


@pytest.mark.parametrize(
    ("rank", "world", "tp", "reports"),
    [(0, 1, 1, True), (0, 4, 4, True), (1, 4, 4, False), (0, 4, 2, False), (2, 4, 2, True)],
)
def test_the_rank_whose_outputs_vllm_takes_is_the_one_that_reports(rank, world, tp, reports):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    parallel = SimpleNamespace(
        world_size=world, tensor_parallel_size=tp, prefill_context_parallel_size=1
    )
    config = SimpleNamespace(additional_config={}, parallel_config=parallel)

    class Bare:
        def __init__(self, vllm_config, rank):
            self.vllm_config, self.rank = vllm_config, rank

    class Worker(metered_worker.Metered, Bare):
        pass

    executor = SimpleNamespace(world_size=world, parallel_config=parallel)
    assert (MultiprocExecutor._get_output_rank(executor) == rank) is reports
    assert Worker(config, rank)._kappa_reports is reports


def test_what_a_step_of_an_unfinished_prompt_drew_from_its_seed_is_taken_back():
    seeded, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    torch.rand(3, generator=seeded)  # it has drawn before: the state goes on, not the seed
    torch.rand(3, generator=other)
    request = SimpleNamespace(generator=seeded)
    batch = SimpleNamespace(generators={1: seeded}, req_ids=["x", "a"])
    runner = SimpleNamespace(input_batch=batch, requests={"a": request})
    expected = torch.rand(3, generator=other)
    for _ in range(3):
        mark_generators(runner)
        made = batch.generators[1]
        assert made is request.generator
        assert torch.equal(torch.rand(3, generator=made), expected)
        made.set_offset(made.get_offset() - 4)  # as vLLM's _bookkeeping_sync does
    mark_generators(runner)
    assert torch.equal(torch.rand(3, generator=made), expected)
    mark_generators(runner)  # that draw counted
    assert torch.equal(torch.rand(3, generator=made), torch.rand(3, generator=other))
