"""Several ingresses over one set of workers: what each knows of the others, and its worth."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.protocol import Admission, Announcement, Arrival, WorkerReport
from kappa.shapes import model_shape
from router.core import Router, RouterConfig
from router.decision import RouteRequest
from router.policies import policy_named

SIZE = 16
SHAPE = model_shape("llama-3.1-8b")
PROFILE = node_profile("h100-pcie5")
STEP = step_model(SHAPE, PROFILE)


def announcement(worker):
    return Announcement(
        worker=worker, model="m", node=replace(PROFILE, name=worker), step=STEP,
        kv_bytes_per_token=131072.0, emulated_model="", fingerprint="f", block_tokens=SIZE,
        device_blocks=20_001, host_blocks=0, max_batch_tokens=8192, max_context_tokens=30_000,
        events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip


def router(*workers, forecast=True, policy="ttft", first=0.0):
    made = Router(
        RouterConfig(
            policy=policy_named(policy), secret=7, calibrate=False, stale_after_s=float("inf"),
            forecast_workers=len(workers) if forecast else 0, first=first,
        )
    )  # fmt: skip
    for worker in workers:
        made.join(announcement(worker), 0.0)
    return made


def report(worker="a", time_s=1.0, **what):
    return WorkerReport(worker, time_s, **what)


def arrival(name="r", new=4000, **what):
    return Arrival(name, new_tokens=new, **what)


def ask(name, tokens=4000):
    return RouteRequest(name, np.arange(tokens) % 1000, max_tokens=1)


def empty(made, now_s=1.0):
    return all(link_s == gpu_s == 0.0 for link_s, gpu_s in made.backlogs_s(now_s).values())


@pytest.mark.parametrize("forecast", [True, False])
def test_anothers_request_counts_until_it_is_finished(forecast):
    made = router("a", "b", forecast=forecast)
    made.report(report(arrived=(arrival(),)), 1.0)
    assert made.route(ask("mine"), 1.0).worker == "b"
    assert (made.reservations, made.in_flight, made.others_on("a")) == (1, 2, 1)
    made.release("mine", 1.0)
    made.report(report(finished=("r",)), 1.0)
    assert (made.in_flight, made.others_on("a")) == (0, 0)
    assert empty(made)


@pytest.mark.parametrize("forecast", [True, False])
def test_anothers_request_is_worth_what_the_same_one_of_ours_is(forecast):
    ours, others = (router("a", forecast=forecast) for _ in range(2))
    ours.route(RouteRequest("r", np.arange(4000), max_tokens=8), 1.0)
    others.report(report(arrived=(arrival(max_tokens=8),)), 1.0)
    assert others.backlogs_s(1.0)["a"] == pytest.approx(ours.backlogs_s(1.0)["a"])
    told = report(admitted=(Admission("r", 0, 0, 1000),))
    for made in (ours, others):
        made.report(told, 1.0)
    assert others.backlogs_s(1.0)["a"] == pytest.approx(ours.backlogs_s(1.0)["a"])


def test_a_request_of_ones_own_is_not_taken_for_anothers():
    made = router("a")
    made.route(ask("r"), 1.0)
    before = made.backlogs_s(1.0)
    made.report(report(arrived=(arrival("r"),)), 1.0)
    made.report(report(in_flight=(arrival("r"),)), 1.0)
    assert made.backlogs_s(1.0) == before and made.in_flight == 1
    made.report(report(finished=("r",)), 1.0)
    assert made.in_flight == 1, "its ingress says when it is over"
    made.release("r", 1.0)
    assert empty(made)


def test_one_that_comes_back_under_an_id_of_anothers_is_reserved_once():
    made = router("a")
    made.report(report(arrived=(arrival("r"),)), 1.0)
    made.route(ask("r"), 1.0)
    made.release("r", 1.0)
    assert made.in_flight == 0 and empty(made)


def test_all_that_is_in_flight_replaces_what_was_thought():
    made = router("a", "b")
    made.report(report(arrived=(arrival("gone"), arrival("stays"))), 1.0)
    made.report(report("b", arrived=(arrival("elsewhere"),)), 1.0)
    made.report(report(in_flight=(arrival("stays"), arrival("new", prefilled=True))), 1.0)
    assert (made.others_on("a"), made.others_on("b")) == (2, 1)
    # One whose prompt is done is no backlog any more.
    only_one = router("a", "b")
    only_one.report(report(arrived=(arrival("stays"),)), 1.0)
    assert made.backlogs_s(1.0)["a"] == pytest.approx(only_one.backlogs_s(1.0)["a"])
    made.report(report(in_flight=()), 1.0)
    assert made.others_on("a") == 0 and made.backlogs_s(1.0)["a"] == (0.0, 0.0)


def test_an_id_that_two_workers_report_is_counted_once_and_ends_where_it_began():
    made = router("a", "b")
    made.report(report("a", arrived=(arrival("r"),)), 1.0)
    made.report(report("b", arrived=(arrival("r"),)), 1.0)
    made.report(report("b", finished=("r",)), 1.0)
    assert (made.others_on("a"), made.others_on("b")) == (1, 0)
    made.report(report("a", finished=("r",)), 1.0)
    assert made.in_flight == 0 and empty(made)


@pytest.mark.parametrize("how", ["leave", "void"])
def test_a_worker_that_goes_takes_the_others_requests_along(how):
    made = router("a", "b")
    made.report(report(arrived=(arrival("r"), arrival("s"))), 1.0)
    made.leave("a") if how == "leave" else made.void("a", 1.0)
    assert made.in_flight == 0
    if how == "void":
        assert made.backlogs_s(1.0)["a"] == (0.0, 0.0)
        made.report(report(in_flight=(arrival("r"),)), 1.0)
        assert made.others_on("a") == 1, "told anew, known anew"


def test_an_uninformed_request_of_anothers_counts_as_one_in_flight():
    made = router("a", "b")
    made.report(report(arrived=(Arrival("r"),)), 1.0)
    assert made.explain(ask("x"), 1.0).worker == "b"


def test_what_a_former_worker_says_of_a_request_tried_elsewhere_is_not_believed():
    made = router("a", "b")
    first = made.route(ask("r"), 1.0).worker
    second = ({"a", "b"} - {first}).pop()
    made.route(replace(ask("r"), exclude=frozenset({first}), retry=True), 1.0)
    waiting = made.backlogs_s(1.0)[second]
    made.report(report(first, admitted=(Admission("r", 0, 0, 10),), prefilled=("r",)), 1.0)
    assert made.backlogs_s(1.0)[second] == waiting


@pytest.mark.parametrize("wrong", [{"new_tokens": -1}, {"host_tokens": 1.5}, {"max_tokens": "9"}])
def test_an_arrival_that_counts_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkerReport.from_dict(report().to_dict() | {"arrived": [{"request_id": "r", **wrong}]})


# -- herding ------------------------------------------------------------------------------------


@dataclass(order=True)
class _Event:
    at_s: float
    number: int
    what: object = field(compare=False)


@dataclass
class Herd:
    """First-come workers, routers that share them, and the network's delay between the two.

    A decision reaches its worker after `delay_s`, a worker's report every router after `delay_s`.
    `telling`: workers tell of arrivals and ends; if not, of admissions and prefills only, which
    mean nothing to a router that does not know the request.
    """

    routers: list[Router]
    workers: tuple[str, ...]
    delay_s: float
    telling: bool = True
    waited_s: list[float] = field(default_factory=list)
    _queue: list[_Event] = field(default_factory=list)
    _free_s: dict[str, float] = field(default_factory=dict)
    _numbers: itertools.count = field(default_factory=itertools.count)

    def run(self, requests: int, load: float, seed: int) -> np.ndarray:
        """Seconds that each request waited for its worker, at this load of all workers."""
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1000, 8000, requests)
        service_s = np.array([STEP.real_s([(int(n), 0)]) for n in sizes])
        gaps = rng.exponential(service_s.mean() / (load * len(self.workers)), requests)
        for i, at_s in enumerate(np.cumsum(gaps)):
            made = self.routers[int(rng.integers(len(self.routers)))]
            self._at(float(at_s), lambda t, i=i, made=made: self._ask(i, made, sizes, service_s, t))
        while self._queue:
            event = heapq.heappop(self._queue)
            event.what(event.at_s)
        assert all(made.in_flight == 0 for made in self.routers), "a reservation leaked"
        return np.array(self.waited_s)

    def _ask(self, i, made, sizes, service_s, now_s):
        tokens = int(sizes[i])
        # Nothing is cached: every prompt is its own.
        request = RouteRequest(f"r{i}", np.arange(tokens) + 10_000 * i, max_tokens=1)
        worker = made.route(request, now_s).worker
        self._at(
            now_s + self.delay_s,
            lambda t: self._serve(f"r{i}", made, worker, tokens, float(service_s[i]), t),
        )

    def _serve(self, name, made, worker, tokens, service_s, now_s):
        start_s = max(now_s, self._free_s.get(worker, 0.0))
        end_s = self._free_s[worker] = start_s + service_s
        self.waited_s.append(start_s - now_s)
        here = Arrival(name, new_tokens=tokens)
        if self.telling:
            self._tell(now_s, report(worker, now_s, arrived=(here,)))
        self._tell(start_s, report(worker, start_s, admitted=(Admission(name, 0, 0, tokens),)))
        self._tell(end_s, report(worker, end_s, prefilled=(name,)))
        if self.telling:
            self._tell(end_s, report(worker, end_s, finished=(name,)))
        self._at(end_s + self.delay_s, lambda t: made.release(name, t))

    def _tell(self, at_s, what):
        def heard(now_s):
            for made in self.routers:
                made.report(what, now_s)

        self._at(at_s + self.delay_s, heard)

    def _at(self, at_s, what):
        heapq.heappush(self._queue, _Event(at_s, next(self._numbers), what))


def waits_s(count, *, telling=True, spread=True, forecast=False, delay_s=0.01, seed=0):
    workers = tuple(f"w{i}" for i in range(8))
    routers = [
        router(*workers, forecast=forecast, first=i / count if spread else 0.0)
        for i in range(count)
    ]
    return Herd(routers, workers, delay_s, telling).run(1200, load=0.8, seed=seed)


@pytest.mark.parametrize("forecast", [True, False])
def test_routers_that_hear_of_each_other_queue_less_than_those_that_do_not(forecast):
    def mean_s(count, **options):
        return float(waits_s(count, forecast=forecast, delay_s=0.002, **options).mean())

    one, two, blind = mean_s(1), mean_s(2), mean_s(2, telling=False)
    same_order = mean_s(2, spread=False)
    print(
        f"mean wait: one {one:.4f}, two {two:.4f}, blind {blind:.4f}, same order {same_order:.4f}"
    )
    assert two < 1.6 * one, "two ingresses decide almost as well as one"
    assert blind > 1.3 * two, "what workers tell is worth something"
    assert same_order > two, "and so is breaking ties differently"
