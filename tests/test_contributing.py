"""CONTRIBUTING's examples, as they stand there: installed beside us, then simulated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(tmp_path):
    """A folder with an example's module and entry point, as an installed distribution has them."""

    def made(heading):
        section = TEXT.split(f"## {heading}")[1].split("\n## ")[0]
        module = re.search(r"`(my_\w+)\.py`", section)[1]
        (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        (entry,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
        group, name, target = re.search(r'"([\w.]+)"\]\n(\w+) = "(.+)"', entry).groups()
        assert len(code.splitlines()) <= 30
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
        (command,) = re.findall(r"```\nkappa (simulate .*)\n```", section)
        return command.split()

    return made


@pytest.mark.parametrize(
    ("heading", "key", "name"),
    [
        ("A policy in 30 lines", "policy", "cheapest_load"),
        ("A scheduling rule in 30 lines", "scheduler", "shortest"),
    ],
)
def test_example_runs_in_the_simulator_as_it_stands(installed, tmp_path, heading, key, name):
    command = installed(heading)
    program = "from kappa_deploy.cli import app; app()"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--requests", "200", "--json"],
        env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[key] == name and found["completed"] > 0
