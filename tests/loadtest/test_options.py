"""The options of a load test become sessions and settings, or an error that names it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kappa_deploy.commands.console import with_options
from kappa_loadtest.cluster import Surveyed
from kappa_loadtest.options import LoadOptions
from kappa_workload.catalogue import workload_named
from kappa_workload.shapes import Workload

VLLM = Surveyed(("m",), {"m": 2000}, (), takes_ignore_eos=True)
PLAIN = Surveyed(("m",), {}, (), takes_ignore_eos=False)


@pytest.fixture(scope="module")
def talks() -> Workload:
    return workload_named("sharegpt")


def of(**options: Any) -> LoadOptions:
    return LoadOptions("sharegpt", "http://h", model="m", **options)


app = typer.Typer()


@app.command()
@with_options(LoadOptions)
def show(options: LoadOptions) -> None:
    """What the command line makes of its words."""
    print(options.checked())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--arrivals gamma:5", "cv"),
        ("--arrivals closed:0", "closed"),
        ("--closed 0", "'--closed': Input should be greater than or equal to 1"),
        ("--duration 0", "'--duration': Input should be greater"),
        ("--duration nan", "'--duration': Input should be greater"),
        ("--timeout -1", "'--timeout': Input should be greater"),
        ("--in-flight 0", "'--in-flight': Input should be greater than or equal to 1"),
        ("--retries -1", "'--retries': Input should be greater than or equal to 0"),
        ("--prompts poem", "'poem' is not one of 'auto', 'ids', 'text', 'chat'"),
        ("--ignore-eos maybe", "'--ignore-eos': Value error, 'maybe'"),
        ("--rates tokens", "'--rates': Value error, 'tokens'"),
        ("--pause-factor -1", "'--pause-factor': Input should be greater than or equal to 0"),
        ("--pause-factor inf", "'--pause-factor': inf"),
        ("--scale 1/0", "'--scale': '1/0' is no factor"),
        ("--priority red=10", "--priority 'red=10': give TENANT=CLASS or CLASS"),
        ("--priority -1", "--priority '-1': give TENANT=CLASS or CLASS"),
        ("--priority 1 --priority 2", "--priority gives all others two classes: drop one"),
        ("--max-output 0", "'--max-output': Input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: str, why: str) -> None:
    run = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    done = run.invoke(app, ["sharegpt", "--url", "http://h", *words.split()])
    assert (done.exit_code != 0, why in done.stderr + str(done.exception)) == (True, True)


def test_options_have_defaults_and_values_of_the_command_line() -> None:
    words = ["sharegpt", "--url", "http://h", "--closed", "3", "--no-usage"]
    shown = CliRunner().invoke(app, words).stdout.replace("\n", "")
    assert shown == str(LoadOptions("sharegpt", "http://h", closed=3, usage=False))


def test_priority_is_the_tenants_own_or_that_of_all_others() -> None:
    keys = {"red": "k"}
    settings = of(priority=["red=3", "1"]).endpoint(None, keys)
    sent = [settings.prepare("x", 4, tenant).body for tenant in ("red", "blue", "")]
    assert [json.loads(body)["priority"] for body in sent] == [3, 1, 1]
    plain = of(priority=["red=0"]).endpoint(None, keys)
    assert json.loads(plain.prepare("x", 4, "red").body)["priority"] == 0
    assert "priority" not in json.loads(plain.prepare("x", 4, "blue").body)


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


def test_prompts_are_ids_if_the_endpoint_takes_them_and_fit_it(
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
    options = LoadOptions(str(path), "http://h")
    path.write_text("1")
    first = options.checked().digest
    path.write_text("2")
    assert first != options.checked().digest != ""
    assert of().checked().digest == ""
