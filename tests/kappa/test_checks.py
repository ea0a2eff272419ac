"""A file of one JSON object, and the error for one that is not."""

import pytest

from kappa.checks import read_json_object


def test_an_object_is_read(tmp_path):
    path = tmp_path / "it.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json_object(path, "thing") == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not JSON"), ("[1]", "holds list; a thing is a JSON object"), ("", "not JSON")],
)
def test_what_is_no_object_is_named(tmp_path, text, why):
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"it.json.*{why}"):
        read_json_object(path, "thing")


def test_an_absent_file_is_named_with_what_it_should_be(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: cannot read the thing: No such file"):
        read_json_object(tmp_path / "none.json", "thing")
