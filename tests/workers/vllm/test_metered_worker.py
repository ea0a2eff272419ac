"""What a step computes, which prompts it finishes, and how long a paced one lasts."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kappa.cost import StepModel
from workers.request_metadata import request_id_of
from workers.stats_channel import StatsSender
from workers.vllm.metered_worker import MeteredCPUWorker, StepMeter, mark_generators

pytestmark = pytest.mark.vllm

_PATIENCE_MS = 20_000


def new(req_id, prompt, context=0, name=None):
    params = SamplingParams(extra_args={"kappa_request_id": name or f"ours-{req_id}"})
    return NewRequestData(
        req_id=req_id, prompt_token_ids=list(range(prompt)), mm_features=[],
        sampling_params=params, pooling_params=None, block_ids=([],), num_computed_tokens=context,
        lora_request=None,
    )  # fmt: skip


def scheduled(tokens, fresh=(), cached=(), finished=()):
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


def test_a_prompt_in_one_step_is_finished_by_it():
    work, prefilled = StepMeter().work(scheduled({"a": 10}, [new("a", 10)]))
    assert (work, prefilled) == ([(10, 0)], ["ours-a"])


def test_a_prompt_in_chunks_is_finished_by_the_last_one():
    meter = StepMeter()
    assert meter.work(scheduled({"a": 6}, [new("a", 10, context=1)])) == ([(6, 1)], [])
    assert meter.work(scheduled({"a": 3}, cached=[("a", 7)])) == ([(3, 7)], ["ours-a"])
    assert meter.work(scheduled({"a": 1}, cached=[("a", 10)])) == ([(1, 10)], [])


def test_a_prompt_has_taken_the_steps_that_computed_it_and_no_others():
    meter = StepMeter()
    meter.work(scheduled({"a": 6, "b": 2}, [new("a", 10), new("b", 2)]))
    assert meter.took(0.5) == [("b", "ours-b", 0.5)]
    meter.work(scheduled({"a": 4, "b": 1}, cached=[("a", 6), ("b", 2)]))
    assert meter.took(0.25) == [("a", "ours-a", 0.75)]
    meter.work(scheduled({"a": 1, "b": 1}, cached=[("a", 10), ("b", 3)]))
    assert meter.took(0.25) == []


def test_a_request_that_ends_in_its_prompt_leaves_nothing_behind():
    meter = StepMeter()
    meter.work(scheduled({"a": 6}, [new("a", 10)]))
    meter.took(1.0)
    meter.work(scheduled({"a": 5}, [new("a", 5)], finished=["a"]))
    meter.work(scheduled({"a": 10}, [new("a", 10)]))
    assert meter.took(0.5) == [("a", "ours-a", 0.5)]


def test_cached_tokens_are_context_not_work():
    work, prefilled = StepMeter().work(scheduled({"a": 2}, [new("a", 66, context=64)]))
    assert (work, prefilled) == ([(2, 64)], ["ours-a"])


def test_decodes_and_prompts_share_a_step():
    meter = StepMeter()
    meter.work(scheduled({"a": 4}, [new("a", 4)]))
    work, prefilled = meter.work(
        scheduled({"a": 1, "b": 5}, [new("b", 9)], cached=[("a", 4)], finished=["z"])
    )
    assert sorted(work) == [(1, 4), (5, 0)]
    assert prefilled == []


def test_a_finished_requests_id_may_come_again():
    meter = StepMeter()
    meter.work(scheduled({"a": 4}, [new("a", 4)]))
    meter.work(scheduled({}, finished=["a"]))
    assert meter._prompts == {}
    assert meter.work(scheduled({"a": 4}, [new("a", 4, name="second")]))[1] == ["second"]


def test_requests_without_our_id_have_an_empty_one():
    assert request_id_of(SamplingParams()) == request_id_of(None) == ""


@pytest.fixture
def worker(tmp_path):
    """A worker without vLLM's own parts, and a function that returns its next report."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
    socket.bind(f"ipc://{tmp_path}/stats")

    def make(model):
        made = object.__new__(MeteredCPUWorker)
        made._kappa_step_model = model
        made._kappa_stats = StatsSender(f"ipc://{tmp_path}/stats")
        made._kappa_meter, made._kappa_step, made._kappa_last_end_s = StepMeter(), None, 0.0
        return made, lambda: msgspec.msgpack.decode(socket.recv())

    yield make
    context.destroy(linger=0)


def run(worker, output):
    worker._kappa_begin(output)
    worker._kappa_end()


def test_a_paced_step_lasts_its_pace(worker):
    model = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, dilation=2.0)
    made, report = worker(model)
    run(made, scheduled({"a": 20}, [new("a", 20)]))
    step = report()
    assert step["pace_s"] == pytest.approx(0.04)
    assert step["announced"] == pytest.approx([0.04, 0.0, 0.0])
    assert step["took_s"] >= step["pace_s"]
    assert (step["tokens"], step["prefilled"]) == (20, ["ours-a"])
    assert step["spent"] == [["ours-a", 0, step["took_s"]]]
    assert step["overrun"] is False


def test_a_step_slower_than_its_pace_is_an_overrun(worker):
    made, report = worker(StepModel(1e-12, 0.0, 0.0, 0.0))
    run(made, scheduled({"a": 1}, [new("a", 1)]))
    step = report()
    assert step["overrun"] is True and step["took_s"] >= step["real_s"] > step["pace_s"]


def test_an_unpaced_step_is_reported_and_never_an_overrun(worker):
    made, report = worker(None)
    run(made, scheduled({"a": 1}, [new("a", 1)]))
    step = report()
    assert (step["pace_s"], step["announced"], step["overrun"]) == (0.0, None, False)


def test_steps_back_to_back_keep_the_pace_together(worker):
    model = StepModel(token_s=5e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0)
    made, report = worker(model)
    for context in range(5):
        fresh = [new("a", 1)] if not context else []
        cached = [("a", context)] if context else []
        run(made, scheduled({"a": 1}, fresh, cached))
    made._kappa_stats.flush()
    steps = [report() for _ in range(5)]
    assert all(step["took_s"] >= step["pace_s"] for step in steps)


def test_steps_that_complete_no_prompt_are_reported_together(worker, monkeypatch):
    made, _ = worker(None)
    sent = []
    monkeypatch.setattr(made._kappa_stats, "send", lambda _, urgent: sent.append(urgent))
    run(made, scheduled({"a": 1}, [new("a", 2)]))
    run(made, scheduled({"a": 1}, (), [("a", 1)]))
    run(made, scheduled({"a": 1}, (), [("a", 2)]))
    assert sent == [False, True, False]


def test_an_empty_step_reports_nothing(worker):
    made, report = worker(None)
    run(made, scheduled({}, finished=["x"]))
    run(made, scheduled({"a": 1}, [new("a", 1, name="next")]))
    assert report()["prefilled"] == ["next"]


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
