"""The options of a load test become sessions and settings, or an error that names it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.cluster import Surveyed
from loadtest.options import LoadOptions, file_digest
from workload.catalogue import workload_named
from workload.shapes import Workload

VLLM = Surveyed(("m",), {"m": 2000}, (), takes_ignore_eos=True)
PLAIN = Surveyed(("m",), {}, (), takes_ignore_eos=False)


@pytest.fixture(scope="module")
def talks() -> Workload:
    return workload_named("sharegpt")


def of(**options: Any) -> LoadOptions:
    return LoadOptions("sharegpt", "http://h", model="m", **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"arrivals": "gamma:5"}, "cv"),
        ({"arrivals": "closed:0"}, "closed"),
        ({"closed": 0}, "--closed is 0"),
        ({"duration": 0.0}, "--duration is 0"),
        ({"duration": float("nan")}, "--duration is nan"),
        ({"timeout": -1.0}, "--timeout is -1"),
        ({"in_flight": 0}, "--in-flight is 0"),
        ({"retries": -1}, "--retries is -1"),
        ({"prompts": "poem"}, "--prompts is 'poem'"),
        ({"ignore_eos": "maybe"}, "--ignore-eos is 'maybe'"),
        ({"rates": "tokens"}, "--rates is 'tokens'"),
        ({"pause_factor": -1.0}, "--pause-factor is -1.0: give zero or more"),
        ({"scale": "1/0"}, "--scale is '1/0': give a factor"),
        ({"max_output": 0}, "--max-output is 0: give 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of(**options)


def test_the_same_seed_is_the_same_traffic_and_bounds_end_it(talks: Workload) -> None:
    def traffic(seed: int) -> list[tuple[str, float, int]]:
        sessions = of(requests=50, arrivals="gamma:5,cv=2", seed=seed).replay(talks, VLLM)
        return [(s.id, s.arrival_s, len(s.requests)) for s in sessions]

    assert traffic(1) == traffic(1)
    assert traffic(1) != traffic(2)
    assert sum(length for *_, length in traffic(1)) == 50


def test_rates_may_count_requests(talks: Workload) -> None:
    def last_s(rates: str) -> float:
        sessions = of(sessions=200, arrivals="constant:10", rates=rates).replay(talks, VLLM)
        return [s.arrival_s for s in sessions][-1]

    turns = np.mean([len(s.turns) for s in talks.sessions])
    assert last_s("requests") == pytest.approx(last_s("sessions") * turns)


def test_prompts_are_ids_where_the_endpoint_takes_them_and_fit_its_context(
    talks: Workload,
) -> None:
    def kinds(surveyed: Surveyed | None, prompts: str) -> set[type]:
        sessions = of(sessions=5, prompts=prompts).replay(talks, surveyed)
        return {type(r.make_prompt()) for s in sessions for r in s.requests}

    assert kinds(VLLM, "auto") == {np.ndarray}
    assert kinds(PLAIN, "auto") == kinds(None, "auto") == kinds(VLLM, "text") == {str}
    assert kinds(PLAIN, "ids") == {np.ndarray}
    requests = (r for s in of(sessions=300).replay(talks, VLLM) for r in s.requests)
    assert max(r.input_tokens + r.output_tokens for r in requests) <= 2000


def test_without_a_bound_the_workload_is_played_once(talks: Workload) -> None:
    few = replace(talks, sessions=talks.sessions[:30])
    assert len(list(of().replay(few, PLAIN))) == 30
    endless = of(duration=1e9).replay(few, PLAIN)
    assert len(list(itertools.islice(endless, 100))) == 100


@pytest.mark.parametrize(
    ("choice", "surveyed", "sent"),
    [("auto", VLLM, True), ("auto", PLAIN, False), ("auto", None, False), ("on", PLAIN, True),
     ("off", VLLM, False)],
)  # fmt: skip
def test_ignore_eos(choice: str, surveyed: Surveyed | None, sent: bool) -> None:
    assert of(ignore_eos=choice).endpoint(surveyed, {}).ignore_eos is sent


def test_a_file_that_changed_is_another_workload(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("1")
    first = file_digest(str(path))
    path.write_text("2")
    assert first != file_digest(str(path)) != ""
    assert file_digest("sharegpt") == ""
