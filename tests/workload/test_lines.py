"""Damaged files, and fields of JSON lines that no honest file holds."""

import gzip
import random

import pytest

from workload.azure import read_azure
from workload.errors import WorkloadError
from workload.lines import json_items, json_object, number_field, tokens_field
from workload.miniswe import read_miniswe_texts
from workload.mooncake import read_mooncake
from workload.narrativeqa import read_narrativeqa
from workload.sharegpt import read_sharegpt_texts


def test_a_line_nested_without_end_is_refused():
    with pytest.raises(ValueError, match="nested too deep"):
        json_object("[" * 200_000)


@pytest.mark.parametrize("text", ["1e999", "1" + "0" * 400, "true", '"5"', "null", "[1]"])
def test_only_finite_numbers_are_numbers(text):
    with pytest.raises(ValueError, match="must be a finite number"):
        number_field(json_object(f'{{"t": {text}}}'), "t")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1.0", "must be an integer, found 1.0"),
        ("true", "must be an integer, found True"),
        ("-1", "must be at least 0, found -1"),
        ("99999999999", "must be at most"),
    ],
)
def test_lengths_are_integers_of_a_possible_size(text, reason):
    with pytest.raises(ValueError, match=reason):
        tokens_field(json_object(f'{{"n": {text}}}'), "n")


def test_an_absent_field_is_named():
    with pytest.raises(ValueError, match="field 'n' must be an integer, found nothing"):
        tokens_field({}, "n")


READERS = {
    "mooncake.jsonl": read_mooncake,
    "azure.csv": read_azure,
    "qaps.jsonl": read_narrativeqa,
    "sessions.jsonl": lambda path: read_miniswe_texts(path, len),
    "sharegpt.json": lambda path: read_sharegpt_texts(path, len),
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
    return list(json_items(path))


def test_the_items_of_a_list_come_one_at_a_time(tmp_path):
    assert items(tmp_path, ' [1, {"a": [2]} ,\n"x"\n] ') == [1, {"a": [2]}, "x"]
    assert items(tmp_path, "[]") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1}', "list.json: expected a list, found dict"),
        ("[1,\n2", "list.json:2: not JSON"),
        ("[1,\n\n2 3]", "list.json:3: not JSON"),
        ("[1,]", "list.json:1: not JSON"),
        ("[1] x", "list.json:1: not JSON (Extra data"),
        ("", "list.json:1: not JSON"),
    ],
)
def test_what_is_no_list_is_named_with_its_line(tmp_path, text, reason):
    with pytest.raises(WorkloadError) as raised:
        items(tmp_path, text)
    assert reason in str(raised.value)
