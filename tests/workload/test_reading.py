"""Damaged files, fields that no honest file holds, and Parquet tables with checked rows."""

import gzip
import random
from typing import Any

import msgspec
import polars as pl
import pytest

from kappa_workload.azure import read_azure
from kappa_workload.miniswe import read_miniswe_texts
from kappa_workload.mooncake import read_mooncake
from kappa_workload.narrativeqa import read_narrativeqa
from kappa_workload.reading import (
    ReadAs,
    Seconds,
    SomeTokens,
    Tokens,
    WorkloadError,
    by_name,
    json_items,
    json_lines,
    table_records,
)
from kappa_workload.sharegpt import read_sharegpt_texts


class Sample(msgspec.Struct):
    n: Tokens = 0
    t: Seconds = 0.0


def sample(tmp_path, text):
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    return [record for _, record in json_lines(path, Sample)]


def test_a_line_nested_without_end_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="nested too deep"):
        sample(tmp_path, '{"x": ' + "[" * 200_000)


@pytest.mark.parametrize("text", ["1e999", "1" + "0" * 400, "true", '"5"', "null", "[1]", "-1"])
def test_only_finite_numbers_of_zero_or_more_are_seconds(tmp_path, text):
    with pytest.raises(WorkloadError, match=r"samples.jsonl:1: "):
        sample(tmp_path, f'{{"t": {text}}}')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1.5", "Expected `int`, got `float` - at `$.n`"),
        ("true", "Expected `int`, got `bool` - at `$.n`"),
        ("-1", "Expected `int` >= 0 - at `$.n`"),
        ("99999999999", "Expected `int` <= 16777216 - at `$.n`"),
        ("1" * 60, "at `$.n`"),
    ],
)
def test_lengths_are_integers_of_a_possible_size(tmp_path, text, reason):
    with pytest.raises(WorkloadError) as raised:
        sample(tmp_path, f'{{"n": 5}}\n\n{{"n": {text}}}')
    assert str(raised.value).startswith(f"{tmp_path / 'samples.jsonl'}:3: ")
    assert reason in str(raised.value)


READERS = {
    "mooncake.jsonl": read_mooncake,
    "azure.csv": read_azure,
    "qaps.jsonl": read_narrativeqa,
    "sessions.jsonl": lambda path: read_miniswe_texts(path, ReadAs(len)),
    "sharegpt.json": lambda path: read_sharegpt_texts(path, ReadAs(len)),
}


@pytest.mark.parametrize("name", READERS)
def test_every_text_reader_names_absent_empty_and_damaged_files(name, tmp_path):
    absent = tmp_path / name
    empty = tmp_path / f"empty-{name}"
    empty.touch()
    cut = tmp_path / f"cut-{name}.gz"
    cut.write_bytes(gzip.compress(random.Random(0).randbytes(500).hex().encode())[:-50])
    not_gzip = tmp_path / f"plain-{name}.gz"
    not_gzip.write_text("{}\n")
    binary = tmp_path / f"binary-{name}"
    binary.write_bytes(b"\xff\xfe\x00")
    folder = tmp_path / f"folder-{name}"
    folder.mkdir()

    for path in (absent, empty, cut, not_gzip, binary, folder):
        with pytest.raises(WorkloadError) as error:
            READERS[name](path)
        assert str(error.value).startswith(f"{path}:")


def items(tmp_path, text):
    path = tmp_path / "list.json"
    path.write_text(text)
    return [item for _, item in json_items(path, Any)]


def test_the_items_of_a_list_come_in_order(tmp_path):
    assert items(tmp_path, ' [1, {"a": [2]} ,\n"x"\n] ') == [1, {"a": [2]}, "x"]
    assert items(tmp_path, "[]") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1}', "list.json: expected a list: Expected `array`, got `object`"),
        ("[1,\n2", "list.json:2: not JSON"),
        ("[1,\n\n2 3]", "list.json:3: not JSON"),
        ("[1,]", "list.json:1: not JSON"),
        ("[1] x", "list.json:1: not JSON (JSON is malformed: trailing"),
        ("", "list.json:1: not JSON"),
    ],
)
def test_what_is_no_list_is_named_with_its_line(tmp_path, text, reason):
    with pytest.raises(WorkloadError) as raised:
        items(tmp_path, text)
    assert reason in str(raised.value)


class Row(msgspec.Struct):
    name: str
    count: SomeTokens
    share: Seconds


GOOD = {"name": ["a", "b"], "count": [1, 2], "share": [0.5, 1.0]}


def written(tmp_path, **columns):
    path = tmp_path / "table.parquet"
    pl.DataFrame({**GOOD, **columns}).write_parquet(path)
    return path


def rows(path):
    return [record for _, record in table_records(path, Row)]


def refused(path):
    with pytest.raises(WorkloadError) as error:
        rows(path)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value)


def test_columns_are_found_by_name_and_others_left_out(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame({**GOOD, "more": [7, 8]}).select("share", "more", "name", "count").write_parquet(
        path
    )
    assert rows(path) == [Row("a", 1, 0.5), Row("b", 2, 1.0)]


def test_integers_serve_as_numbers(tmp_path):
    assert [row.share for row in rows(written(tmp_path, share=[1, 2]))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"name": [1, 2]}, "row 1: Expected `str`, got `int` - at `$.name`"),
        ({"count": [1.0, 2.0]}, "row 1: Expected `int`, got `float` - at `$.count`"),
        ({"share": ["x", "y"]}, "row 1: Expected `float`, got `str` - at `$.share`"),
        ({"count": [1, 0]}, "row 2: Expected `int` >= 1 - at `$.count`"),
        ({"count": [1, 1 << 25]}, "row 2: Expected `int` <= 16777216 - at `$.count`"),
        ({"count": [None, 1]}, "row 1: Expected `int`, got `null` - at `$.count`"),
        ({"share": [0.0, float("nan")]}, "row 2: Expected `float` >= 0.0 - at `$.share`"),
        ({"share": [0.0, float("inf")]}, "row 2: Expected `float` <= 1e+300 - at `$.share`"),
    ],
)
def test_a_wrong_table_is_refused_with_row_and_column(tmp_path, columns, reason):
    assert reason in refused(written(tmp_path, **columns))


def test_missing_columns_are_named(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame({"name": ["a"]}).write_parquet(path)

    assert "missing columns ['count', 'share']" in refused(path)


def test_a_table_of_no_rows_is_refused(tmp_path):
    path = tmp_path / "table.parquet"
    pl.DataFrame(GOOD).clear().write_parquet(path)

    assert "holds no records" in refused(path)


def test_absent_empty_cut_and_foreign_files_are_refused(tmp_path):
    whole = written(tmp_path).read_bytes()
    for name, content in (("empty", b""), ("cut", whole[:-20]), ("text", b"a,b\n1,2\n" * 9)):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        assert "not a readable Parquet file" in refused(path)
    assert "not a readable Parquet file" in refused(tmp_path / "absent.parquet")


def test_a_repeated_name_is_told_with_its_row(tmp_path):
    records = table_records(written(tmp_path, name=["a", "a"]), Row)
    with pytest.raises(WorkloadError, match="row 2: a stands in an earlier row, too"):
        by_name(records, "name")
