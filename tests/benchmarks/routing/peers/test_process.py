"""Scripts in another environment: bounded, answered in JSON, and gone with whoever asked."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.routing.peers import process
from benchmarks.routing.peers.process import ScriptError, bounded_run, peer_environment, run_script

PYTHON = Path(sys.executable)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script where scripts are looked for."""
    monkeypatch.setattr(process, "SCRIPTS", tmp_path)

    def write(text):
        (tmp_path / "s.py").write_text(text)
        return "s.py"

    return write


def gone(pid):
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_script_is_given_its_request_and_its_last_line_is_the_answer(script):
    name = script("import json, sys\nprint('noise')\nprint(json.dumps([json.load(sys.stdin)]))")
    assert run_script(PYTHON, name, {"a": 1}, 30.0) == [{"a": 1}]


def test_a_script_that_fails_is_quoted(script):
    name = script("import sys\nsys.exit('there is no index')")
    with pytest.raises(ScriptError, match=r"s\.py ended with code 1: there is no index"):
        run_script(PYTHON, name, {}, 30.0)


@pytest.mark.parametrize("text", ["", "print('hello')"])
def test_an_answer_that_is_not_json_is_refused(script, text):
    with pytest.raises(ScriptError, match="not JSON"):
        run_script(PYTHON, script(text), {}, 30.0)


def test_a_script_that_hangs_is_ended(script):
    with pytest.raises(ScriptError, match="did not end within"):
        run_script(PYTHON, script("import time\ntime.sleep(600)"), {}, 0.5)


def test_an_interpreter_that_is_not_there_is_an_error_of_the_script(script, tmp_path):
    with pytest.raises(ScriptError):
        run_script(tmp_path / "python", script(""), {}, 1.0)


def test_what_a_command_leaves_running_ends_with_it():
    leave = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid)"
    )
    done = bounded_run([sys.executable, "-c", leave], timeout_s=30.0)
    assert done.code == 0
    assert gone(int(done.stdout))


def test_our_packages_are_out_of_a_peers_reach(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PIP_INDEX_URL", "http://index")
    found = peer_environment({"MORE": "1"})
    assert "PYTHONPATH" not in found
    assert (found["PIP_INDEX_URL"], found["MORE"]) == ("http://index", "1")
    assert os.environ["PYTHONPATH"] == "/ours"
