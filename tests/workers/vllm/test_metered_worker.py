"""What a step computes, which prompts it finishes, how long it lasted, and who reports it."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from vllm import SamplingParams

from kappa_workers.request_metadata import request_id_of
from kappa_workers.vllm import metered_worker
from kappa_workers.vllm.metered_worker import Metered, MeteredGPUWorker, StepMeter
from tests.workers.vllm.steps import Clock, Later, Reports, metered, new, scheduled

pytestmark = pytest.mark.vllm


class Meter(StepMeter):
    """One with steps one at a time: the last one is that which took so long."""

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
def test_meter_ends_a_prompt_with_the_step_of_its_last_token(
    meter, prompt, context, tokens, prefilled
):
    step = scheduled({"a": tokens}, new("a", prompt, context))
    assert meter.work(step) == ([(tokens, context)], prefilled)


def test_a_prompt_in_chunks_is_finished_by_the_last_one(meter):
    assert meter.work(scheduled({"a": 6}, new("a", 10, context=1))) == ([(6, 1)], [])
    assert meter.work(scheduled({"a": 3}, cached=[("a", 7)])) == ([(3, 7)], ["ours-a"])
    assert meter.work(scheduled({"a": 1}, cached=[("a", 10)])) == ([(1, 10)], [])


def test_meter_sums_only_the_steps_that_computed_a_prompt(meter):
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


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metered_worker, "time", clock)
    return clock


def test_step_handed_out_early_lasts_from_the_previous_ones_end(clock):
    worker = metered(Metered, stats=Reports())
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


def test_after_a_pause_a_step_lasts_from_its_hand_out(clock):
    worker = metered(Metered, stats=Reports())
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


def test_gpu_step_is_timed_by_device_events_else_by_the_clock(clock, monkeypatch):
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
def test_worker_reports_on_the_rank_whose_outputs_vllm_takes(rank, world, tp, reports):
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
