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


@pytest.fixture
def meter():
    return StepMeter()


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


@pytest.fixture
def run(tmp_path):
    """A function that runs steps on a worker without vLLM's own parts; returns their reports."""
    endpoint = f"ipc://{tmp_path}/stats"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.bind(endpoint)

        def play(model, *steps):
            worker = object.__new__(MeteredCPUWorker)
            worker._kappa_step_model, worker._kappa_stats = model, StatsSender(endpoint)
            worker._kappa_meter, worker._kappa_step = StepMeter(), None
            worker._kappa_last_end_s = 0.0
            for step in steps:
                worker._kappa_begin(step)
                worker._kappa_end()
            worker._kappa_stats.flush()
            full = [step for step in steps if step.total_num_scheduled_tokens]
            return [msgspec.msgpack.decode(socket.recv()) for _ in full]

        yield play


def test_a_paced_step_lasts_its_pace(run):
    model = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, dilation=2.0)
    (step,) = run(model, scheduled({"a": 20}, new("a", 20)))
    assert step["pace_s"] == pytest.approx(0.04)
    assert step["announced"] == pytest.approx([0.04, 0.0, 0.0])
    assert step["took_s"] >= step["pace_s"]
    assert (step["tokens"], step["prefilled"]) == (20, ["ours-a"])
    assert step["spent"] == [["ours-a", 0, step["took_s"]]]
    assert step["overrun"] is False


def test_a_step_slower_than_its_pace_is_an_overrun(run):
    (step,) = run(StepModel(1e-12, 0.0, 0.0, 0.0), scheduled({"a": 1}, new("a", 1)))
    assert step["overrun"] is True and step["took_s"] >= step["real_s"] > step["pace_s"]


def test_an_unpaced_step_is_reported_and_never_an_overrun(run):
    (step,) = run(None, scheduled({"a": 1}, new("a", 1)))
    assert (step["pace_s"], step["announced"], step["overrun"]) == (0.0, None, False)


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
