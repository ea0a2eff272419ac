"""Real processes: found, killed, and missed when they outlive their cluster; clocks and disks
inside them, by the module that the harness puts on their path."""

import json
import os
import subprocess
import sys
import time

import pytest

from kappa_benchmarks.faults.cluster import (
    INJECT,
    Family,
    alive,
    environment,
    first_line,
    kill,
)

_PATIENCE_S = 10.0


def until(question):
    deadline_s = time.monotonic() + _PATIENCE_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def parent():
    """A process with a child of its own, which it names and does not wait for."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process, child
    kill([child])
    process.kill()
    process.wait()


def test_a_child_that_outlives_its_parent_is_a_survivor(parent):
    process, child = parent
    family = Family(os.getpid())
    assert {process.pid, child} <= set(family.members())
    assert family.below(process.pid) == [child]
    assert family.strays() == []
    kill([process.pid])
    process.wait()
    assert [line.split()[0] for line in family.strays()] == [str(child)]
    kill([child])
    until(lambda: not alive(child))
    kill([child])  # gone: nothing to do
    assert family.strays() == []


@pytest.mark.parametrize(
    ("written", "lasts_s", "line"),
    [("said\n{1}\n{2}\n", 60, "{1}\n"), ("said\n{1}\n", 0, "{1}\n"), ("said\n", 0, "")],
)
def test_first_line_is_found_in_what_was_written_at_once(written, lasts_s, line):
    code = f"import os, time; os.write(1, {written.encode()!r}); time.sleep({lasts_s})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        if not lasts_s:
            one.wait(20.0)
        assert first_line(one, "{", 20.0) == line
        one.kill()


def run_in(folder, code, faults):
    (folder / "processes.json").write_text(json.dumps(faults))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment(folder)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_a_clock_jumps_for_one_process_alone(tmp_path):
    code = (
        "import os, time, json\n"
        f"path = {str(tmp_path / 'processes.json')!r}\n"
        "before = time.time()\n"
        "open(path, 'w').write(json.dumps({'clock': {str(os.getpid()): 3600.0}}))\n"
        "time.sleep(0.3)\nprint(int(time.time() - before))\n"
        "open(path, 'w').write(json.dumps({'clock': {'1': 3600.0}}))\n"
        "time.sleep(0.3)\nprint(int(time.time() - before))\n"
    )
    ahead, back = map(int, run_in(tmp_path, code, {}))
    assert 3600 <= ahead <= 3610 and 0 <= back <= 10


def test_full_disk_refuses_files_and_folders_below_it_alone(tmp_path):
    code = (
        "import errno, os, pathlib\n"
        f"base = pathlib.Path({str(tmp_path)!r})\n"
        "for act in (lambda: (base / 'full' / 'a').write_text('x'),\n"
        "            lambda: (base / 'full' / 'b').mkdir(),\n"
        "            lambda: (base / 'other').write_text('x'),\n"
        "            lambda: (base / 'full' / 'there').read_text()):\n"
        "    try:\n        act()\n        print('fine')\n"
        "    except OSError as error:\n        print(errno.errorcode[error.errno])\n"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "there").write_text("x")
    outcomes = run_in(tmp_path, code, {"full": [str(tmp_path / "full")]})
    assert outcomes == ["ENOSPC", "ENOSPC", "fine", "fine"]


def test_without_a_file_named_nothing_is_changed(tmp_path):
    code = "import time; print(time.time.__name__)"
    env = {k: v for k, v in os.environ.items() if k != "KAPPA_PROCESS_FAULTS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONPATH": str(INJECT)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "time"
