"""The journal of a rollout: what is written is read back, whatever was lost or damaged."""

import json
import math

import numpy as np
import pytest

from router.config import RouterConfig
from router.journal import JournalWriter, read_journal
from router.live.record_file import ThreadedFile
from router.policy import Priced
from router.router import Router
from tests.router.building import announcement


def writer(mode="shadow"):
    return JournalWriter(mode, "round-robin", "priced")


def router(*names):
    made = Router(RouterConfig(Priced(), secret=1))
    for name in names:
        made.join(announcement(name), 0.0)
    return made


def record(**changes):
    return {
        "time_s": 5.0, "worker": "a", "steered": "present", "end": "done", "end_s": 9.0,
        "prompt_tokens": 64, "output_tokens": 7, "predicted": {"ttft_s": 0.5},
        "actual": {"ttft_s": 0.75}, **changes,
    }  # fmt: skip


def blocks(*names):
    return np.array(names, dtype=np.uint64)


def read(entries):
    as_written = [json.loads(json.dumps(entry)) for entry in entries]
    return read_journal((f"j:{n}", entry) for n, entry in enumerate(as_written, 1))


def test_what_is_written_is_read_back():
    journal = writer()
    entries = [journal.workers(router("a", "b"), 1.0)]
    entries.append(journal.request(record(), "talk", blocks(1, 2)))
    entries.append(journal.request(record(time_s=6.0), "talk", blocks(1, 2, 2**64 - 1)))
    entries.append(journal.request(record(time_s=7.0), "other", blocks(1, 3)))
    (segment,) = read(entries)
    assert (segment.mode, segment.present, segment.policy) == ("shadow", "round-robin", "priced")
    assert segment.workers["b"].announcement == announcement("b")
    assert segment.workers["a"].speed == router("a").workers["a"].calibration.speed
    found = [r.blocks.tolist() for r in segment.requests]
    assert found == [[1, 2], [1, 2, 2**64 - 1], [1, 3]]
    first = segment.requests[0]
    assert (first.arrival_s, first.ttft_s, first.end_s, first.worker) == (5.0, 0.75, 9.0, "a")
    assert (first.prompt_tokens, first.output_tokens, first.predicted_s) == (64, 7, 0.5)
    names = [r.conversation for r in segment.requests]
    assert names[0] == names[1] != names[2]


def test_a_line_holds_only_the_blocks_that_no_line_before_had():
    journal = writer()
    long = np.arange(1, 501, dtype=np.uint64)
    first = journal.request(record(), "a", long)
    second = journal.request(record(), "a", np.append(long, np.uint64(501)))
    assert len(second["blocks"]) < 20 < 5000 < len(first["blocks"])


def test_no_conversation_is_named():
    line = json.dumps(writer().request(record(), "alice's talk", blocks(1)))
    assert "alice" not in line


def test_lines_after_a_lost_one_do_not_refer_to_it():
    journal = writer()
    entries = [journal.workers(router("a"), 1.0)]
    journal.request(record(), "a", blocks(1, 2))  # lost
    journal.forget()
    entries.append(journal.request(record(), "a", blocks(1, 2, 3)))
    assert read(entries)[0].requests[0].blocks.tolist() == [1, 2, 3]


def test_each_process_begins_a_segment_and_its_workers_may_be_described_again():
    one, two = writer(), writer("canary:5")
    entries = [one.workers(router("a"), 1.0), one.request(record(), "t", blocks(1))]
    entries += [one.workers(router("a", "b"), 2.0)]
    entries += [two.workers(router("a"), 3.0), two.request(record(), "t", blocks(1, 2))]
    first, second = read(entries)
    assert sorted(first.workers) == ["a", "b"] and len(first.requests) == 1
    assert second.mode == "canary:5" and second.requests[0].blocks.tolist() == [1, 2]


def test_an_answer_that_was_not_streamed_has_no_ttft():
    journal = writer()
    line = journal.request(record(actual={"ttft_s": None}), "t", blocks())
    (segment,) = read([journal.workers(router("a"), 1.0), line])
    assert math.isnan(segment.requests[0].ttft_s) and not segment.failed


def test_requests_without_an_answer_are_counted_and_left_out():
    journal = writer()
    line = journal.request(record(end="error"), "t", blocks())
    entries = [journal.workers(router("a"), 1.0), line]
    (segment,) = read(entries)
    assert (list(segment.requests), segment.failed) == ([], 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({}, "no key 'line'"),
        ({"line": "request"}, "a request before any line of the workers"),
        ({"line": "workers", "version": 99, "mode": "on", "present": "", "policy": ""}, "version"),
    ],
)
def test_a_line_that_is_none_is_named(line, why):
    with pytest.raises(ValueError, match=f"j:1: not a line of a journal .*{why}"):
        read([line])


def test_a_reference_to_an_unknown_line_is_named():
    journal = writer()
    entries = [journal.workers(router("a"), 1.0)]
    journal.request(record(), "a", blocks(1))
    entries.append(journal.request(record(), "a", blocks(1, 2)))
    with pytest.raises(ValueError, match="j:2"):
        read(entries)


def test_a_thread_writes_and_closing_waits_for_it(tmp_path):
    path, dropped = tmp_path / "j", []
    file = ThreadedFile(str(path), lambda: dropped.append(1))
    assert all(file({"n": n}) for n in range(100))
    file.close()
    lines = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert lines == list(range(100)) and not dropped


def test_a_threaded_file_is_bounded(tmp_path):
    path, dropped = tmp_path / "j", []
    file = ThreadedFile(str(path), lambda: dropped.append(1), max_bytes=30)
    for n in range(10):
        file({"n": n})
    file.close()
    assert path.stat().st_size <= 30 and len(dropped) == 10 - len(path.read_text().splitlines())
