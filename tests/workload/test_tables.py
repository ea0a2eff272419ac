"""Parquet tables with checked columns."""

import polars as pl
import pytest

from workload.errors import WorkloadError
from workload.tables import read_table

COLUMNS = {"name": str, "count": int, "share": float}
GOOD = {"name": ["a", "b"], "count": [1, 2], "share": [0.5, 1.0]}


def written(tmp_path, **columns):
    path = tmp_path / "table.parquet"
    pl.DataFrame({**GOOD, **columns}).write_parquet(path)
    return path


def refusal(path):
    with pytest.raises(WorkloadError) as error:
        read_table(path, COLUMNS)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value)


def test_columns_come_in_the_order_asked_for(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame(GOOD).select("share", "name", "count").write_parquet(path)

    assert read_table(path, COLUMNS).rows() == [("a", 1, 0.5), ("b", 2, 1.0)]


def test_integers_serve_as_numbers(tmp_path):
    assert read_table(written(tmp_path, share=[1, 2]), COLUMNS).height == 2


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"name": [1, 2]}, "column 'name' must hold text, found Int64"),
        ({"count": [1.0, 2.0]}, "column 'count' must hold integers, found Float64"),
        ({"share": ["x", "y"]}, "column 'share' must hold numbers, found String"),
        ({"count": [1, -2]}, "row 2: column 'count' must not be negative, found -2"),
        ({"count": [None, 1]}, "row 1: column 'count' holds nothing"),
        ({"name": ["a", None]}, "row 2: column 'name' holds nothing"),
        ({"share": [0.0, float("nan")]}, "row 2: column 'share' must be finite, found nan"),
        ({"share": [0.0, float("inf")]}, "row 2: column 'share' must be finite, found inf"),
        ({"more": [1, 2]}, "unknown columns ['more']"),
    ],
)
def test_a_wrong_table_is_refused_with_row_and_column(tmp_path, columns, reason):
    assert reason in refusal(written(tmp_path, **columns))


def test_missing_columns_are_named(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame({"name": ["a"]}).write_parquet(path)

    assert "missing columns ['count', 'share']" in refusal(path)


def test_a_table_of_no_rows_is_refused(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame(GOOD).clear().write_parquet(path)

    assert "holds no rows" in refusal(path)


def test_absent_empty_cut_and_foreign_files_are_refused(tmp_path):
    whole = written(tmp_path).read_bytes()
    for name, content in (("empty", b""), ("cut", whole[:-20]), ("text", b"a,b\n1,2\n" * 9)):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        assert "not a readable Parquet file" in refusal(path)
    assert "not a readable Parquet file" in refusal(tmp_path / "absent.parquet")
