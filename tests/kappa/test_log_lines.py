"""Log lines: one JSON object each, whatever is in them, and no stream that fails stops the rest."""

import io
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.log_lines import Tee, as_json, destination, stamped


def line_of(method="info", **fields):
    return as_json(None, method, stamped(None, method, fields))


def test_a_line_begins_with_time_level_event_and_request():
    text = line_of(node="pcie", tenant="a", request_id="r", event="request_done")
    assert list(json.loads(text)) == ["time", "level", "event", "request_id", "tenant", "node"]
    told = datetime.strptime(json.loads(text)["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - told).total_seconds()) < 60


@pytest.mark.parametrize(
    ("method", "level"),
    [("info", "info"), ("warning", "warning"), ("exception", "error"), ("critical", "error")],
)
def test_levels(method, level):
    assert json.loads(line_of(method, event="e"))["level"] == level


@given(
    st.dictionaries(
        st.text(),
        st.one_of(
            st.text(), st.binary(), st.floats(), st.integers(), st.none(),
            st.builds(object), st.lists(st.text()), st.sets(st.integers()),
        ),
    )
)  # fmt: skip
def test_a_line_is_one_line_whatever_it_holds(fields):
    text = line_of(**{"event": "e", **{f"x{k}": v for k, v in fields.items()}})
    assert "\n" not in text and "\r" not in text
    assert json.loads(text)["event"] == "e"


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails_is_left_out_and_the_others_go_on():
    good = io.StringIO()
    tee = Tee(FullDisk(), good)
    tee.write("one\n")
    tee.write("two\n")
    tee.flush()
    assert good.getvalue() == "one\ntwo\n"


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"observing\.log_file .*nowhere.*: cannot be written"):
        destination(str(tmp_path / "nowhere" / "log.jsonl"))


def test_two_writers_append_to_one_file(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    for name in ("a", "b"):
        destination(str(path)).write(f"{name}\n")
    assert path.read_text() == capsys.readouterr().out == "a\nb\n"
