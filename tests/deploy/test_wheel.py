"""The wheel in an empty environment: the base's packages, and no torch, vLLM or Ray in sight.

Nothing is fetched: what the base needs is linked from the environment that runs the tests.
"""

import json
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "torch", "vllm", "transformers", "polars", "matplotlib")


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def base_distributions(requirements):
    """What these requirements bring, extras aside, as installed here."""
    found, pending = {}, list(requirements)
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = metadata.distribution(requirement.name)
            pending += found[requirement.name].requires or ()
    return found.values()


def link(distributions, folder):
    """The top-level files and folders of these distributions, as links."""
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            target = folder / top
            if not target.exists():
                target.symlink_to(Path(distribution.locate_file(top)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    run(*build, cwd=ROOT)
    (made,) = folder.glob("kappa_serve-*.whl")
    return made


@pytest.fixture(scope="module")
def kappa(wheel, tmp_path_factory):
    """Runs `kappa ARGUMENTS` of an environment in which only the wheel and its base are."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    uv = Path(sys.executable).with_name("uv")
    run(
        uv, "pip", "install", "--offline", "--no-deps", "--python", folder / "bin/python", wheel
    )  # fmt: skip
    (site,) = folder.glob("lib/python*/site-packages")
    (info,) = site.glob("kappa_serve-*.dist-info")
    requirements = metadata.PathDistribution(info).requires
    link(base_distributions(requirements), site)
    found = f"import importlib.util as u; print([m for m in {ABSENT} if u.find_spec(m)])"
    assert run(folder / "bin/python", "-c", found) == "[]\n"

    def kappa_of(*arguments, check=True):
        command = [str(folder / "bin/kappa"), *arguments]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "200"}
        return subprocess.run(
            command, capture_output=True, text=True, check=check, cwd=folder, env=environment
        )

    return kappa_of


def test_the_wheel_holds_every_file_of_our_packages_and_the_licence(wheel):
    shipped = set(zipfile.ZipFile(wheel).namelist())
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    ours = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - shipped == set()
    assert {
        "dashboards/kappa_dashboards/kappa-routing.json",
        "workload/kappa_workload/data/README.md",
    } <= shipped
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in shipped - ours}


def test_help_lists_every_command_and_those_without_their_packages_name_the_extra(kappa):
    listed = kappa("--help").stdout
    for command in ("serve", "demo", "simulate", "explain", "replay", "bench", "keys"):
        assert command in listed
    assert "Not installed: needs" in listed and "pip install 'kappa-serve[serve]'" in listed
    refused = kappa("serve", "--port", "0", check=False)
    assert refused.returncode == 1
    assert refused.stderr == "kappa serve: needs ray: pip install 'kappa-serve[serve]'\n"


def test_the_base_explains_and_shows_the_emulated_demo_without_an_engine(kappa):
    explained = json.loads(
        kappa(
            "explain", "--model", "llama-3.1-8b", "--cached", "1000", "--new", "10", "--json"
        ).stdout
    )  # fmt: skip
    assert {"plans", "decoding"} <= explained["nodes"][0].keys()
    shown = json.loads(kappa("demo", "--emulated", "--json").stdout)
    assert shown["emulated"] is True
    assert {row["node"] for row in shown["requests"]} == {"gh200", "h100"}
    p99_s = {policy: found["ttft_s"]["p99"] for policy, found in shown["policies"].items()}
    assert p99_s["priced"] < min(p99_s["round_robin"], p99_s["ray_prefix"])
