"""Mooncake traces: sharing as recorded, sessions as inferred."""

import gzip
import json

import pytest

from kappa_workload.mooncake import read_mooncake
from kappa_workload.reading import WorkloadError
from tests.workload.checks import check_refused


def line(timestamp=0, input_length=1024, output_length=100, hash_ids=(0, 1), **more):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    values = (timestamp, input_length, output_length, list(hash_ids))
    record = dict(zip(names, values, strict=True)) | more
    return json.dumps({name: value for name, value in record.items() if value != "absent"}) + "\n"


def read(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return read_mooncake(path)


def chains(workload):
    """Lengths of the prompts of each session."""
    return [[turn.input_tokens for turn in session.turns] for session in workload.sessions]


def test_a_request_that_extends_an_earlier_one_is_its_next_turn(tmp_path):
    workload = read(
        tmp_path,
        line(0, 1030, 600, [0, 1, 2]),
        line(500, 700, 10, [8, 9]),
        line(2500, 1700, 10, [0, 1, 3, 4]),
    )

    assert chains(workload) == [[1030, 1700], [700]]
    first, second = workload.sessions[0].turns
    assert (first.after_s, second.after_s) == (0.0, 2.5)
    assert workload.block_tokens == 512
    assert second.blocks[:2].tolist() == first.blocks.tolist()
    # 1,630 tokens are kept: three blocks, the third of which the next turn names.
    assert first.kept_blocks.tolist() == second.blocks[:3].tolist()


def test_an_output_that_nobody_continues_has_blocks_of_its_own(tmp_path):
    workload = read(tmp_path, line(0, 600, 1000, [0, 1]), line(0, 600, 1000, [0, 2]))

    one, other = (session.turns[0] for session in workload.sessions)
    assert one.blocks.tolist() == other.blocks.tolist() == one.kept_blocks[:1].tolist()
    assert len(one.kept_blocks) == 3
    assert not set(one.kept_blocks[1:].tolist()) & set(other.kept_blocks[1:].tolist())


def test_output_blocks_that_the_next_turn_dropped_are_unshared(tmp_path):
    workload = read(tmp_path, line(0, 600, 2000, [0, 1]), line(1, 1100, 5, [0, 2, 3]))

    first, second = workload.sessions[0].turns
    assert len(first.kept_blocks) == 5
    assert first.kept_blocks[:2].tolist() == second.blocks.tolist()
    assert len(set(first.kept_blocks.tolist())) == 5


@pytest.mark.parametrize(
    ("third", "lengths", "pauses_s"),
    [
        (line(3000, 1700, 1, [0, 2, 4, 5]), [600, 1100, 1700], [0.0, 1.0, 2.0]),
        (line(4000, 1200, 1, [0, 4, 5]), [600, 1100, 1200], [0.0, 1.0, 3.0]),  # another branch
    ],
)
def test_request_follows_the_latest_that_it_extends(tmp_path, third, lengths, pauses_s):
    workload = read(tmp_path, line(0, 600, 1, [0, 1]), line(1000, 1100, 1, [0, 2, 3]), third)

    assert chains(workload) == [lengths]
    assert [turn.after_s for turn in workload.sessions[0].turns] == pauses_s


def test_a_repeated_prompt_is_no_next_turn(tmp_path):
    workload = read(tmp_path, line(0, 600, 1, [0, 1]), line(9, 600, 1, [0, 1]))

    assert chains(workload) == [[600], [600]]


def test_a_common_opening_makes_no_session(tmp_path):
    requests = [line(number, 600, 1, [0, 1 + number]) for number in range(101)]
    workload = read(tmp_path, *requests)
    assert len(workload.sessions) == 101

    longer = [line(number, 600 + number, 1, [0, 1 + number]) for number in range(101)]
    assert len(read(tmp_path, *longer).sessions) == 101
    assert len(read(tmp_path, *longer[:100]).sessions) == 1


def test_a_trace_cut_short_is_refused_where_it_ends(tmp_path):
    text = "".join(line(number, 600, 1, [0, 1 + number]) for number in range(5000))
    cut = tmp_path / "trace.jsonl.gz"
    cut.write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(WorkloadError) as error:
        read_mooncake(cut)

    name, _, rest = str(error.value).partition("trace.jsonl.gz:")
    number, _, reason = rest.partition(": ")
    assert name == f"{tmp_path}/"
    assert 1000 < int(number) <= 5000
    assert "end-of-stream" in reason


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("7", "Expected `object`, got `int`"),
        (line(timestamp="absent"), "either every line has a timestamp, or none has"),
        (line(timestamp=-5), "Expected `float` >= 0.0 - at `$.timestamp`"),
        (line(timestamp=1), "timestamp 1.0 is before the line above's 2.0"),
        (line(5, input_length="many"), "Expected `int`, got `str` - at `$.input_length`"),
        (line(5, input_length=0, hash_ids=[]), "Expected `int` >= 1 - at `$.input_length`"),
        (line(5, output_length=-1), "Expected `int` >= 0 - at `$.output_length`"),
        (line(5, output_length=10**12), "Expected `int` <= 16777216 - at `$.output_length`"),
        (line(5, 1025), "field 'hash_ids' has 2 numbers, but 1025 tokens are 3 blocks of 512"),
        (line(5, hash_ids=[0]), "field 'hash_ids' has 1 numbers"),
        (line(5, hash_ids=[0, 1.5]), "Expected `int`, got `float` - at `$.hash_ids[1]`"),
        (line(5, hash_ids=[0, True]), "Expected `int`, got `bool` - at `$.hash_ids[1]`"),
        (line(5, hash_ids=[0, -1]), "Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (line(5, hash_ids=[0, 2**64]), "at `$.hash_ids[1]`"),
        (line(5, hash_ids=[2, 1]), "hash_ids are not prefix-chained: 1 follows 2 here and 0"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path, bad, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text(line(2) + bad)
    check_refused(read_mooncake, path, ":2: ", reason)
