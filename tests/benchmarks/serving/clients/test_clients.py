"""The clients beside ours: what they are told, and what is read of what they tell.

The samples were recorded from aiperf 0.13.0 and vLLM 0.29 against an endpoint that answers every
second request with 429, the others with three tokens 20 ms apart.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.serving.clients import aiperf, ours, vllm_bench
from benchmarks.serving.clients.common import (
    ClientError,
    Plan,
    Played,
    compared,
    figures,
    prompts,
    run,
)
from tests.loadtest.replay_records import failed, told

SAMPLES = Path(__file__).with_name("samples")
AIPERF = SAMPLES / "aiperf-0.13.0-profile_export.jsonl"
VLLM = SAMPLES / "vllm-0.29-result.json"
PLAN = Plan("http://127.0.0.1:1", "m", ("a b", "c d"), 3, "/tokenizer", concurrency=2)


@pytest.mark.parametrize(("read", "path"), [(aiperf.read, AIPERF), (vllm_bench.read, VLLM)])
def test_what_the_others_recorded_is_read_and_failures_are_no_latencies(read, path):
    played = read(path)
    assert (len(played.answers), played.failed) == (3, 3)
    assert len(played.gaps_s) == 6
    for answer in played.answers:
        assert 0.02 < answer.ttft_s < 0.04
        assert 0.02 < answer.tpot_s < 0.03
        assert answer.e2e_s == pytest.approx(answer.ttft_s + 2 * answer.tpot_s)
    assert 0.2 < played.seconds < 0.4


def test_the_figures_read_are_those_that_the_client_printed():
    result = json.loads(VLLM.read_text())
    found = figures(vllm_bench.read(VLLM))
    # It takes its end-to-end time from another reading of the clock.
    assert found["ttft_s"] == pytest.approx(result["median_ttft_ms"] / 1e3, rel=1e-3)
    assert found["tpot_s"] == pytest.approx(result["median_tpot_ms"] / 1e3, rel=1e-3)


def test_our_records_are_read_from_sending(tmp_path):
    lines = (msgspec.json.encode(r).decode() + "\n" for r in (told(), failed(session="f")))
    (tmp_path / "records.jsonl").write_text("".join(lines))
    played = ours.read(tmp_path)
    assert (len(played.answers), played.failed) == (1, 1)
    assert played.answers[0].ttft_s == pytest.approx(0.92)
    assert played.answers[0].tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (aiperf.read, "{", "1: "),
        (aiperf.read, "[]\n", "expected an object"),
        (aiperf.read, '{"metadata": {}}\n', r":1: not as aiperf 0.13.0 writes it"),
        (vllm_bench.read, "{", "not as vLLM 0.29 writes it"),
        (vllm_bench.read, '{"ttfts": [1]}', "'itls'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, read, text, said):
    path = tmp_path / "told"
    path.write_text(text)
    with pytest.raises(ClientError, match=said):
        read(path)
    path.unlink()
    with pytest.raises(ClientError, match="left no told"):
        read(path)


def test_a_unit_that_changed_is_refused_rather_than_misread(tmp_path):
    path = tmp_path / "told"
    path.write_text(AIPERF.read_text().replace('"unit": "ms"', '"unit": "s"'))
    with pytest.raises(ClientError, match="in s"):
        aiperf.read(path)


def test_all_clients_are_told_the_same_prompts_and_lengths(tmp_path):
    bodies = aiperf.bodies(PLAN)
    assert [body["prompt"] for body in bodies] == list(PLAN.prompts)
    assert {body["max_tokens"] for body in bodies} == {3}
    requests = [session.requests[0] for session in ours.sessions(PLAN)]
    assert [request.make_prompt() for request in requests] == list(PLAN.prompts)
    assert {request.output_tokens for request in requests} == {3}


def test_a_rate_is_even_for_every_client(tmp_path):
    plan = replace(PLAN, concurrency=None, rate_rps=4.0)
    assert [session.arrival_s for session in ours.sessions(plan)] == [0.0, 0.25]
    words = aiperf.command(plan, Path("py"), tmp_path, tmp_path)
    assert words[words.index("--request-rate") + 1] == "4"
    assert words[words.index("--arrival-pattern") + 1] == "constant"
    words = vllm_bench.command(plan, Path("py"), tmp_path, tmp_path)
    assert words[words.index("--request-rate") + 1] == "4"
    assert float(words[words.index("--burstiness") + 1]) >= 1e6
    assert "--max-concurrency" not in words


def test_a_plan_has_one_pace_and_a_prompt():
    with pytest.raises(ValueError, match="either"):
        replace(PLAN, rate_rps=1.0)
    with pytest.raises(ValueError, match="at least one prompt"):
        replace(PLAN, prompts=())


def test_prompts_differ_from_their_first_word_and_come_again_from_a_seed():
    found = prompts(50, 10, seed=3)
    assert found == prompts(50, 10, seed=3)
    assert len({text.split()[0] for text in found}) == 50
    assert {len(text.split()) for text in found} == {11}
    assert all(text.startswith("other ") for text in prompts(5, 10, 3, "other"))


def test_a_client_that_fails_says_what_it_said_last():
    code = "import sys; print('one', file=sys.stderr); sys.exit('no tokenizer')"
    with pytest.raises(ClientError, match=r"x ended with code 1: one \| no tokenizer"):
        run("x", [sys.executable, "-c", code], 30.0)
    with pytest.raises(ClientError, match="did not end within"):
        run("x", [sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    with pytest.raises(ClientError, match="No such file"):
        run("x", ["/nowhere/python"], 1.0)


def played(ttft_s, tpot_s=0.02):
    answer = ours.Answer(ttft_s, tpot_s, ttft_s + 2 * tpot_s)
    return Played((answer,) * 3, 0, 1.0, (tpot_s,) * 6, cpu_s=0.5)


def test_ratios_are_taken_within_a_round():
    # The machine slowed down by half for both: nothing differs.
    rounds = [
        {"us": played(0.1), "them": played(0.1)},
        {"us": played(0.2), "them": played(0.2)},
        {"us": played(0.4), "them": played(0.4, math.nan)},
    ]
    found = compared(rounds, "us", {"ttft_s": 0.05})
    ratio = found["ratios"][0]["figures"]
    assert ratio["ttft_s"]["median"] == pytest.approx(1.0)
    assert ratio["ttft_s"]["within_5_percent"] is True
    row = found["clients"][0]
    assert (row["ttft_s"]["median"], row["ttft_s"]["largest"]) == (0.2, 0.4)
    assert row["above_the_endpoint_s"]["ttft_s"] == pytest.approx(0.15)


def test_more_than_five_percent_is_marked_and_what_is_not_told_is_none():
    mine = replace(played(0.11), gaps_s=())
    found = compared([{"us": mine, "them": played(0.1)}], "us")
    ratio = found["ratios"][0]["figures"]
    assert ratio["ttft_s"]["within_5_percent"] is False
    assert ratio["itl_s"] is None
    assert found["clients"][0]["itl_s"] is None


def test_when_a_request_counts_as_sent_is_bracketed():
    # Ours is stamped 0.02 s later than theirs: from sending it is quicker, from being due alike.
    mine = Played((ours.Answer(0.08, 0.02, 0.12, late_s=0.02),), 0, 1.0)
    ratio = compared([{"us": mine, "them": played(0.1)}], "us")["ratios"][0]["figures"]
    assert ratio["ttft_s"]["median"] == pytest.approx(0.8)
    assert ratio["ttft_due_s"]["median"] == pytest.approx(1.0)
    assert aiperf.read(AIPERF).answers[0].late_s == pytest.approx(0.003363, rel=1e-3)
