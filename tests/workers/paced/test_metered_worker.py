"""How long a step lasts on a CPU, paced or not, and what is reported."""

from types import SimpleNamespace

import pytest
import torch

from kappa.cost import StepModel
from kappa_workers.paced import metered_worker as paced_worker
from kappa_workers.paced.metered_worker import MeteredCPUWorker, mark_generators
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm import metered_worker
from tests.workers.vllm.steps import Clock, Reports, metered, new, scheduled

pytestmark = pytest.mark.vllm


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


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (metered_worker, paced_worker):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("token_s", "beyond_s", "took_s", "end_s"),
    [
        (0.0, 2.0, 1.0, 103.0),  # as long as it took, less what it waited
        (0.5, 2.5, 4.0, 106.5),  # its pace, and what of the load is not hidden behind it
    ],
)
def test_step_that_waits_for_a_layered_load_computed_less_long(
    clock, monkeypatch, token_s, beyond_s, took_s, end_s
):
    asked = []

    class Source:
        def take_waits(self, *step):
            asked.append(step)
            return 2.0, beyond_s

        def take_load_s(self, _):
            return beyond_s

    for module in (metered_worker, paced_worker):
        monkeypatch.setattr(module, "LOAD_SOURCES", [Source()])
    model = StepModel(token_s, 0.0, 0.0, 0.0) if token_s else None
    worker = metered(MeteredCPUWorker, model, Reports())
    worker._kappa_begin(scheduled({"a": 8}, new("a", 8)))
    clock.now_s = 103.0
    worker._kappa_end(None)
    (step,) = worker._kappa_stats.sent
    assert asked == [(100.0, 8 * token_s)] and clock.now_s == end_s
    assert (step["took_s"], step["real_s"], step["overrun"]) == (took_s, 1.0, False)
    assert step["spent"] == [("ours-a", beyond_s, took_s)]


def test_seed_draws_of_an_unfinished_prompts_step_are_undone():
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
