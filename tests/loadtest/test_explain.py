import pytest
from msgspec.structs import replace

from loadtest.explain import NO_SPLIT, split, why_slow, why_slow_tokens
from tests.loadtest.replay_records import failed, foreign, reported


def with_tokens(record, **tokens):
    return replace(record, actual={**record.actual, **tokens})


def test_a_derived_split_adds_up_to_the_ttft():
    found = split(reported())
    assert found.source == "derived"
    assert (found.load_s, found.compute_s) == (pytest.approx(0.3), pytest.approx(0.5))
    assert found.queue_s == pytest.approx(0.1)
    parts = (found.late_s, found.queue_s, found.load_s, found.compute_s, found.way_s)
    assert sum(parts) + found.unknown_s == pytest.approx(found.ttft_s)


def test_a_split_that_the_endpoint_reports_is_taken_as_it_is():
    found = split(with_tokens(reported(), queue_s=0.6, load_s=0.1, compute_s=0.1))
    assert (found.source, found.queue_s, found.load_s) == ("told", 0.6, 0.1)
    assert found.unknown_s == pytest.approx(0.1)


def test_load_and_compute_follow_the_tokens_that_were_really_taken():
    # The prefix was not there: nothing loaded, everything computed, at the predicted rate.
    record = with_tokens(reported(), cached_tokens=0, new_tokens=600)
    found = split(record)
    assert found.load_s == 0.0
    assert found.compute_s == pytest.approx(0.5 * 600 / 400)
    assert "1,600 of 1,600 reusable tokens were in no cache there" in why_slow(record)


def test_predicted_parts_never_exceed_what_was_measured():
    found = split(with_tokens(reported(), cached_tokens=3200, new_tokens=800))
    assert found.queue_s == 0.0
    assert found.load_s + found.compute_s == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            reported(first_token_s=4.93, actual={**reported().actual, "ttft_s": 3.9}),
            "waited 3.1 of 3.9 s in the queue of node pcie (paced); predicted 50 ms",
        ),
        (
            reported(actual={**reported().actual, "cached_tokens": 3200, "new_tokens": 100}),
            "load of 3,200 tokens over the link of node pcie (paced) took 0.60 of 0.93 s; "
            "predicted 0.30 s",
        ),
        (
            reported(),
            "computing 400 new tokens on node pcie (paced) took 0.50 of 0.93 s; predicted 0.50 s",
        ),
        (reported(sent_s=1.8), "sent 0.80 s late: the client was at its stream limit, or busy"),
        (
            reported(sent_s=1.8, attempt=2),
            "it was refused 2 times before: 0.80 of 0.93 s went by until the attempt that was "
            "answered",
        ),
        (foreign(), f"0.92 of 0.93 s at the endpoint; {NO_SPLIT}"),
        (
            foreign(predicted_ttft_s=0.2, node="pcie"),
            f"0.92 of 0.93 s at the endpoint; {NO_SPLIT}; predicted TTFT 0.20 s",
        ),
        (
            reported(actual={**reported().actual, "ttft_s": 0.05}),
            "0.87 of 0.93 s passed between client and router (network, HTTP, tokenization)",
        ),
        (failed(), "failed (429) 0.20 s after it was due: queue <full>"),
        (failed(error_detail="", attempt=1), "failed (429) 0.20 s after it was due at attempt 2"),
    ],
)
def test_one_plain_sentence_says_why(record, sentence):
    assert why_slow(record).startswith(sentence)


def test_a_request_without_a_token_has_no_split():
    assert split(failed()) is None
    assert why_slow(foreign(first_token_s=None)) == "it ended without a token"


def test_why_tokens_were_slow_names_one_long_pause_or_even_slowness():
    assert why_slow_tokens(reported(gaps_s=[0.01, 0.02, 2.0])) == (
        "one pause of 2.0 s on node pcie (paced), before chunk 4 of 4, made most of its 2.0 s of "
        "decoding"
    )
    assert "evenly: the longest pause was 0.10 s" in why_slow_tokens(reported())
    assert why_slow_tokens(reported(gaps_s=[])) == "it has no second token"
