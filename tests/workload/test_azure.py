"""Azure traces: independent requests."""

import pytest

from kappa_workload.azure import read_azure
from tests.workload.checks import check_refused

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\r\n"


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, newline="")
    return path


def test_every_row_is_a_session_that_shares_nothing(tmp_path):
    path = written(tmp_path, HEADER + ROW + ROW + "2023-11-16 18:15:47,5000,500\r\n")
    workload = read_azure(path)

    turns = [turn for session in workload.sessions for turn in session.turns]
    sizes = [(turn.input_tokens, turn.output_tokens) for turn in turns]
    assert sizes == [(374, 44), (374, 44), (5000, 500)]
    assert [len(turn.blocks) for turn in turns] == [0, 0, 9]
    kept = [block for turn in turns for block in turn.kept_blocks.tolist()]
    assert len(kept) == len(set(kept)) == 0 + 0 + 10
    assert len({session.id for session in workload.sessions}) == 3
    assert workload.block_tokens == 512


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,374", "Expected `array` of length 3, got 2"),
        ("2023-11-16 18:15:46,374,44,1", "Expected `array` of length 3, got 4"),
        ("yesterday,374,44", "Invalid isoformat string: 'yesterday'"),
        ("2023-11-16 18:15:46,many,44", "Expected `int`, got `str` - at `$[1]`"),
        ("2023-11-16 18:15:46,0,44", "Expected `int` >= 1 - at `$[1]`"),
        ("2023-11-16 18:15:46,374,-1", "Expected `int` >= 0 - at `$[2]`"),
        ("2023-11-16 18:15:46,374,9999999999", "Expected `int` <= 16777216 - at `$[2]`"),
        ('"' + "x" * 200_000, "not CSV"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, reason):
    path = written(tmp_path, HEADER + ROW + row + "\r\n")
    check_refused(read_azure, path, ":3: ", reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (HEADER, "holds no requests"),
        ("TIMESTAMP,ContextTokens\n", ":1: missing columns ['GeneratedTokens'], unknown col"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,Extra\n", "unknown columns ['Extra']"),
        ("ContextTokens,TIMESTAMP,GeneratedTokens\n", "in this order"),
    ],
)
def test_other_tables_are_refused(tmp_path, text, reason):
    path = written(tmp_path, text)
    check_refused(read_azure, path, ":", reason)


def test_rows_arrive_when_they_say_whatever_their_zone(tmp_path):
    rows = [
        "2023-11-16 18:15:46.5,374,44\r\n",
        "2023-11-16 18:15:49,374,44\r\n",
        "2023-11-16 19:15:48+01:00,374,44\r\n",
    ]
    workload = read_azure(written(tmp_path, HEADER + "".join(rows)))
    assert [session.arrival_s for session in workload.sessions] == [0.0, 2.5, 1.5]
