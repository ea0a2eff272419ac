"""Calling all deciders, where Ray's call is replaced by a script, and their metrics as one."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kappa_router.live.deciders
from kappa import metrics as m
from kappa_router.live.deciders import Deciders, merged
from kappa_router.live.metrics import RouterMetrics

pytestmark = pytest.mark.ray


def values(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.fixture
def two():
    return RouterMetrics(), RouterMetrics()


def test_counters_of_each_decider_add_up(two):
    for metrics, count in zip(two, (3, 4), strict=True):
        metrics.inc(m.REQUESTS, "200", by=count)
        metrics.set(m.RESERVATIONS, "a", "w", to=count)
        for _ in range(count):
            metrics.observe(m.TTFT, "a", value=0.02)
    both = values(merged(metrics.exposition() for metrics in two))
    assert both["kappa_requests_total", "200"] == 7
    assert both["kappa_reservations", "a", "w"] == 7
    assert both["kappa_ttft_seconds_count", "a"] == 7
    assert both["kappa_ttft_seconds_bucket", "0.025", "a"] == 7
    assert both["kappa_ttft_seconds_bucket", "0.01", "a"] == 0
    assert both["kappa_ttft_seconds_sum", "a"] == pytest.approx(0.14)


def test_figures_of_one_worker_heard_twice_count_once(two):
    for metrics, tokens in zip(two, (100, 70), strict=True):
        metrics.inc(m.PROMPT_TOKENS, "a", "new", by=tokens)
        metrics.set(m.GPU_BACKLOG, "a", "w", to=1.5)
    both = values(merged(metrics.exposition() for metrics in two))
    assert both["kappa_prompt_tokens_total", "a", "new"] == 100
    assert both["kappa_gpu_backlog_seconds", "a", "w"] == 1.5


def test_counter_of_one_decider_is_not_lost(two):
    two[0].inc(m.RETRIES, "a", "died")
    two[1].inc(m.RETRIES, "b", "died")
    both = values(merged(metrics.exposition() for metrics in two))
    assert both["kappa_retries_total", "a", "died"] == both["kappa_retries_total", "b", "died"] == 1


def test_metrics_of_one_decider_stay_as_they_are(two):
    two[0].inc(m.REQUESTS, "200")
    text = two[0].exposition()
    assert values(merged([text])) == values(text)
    assert merged([text]).count(b"# HELP kappa_requests_total ") == 1


def test_metrics_that_add_up_are_named_and_no_workers():
    assert {metric.name for metric in m.ALL} >= m.ADDING
    of_workers = {m.STEPS, m.LOAD_BYTES, m.TENANT_CHARGE, m.INDEX_BLOCKS, m.PROMPT_TOKENS}
    assert not m.ADDING & {metric.name for metric in of_workers}


# -- calls ----------------------------------------------------------------------------------------


class Handle:
    """Ray's handle of the deciders, which answer or fail as told."""

    def __init__(self, *answers, error=None):
        self.answers, self.error, self.asked = list(answers), error, []

    def broadcast(self, method, *args):
        self.asked.append((method, *args))
        return self

    async def results_async(self, *, timeout_s, return_exceptions):
        assert timeout_s > 0 and return_exceptions
        if self.error is not None:
            raise self.error
        return self.answers


def deciders(handle):
    made = Deciders(2, "told")
    made._handle = handle
    return made


async def own(what, *args):
    return f"own {what} {args}"


async def test_call_returns_every_answer():
    handle = Handle("one", "two")
    assert await deciders(handle).call(own, "decision", "r") == ["one", "two"]
    assert handle.asked == [("told", "decision", "r")]


async def test_call_leaves_out_a_decider_that_fails():
    handle = Handle("one", RuntimeError("died"))
    assert await deciders(handle).call(own, "metrics") == ["one"]


@pytest.mark.parametrize(
    "handle", [Handle(error=TimeoutError()), Handle(RuntimeError("died")), Handle()]
)
async def test_call_falls_back_to_its_own_answer(handle):
    assert await deciders(handle).call(own, "metrics") == ["own metrics ()"]


async def test_single_decider_calls_no_other(monkeypatch):
    monkeypatch.delattr(kappa_router.live.deciders.serve, "get_deployment_handle")
    assert await Deciders(1, "told").call(own, "metrics") == ["own metrics ()"]
