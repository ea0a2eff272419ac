"""The pure parts of `kappa bench serve`."""

from random import Random

import pytest

from benchmarks.serving.serve import Answer, Round, has_text, prompt_text, summarize


def played(system, ttfts_s, seconds=2.0):
    answers = tuple(Answer(ttft_s, ttft_s / 2) for ttft_s in ttfts_s)
    return Round(system, "short", 8, seconds, answers)


def test_ours_is_set_beside_each_other_system():
    result = summarize([
        played("stock", [2.0, 4.0, 6.0], seconds=3.0), played("kappa", [1.0, 2.0, 3.0]),
        played("kappa", [2.0, 2.0, 2.0]), played("stock", [4.0, 4.0, 4.0], seconds=3.0),
    ])  # fmt: skip
    mine, stock = result["rows"]
    assert (mine["system"], mine["rounds"], mine["requests"]) == ("kappa", 2, 6)
    assert mine["ttft_s"]["p50"] == 2.0
    assert mine["ttft_s"]["spread"] == 0.0
    assert mine["rps"] == {"median": 1.5, "spread": 0.0}
    assert stock["ttft_s"]["p50"] == 4.0
    (ratio,) = result["ratio_p50"]
    assert (ratio["against"], ratio["ttft"], ratio["rps"]) == ("stock", 0.5, 1.5)


def test_spread_is_that_of_the_rounds_medians():
    result = summarize([played("kappa", [1.0]), played("kappa", [3.0])])
    assert result["rows"][0]["ttft_s"]["spread"] == pytest.approx(1.0)
    assert result["ratio_p50"] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ('data: {"choices":[{"delta":{"content":"a"}}]}', True),
        ('data: {"choices":[{"delta":{"content":""}}]}', True),
        ('data: {"choices":[],"usage":{}}', False),
    ],
)
def test_the_first_event_that_only_names_the_role_is_no_token(line, expected):
    assert has_text(line) is expected


def test_prompts_differ_from_their_first_word_on():
    random = Random(1)
    texts = [prompt_text("1k", random) for _ in range(50)]
    assert len({text.split()[0] for text in texts}) == 50
    assert len(prompt_text("short", random)) < 100
