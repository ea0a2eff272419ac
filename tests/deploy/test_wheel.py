"""Each distribution's wheel in an environment of its own, with what it asks for and nothing else.

Nothing is fetched: what others publish is linked from the environment that runs the tests.
"""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packages import PACKAGES, ROOT

HEAVY = ("ray", "torch", "vllm", "transformers", "polars", "matplotlib")
NAMES = {
    tomllib.loads((folder.parent / "pyproject.toml").read_text())["project"]["name"]: package
    for package, folder in PACKAGES.items()
}
# The least that shows that a distribution works with what it asks for, by a program of its own.
SMALLEST = {
    "kappa-bench": (
        "python",
        "-c",
        "from kappa_router.policy import policy_named; policy_named('round_robin')",
    ),
    "kappa-core": (
        "python",
        "-c",
        "from kappa.shapes import model_shape; model_shape('llama-3.1-8b')",
    ),
    "kappa-dashboards": (
        "python",
        "-c",
        "from kappa_dashboards.build import DASHBOARDS; assert DASHBOARDS",
    ),
    "kappa-engine": ("python", "-c", "import kappa_engine.llm_engine"),
    "kappa-loadtest": ("python", "-c", "import kappa_loadtest.run"),
    "kappa-router": ("kappa-router", "--help"),
    "kappa-scheduler": ("python", "-c", "import kappa_scheduler.fair"),
    "kappa-serve": ("kappa", "tables", "--json"),
    "kappa-simulator": ("python", "-c", "import kappa_simulator.run"),
    "kappa-workers": ("python", "-c", "import kappa_workers.host_memory"),
    "kappa-workload": ("python", "-c", "import kappa_workload.catalogue, kappa_workload.sessions"),
}


def run(*command, check=True, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of each of our distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    for package in PACKAGES.values():
        run(*build, cwd=package.parent)
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in folder.glob("*.whl")}


def needs(wheel):
    """What a wheel asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        found = metadata.PathDistribution(zipfile.Path(archive, str(Path(name).parent) + "/"))
        return list(map(Requirement, found.requires or ()))


def brought(wheels, *names):
    """(names of ours, distributions of others) that these requirements bring."""
    seen, pending = set(), [(r.name, e) for r in map(Requirement, names) for e in ("", *r.extras)]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        wheel = wheels.get(name)
        for one in needs(wheel) if wheel else map(Requirement, metadata.requires(name) or ()):
            if not one.marker or one.marker.evaluate({"extra": extra}):
                pending += [(one.name, e) for e in ("", *one.extras)]
    found = {name for name, _ in seen}
    return found & wheels.keys(), [metadata.distribution(name) for name in found - wheels.keys()]


def link(distributions, site):
    """The top-level files and folders of these distributions, as links."""
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            target = site / top
            if not target.exists():
                target.symlink_to(Path(distribution.locate_file(top)))


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """Makes an environment of distributions of ours and what they ask for; returns its Python."""

    def made(*names):
        folder = tmp_path_factory.mktemp("empty")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        ours, others = brought(wheels, *names)
        uv = Path(sys.executable).with_name("uv")
        run(
            uv, "pip", "install", "--offline", "--no-deps", "--python", folder / "bin/python",
            *(wheels[name] for name in ours),
        )  # fmt: skip
        link(others, site)
        return folder / "bin/python"

    return made


@pytest.fixture
def alone(tmp_path):
    """Where and with which variables a command of such an environment runs."""
    return {
        "cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "200"},
    }  # fmt: skip


def absent(python, modules, alone):
    found = f"import importlib.util as u; print(*[m for m in {modules} if u.find_spec(m)])"
    return run(python, "-c", found, **alone).stdout.split() == []


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_its_package_the_licence_and_nothing_else(wheels, name):
    package = PACKAGES[NAMES[name]]
    archive = zipfile.ZipFile(wheels[name])
    shipped = {Path(one) for one in archive.namelist()}
    ours = {
        path.relative_to(package.parent)
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    others = {one for one in shipped - ours if not one.parts[0].endswith(".dist-info")}
    assert ours <= shipped and others == set()
    for legal in ("LICENSE", "NOTICE"):
        (path,) = [path for path in shipped - ours if path.name == legal]
        assert archive.read(str(path)) == (ROOT / legal).read_bytes()
    assert Path(NAMES[name], "py.typed") in shipped


@pytest.mark.parametrize("name", NAMES)
def test_wheels_metadata_is_complete_and_pins_ours(wheels, name):
    with zipfile.ZipFile(wheels[name]) as archive:
        (path,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        found = message_from_bytes(archive.read(path))
    assert found["License-Expression"] == "Apache-2.0" and found["Summary"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith(f"# {name}\n")
    assert found["Requires-Python"] == "<3.14,>=3.11"
    assert "Typing :: Typed" in found.get_all("Classifier")
    assert "platform_release" not in str(found)
    # All are released together.
    versions = {wheel.name.split("-")[1] for wheel in wheels.values()}
    assert {found["Version"]} == versions
    ours = [one for one in needs(wheels[name]) if one.name in wheels]
    assert all(str(one.specifier) in ("", f"=={found['Version']}") for one in ours)


@pytest.mark.parametrize("name", ["kappa-core", "kappa-router"])
def test_wheel_made_elsewhere_from_the_sdist_is_byte_equal(wheels, name, tmp_path):
    build = (sys.executable, "-m", "hatchling", "build", "-d", tmp_path, "-t")
    run(*build, "sdist", cwd=PACKAGES[NAMES[name]].parent)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    run(*build, "wheel", cwd=folder)
    assert (tmp_path / wheels[name].name).read_bytes() == wheels[name].read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_distribution_works_with_what_it_asks_for(environment, alone, name):
    program, *arguments = SMALLEST[name]
    run(environment(name).with_name(program), *arguments, **alone)


def test_router_brings_neither_engine_nor_cluster_nor_simulator(environment, alone):
    python = environment("kappa-router")
    large = (*HEAVY, "numba", "llvmlite", "scipy")
    assert absent(python, (*large, "kappa_simulator", "kappa_deploy", "kappa_workers"), alone)


@pytest.fixture(scope="module")
def serve(environment):
    """kappa-serve and nothing more."""
    return environment("kappa-serve")


def test_help_names_the_extra_of_commands_that_lack_packages(serve, alone):
    kappa = serve.with_name("kappa")
    listed = run(kappa, "--help", **alone).stdout
    for command in ("serve", "demo", "simulate", "explain", "replay", "keys"):
        assert command in listed
    assert "Not installed: needs" in listed and "pip install 'kappa-serve[serve]'" in listed
    refused = run(kappa, "serve", "--port", "0", check=False, **alone)
    assert refused.returncode == 1
    assert refused.stderr.startswith("kappa serve: needs ")
    assert refused.stderr.endswith(": pip install 'kappa-serve[serve]'\n")


def test_emulated_demo_runs_without_an_engine(environment, alone):
    python = environment("kappa-serve[loadtest]")
    assert absent(python, ("ray", "torch", "vllm", "transformers"), alone)
    kappa = python.with_name("kappa")
    explained = json.loads(
        run(
            kappa, "explain", "--model", "llama-3.1-8b", "--cached", "1000", "--new", "10",
            "--json", **alone,
        ).stdout
    )  # fmt: skip
    assert {"plans", "decoding"} <= explained["nodes"][0].keys()
    shown = json.loads(run(kappa, "demo", "--emulated", "--json", **alone).stdout)
    assert shown["emulated"] is True
    assert {row["node"] for row in shown["requests"]} == {"gh200", "h100"}
    p99_s = {policy: found["ttft_s"]["p99"] for policy, found in shown["policies"].items()}
    assert p99_s["priced"] < min(p99_s["round_robin"], p99_s["ray_prefix"])
