"""The ingress' log in a process of its own: JSON with the request's id; and thinned warnings."""

import json
import logging
import subprocess
import sys

import pytest

from router.observing.logs import Sparse

PROGRAM = """
import structlog
from {package} import configure
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


def said(tmp_path, form, package="router.observing.logs", level="INFO"):
    file = tmp_path / "log.jsonl"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(package=package, form=form, file=str(file), level=level))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert file.read_text() == done.stdout
    assert "my secret prompt" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("package", ["router.observing.logs", "workers.logs"])
def test_json_lines_carry_the_request_that_they_belong_to(tmp_path, package):
    lines = [json.loads(line) for line in said(tmp_path, "json", package).splitlines()]
    assert [line["event"] for line in lines] == ["inside", "crashed", "outside"]
    assert [line.get("request_id") for line in lines] == ["r-1", "r-1", None]
    assert lines[0]["node"] == "pcie" and lines[0]["level"] == "info"
    assert lines[1]["level"] == "error" and "ZeroDivisionError" in lines[1]["exception"]


def test_debug_shows_more(tmp_path):
    assert '"quiet"' in said(tmp_path, "json", level="DEBUG")


def test_the_console_is_for_people(tmp_path):
    text = said(tmp_path, "console")
    assert "inside" in text and "r-1" in text and "ZeroDivisionError" in text
    with pytest.raises(ValueError):
        json.loads(text.splitlines()[0])


def test_a_complaint_passes_once_a_minute_and_tells_how_many_were_held_back():
    now = [0.0]
    sparse = Sparse(60.0, lambda: now[0])
    passed = []

    def complain():
        record = logging.LogRecord("x", logging.WARNING, "f", 1, "no %s", ("collector",), None)
        if sparse.filter(record):
            passed.append(record.getMessage())

    for at_s in (0, 1, 30, 59, 61, 62):
        now[0] = float(at_s)
        complain()
    assert passed == ["no collector", "no collector (3 lines like this held back)"]
