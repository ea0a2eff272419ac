"""The journal of a rollout is read back as written, whatever was lost or damaged."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa_router import rollout_journal
from kappa_router.config import RouterConfig
from kappa_router.policy import Priced
from kappa_router.rollout_journal import JournalWriter, read_journal
from kappa_router.router import Router
from tests.router.building import announcement


def router(*names):
    made = Router(RouterConfig(Priced(), secret=1))
    for name in names:
        made.join(announcement(name), 0.0)
    return made


class Journal(JournalWriter):
    """Of a router with these workers; `lines` are those written so far."""

    def __init__(self, *workers, mode="shadow"):
        self.lines = []
        self.engines = router(*workers)
        super().__init__(mode, "round-robin", "priced", self.engines, lambda: {}, self.lines.append)


def record(**changes):
    return {
        "time_s": 5.0, "worker": "a", "steered": "present", "end": "done", "end_s": 9.0,
        "prompt_tokens": 64, "output_tokens": 7, "predicted": {"ttft_s": 0.5},
        "actual": {"ttft_s": 0.75}, **changes,
    }  # fmt: skip


def blocks(*names):
    return np.array(names, dtype=np.uint64)


def read(entries):
    return read_journal((json.dumps(entry) for entry in entries), "j")


def test_journal_reads_back_what_it_wrote():
    journal = Journal("a", "b")
    journal.ended(record(), "talk", blocks(1, 2))
    journal.ended(record(time_s=6.0), "talk", blocks(1, 2, 2**64 - 1))
    journal.ended(record(time_s=7.0), "other", blocks(1, 3))
    (segment,) = read(journal.lines)
    assert (segment.mode, segment.present, segment.policy) == ("shadow", "round-robin", "priced")
    assert segment.workers["b"].announcement == announcement("b")
    assert segment.workers["a"].speed == journal.engines.workers["a"].calibration.speed
    found = [r.blocks.tolist() for r in segment.requests]
    assert found == [[1, 2], [1, 2, 2**64 - 1], [1, 3]]
    first = segment.requests[0]
    assert (first.arrival_s, first.ttft_s, first.end_s, first.worker) == (5.0, 0.75, 9.0, "a")
    assert (first.prompt_tokens, first.output_tokens, first.predicted_s) == (64, 7, 0.5)
    names = [r.conversation for r in segment.requests]
    assert names[0] == names[1] != names[2]


def test_line_holds_only_the_blocks_that_no_line_before_had():
    journal, long = Journal("a"), np.arange(1, 501, dtype=np.uint64)
    journal.ended(record(), "a", long)
    journal.ended(record(), "a", np.append(long, np.uint64(501)))
    first, second = journal.lines[1:]
    assert len(second["blocks"]) < 30 < 5000 < len(first["blocks"])


@given(st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=30))
def test_blocks_are_read_back_whatever_was_forgotten(prompts):
    # Blocks as they are: each is the hash of all up to it.
    written = [
        blocks(*(hash(tuple(tokens[: n + 1])) % 2**64 for n in range(len(tokens))))
        for tokens in prompts
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_journal, "_REMEMBERED", 5)
        journal = Journal("a")
        for one in written:
            journal.ended(record(), "a", one)
        found = [r.blocks.tolist() for segment in read(journal.lines) for r in segment.requests]
    assert found == [one.tolist() for one in written]


def test_journal_names_no_conversation():
    journal = Journal("a")
    journal.ended(record(), "alice's talk", blocks(1))
    assert "alice" not in json.dumps(journal.lines)


def test_journal_describes_engines_again_when_one_joins_or_later():
    journal = Journal("a")
    for end_s in (9.0, 10.0):
        journal.ended(record(end_s=end_s), "t", blocks(1))
    journal.engines.join(announcement("b"), 0.0)
    for end_s in (11.0, 12.0, 99.0):
        journal.ended(record(end_s=end_s), "t", blocks(1))
    described = [len(line["workers"]) for line in journal.lines if line["line"] == "workers"]
    assert described == [1, 2, 2] and len(read(journal.lines)[0].requests) == 5


def test_request_may_end_when_no_engine_is_left():
    journal = Journal()
    journal.ended(record(), "t", blocks(1))
    (segment,) = read(journal.lines)
    assert not segment.workers and len(segment.requests) == 1


def test_process_begins_a_segment():
    one, two = Journal("a", "b"), Journal("a", mode="canary:5")
    one.ended(record(), "t", blocks(1))
    two.ended(record(), "t", blocks(1, 2))
    first, second = read(one.lines + two.lines)
    assert sorted(first.workers) == ["a", "b"] and len(first.requests) == 1
    assert second.mode == "canary:5" and second.requests[0].blocks.tolist() == [1, 2]


def test_answer_that_was_not_streamed_has_no_ttft():
    journal = Journal("a")
    journal.ended(record(actual={"ttft_s": None}), "t", blocks())
    (segment,) = read(journal.lines)
    assert math.isnan(segment.requests[0].ttft_s) and not segment.failed


def test_requests_without_an_answer_are_counted_and_left_out():
    journal = Journal("a")
    journal.ended(record(end="error"), "t", blocks())
    (segment,) = read(journal.lines)
    assert (list(segment.requests), segment.failed) == ([], 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({}, "no key 'line'"),
        ({"line": "request"}, "a request before any line of the workers"),
        ({"line": "workers", "version": 1}, "it has version 1, this program reads 2"),
    ],
)
def test_malformed_line_is_named(line, why):
    with pytest.raises(ValueError, match=f"j:1: not a line of a journal .*{why}"):
        read([line])


def test_reference_to_an_unknown_line_is_named():
    journal = Journal("a")
    journal.ended(record(), "a", blocks(1, 2))
    journal.ended(record(), "a", blocks(1, 2, 3))
    del journal.lines[1]
    with pytest.raises(ValueError, match=r"j:2: .*blocks that no line before it has"):
        read(journal.lines)


def test_last_line_alone_may_be_cut():
    journal = Journal("a")
    journal.ended(record(), "a", blocks(1))
    lines = [json.dumps(line) for line in journal.lines]
    assert len(read_journal([*lines, lines[1][:9]], "j")[0].requests) == 1
    with pytest.raises(ValueError, match="j:2: not JSON; remove the line"):
        read_journal([lines[0], lines[1][:9], lines[1]], "j")
