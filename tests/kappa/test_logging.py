"""Log lines: one JSON object each, whatever is in them, and no stream that fails stops the rest."""

import io
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.logging import RateLimit, Tee, as_json, destination, stamped


def line_of(method="info", **fields):
    return as_json(None, method, stamped(None, method, fields))


def test_a_line_begins_with_time_level_event_and_request():
    text = line_of(node="pcie", tenant="a", request_id="r", event="request_done")
    assert list(json.loads(text)) == ["time", "level", "event", "request_id", "tenant", "node"]
    stamp = datetime.strptime(json.loads(text)["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - stamp).total_seconds()) < 60


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


PROGRAM = """
import structlog
from kappa.logging import configure
configure("{form}", {file!r}, "{level}")
log = structlog.get_logger("x")
log.debug("quiet")
with structlog.contextvars.bound_contextvars(request_id="r-1"):
    log.info("inside", node="pcie")
    prompt = " ".join(["my", "secret", "prompt"])
    try:
        len(prompt) / 0
    except ZeroDivisionError:
        log.exception("crashed")
log.warning("outside")
"""


def written(tmp_path, form, level="INFO"):
    file = tmp_path / "log.jsonl"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(form=form, file=str(file), level=level))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert file.read_text() == done.stdout
    assert "my secret prompt" not in done.stdout
    return done.stdout


def test_json_lines_carry_the_request_that_they_belong_to(tmp_path):
    lines = [json.loads(line) for line in written(tmp_path, "json").splitlines()]
    assert [line["event"] for line in lines] == ["inside", "crashed", "outside"]
    assert [line.get("request_id") for line in lines] == ["r-1", "r-1", None]
    assert lines[0]["node"] == "pcie" and lines[0]["level"] == "info"
    assert lines[1]["level"] == "error" and "ZeroDivisionError" in lines[1]["exception"]


def test_debug_shows_more(tmp_path):
    assert '"quiet"' in written(tmp_path, "json", level="DEBUG")


def test_the_console_is_for_people(tmp_path):
    text = written(tmp_path, "console")
    assert "inside" in text and "r-1" in text and "ZeroDivisionError" in text
    with pytest.raises(ValueError):
        json.loads(text.splitlines()[0])


def test_a_rate_limited_line_says_how_many_were_held_back():
    now = [0.0]
    limit = RateLimit(60.0, lambda: now[0])
    passed = []

    def complain():
        record = logging.LogRecord("x", logging.WARNING, "f", 1, "no %s", ("collector",), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for at_s in (0, 1, 30, 59, 61, 62):
        now[0] = float(at_s)
        complain()
    assert passed == ["no collector", "no collector (3 lines like this held back)"]
