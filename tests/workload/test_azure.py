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
        ("2023-11-16 18:15:46,374", "has 2 of 3 columns: if the file is cut short"),
        ("2023-11-16 18:15:46,374,44,1", "has 4 of 3 columns"),
        ("yesterday,374,44", "Invalid isoformat string: 'yesterday'"),
        ("2023-11-16 18:15:46,many,44", "Expected `int`, got `str` - at `$.ContextTokens`"),
        ("2023-11-16 18:15:46,0,44", "Expected `int` >= 1 - at `$.ContextTokens`"),
        ("2023-11-16 18:15:46,374,-1", "Expected `int` >= 0 - at `$.GeneratedTokens`"),
        ("2023-11-16 18:15:46,374,9999999999", "Expected `int` <= 16777216"),
        ('"' + "x" * 200_000, "not CSV"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, reason):
    path = written(tmp_path, HEADER + ROW + row + "\r\n")
    check_refused(read_azure, path, ":3: ", reason)


@pytest.mark.parametrize("text", ["", HEADER])
def test_a_trace_without_requests_is_refused(tmp_path, text):
    check_refused(read_azure, written(tmp_path, text), ":", "holds no records")


def test_a_trace_without_one_of_its_columns_is_refused(tmp_path):
    path = written(tmp_path, "TIMESTAMP,ContextTokens\n2023-11-16,7\n")
    check_refused(read_azure, path, ":2: ", "field `GeneratedTokens`")


def test_columns_are_found_by_name(tmp_path):
    text = "ContextTokens,Extra,TIMESTAMP,GeneratedTokens\n374,x,2023-11-16,44\n"
    (session,) = read_azure(written(tmp_path, text)).sessions
    assert (session.turns[0].input_tokens, session.turns[0].output_tokens) == (374, 44)


def test_rows_arrive_when_they_say_whatever_their_zone(tmp_path):
    rows = [
        "2023-11-16 18:15:46.5,374,44\r\n",
        "2023-11-16 18:15:49,374,44\r\n",
        "2023-11-16 19:15:48+01:00,374,44\r\n",
    ]
    workload = read_azure(written(tmp_path, HEADER + "".join(rows)))
    assert [session.arrival_s for session in workload.sessions] == [0.0, 2.5, 1.5]
