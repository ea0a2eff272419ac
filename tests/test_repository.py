"""Rules about the repository itself: who imports what, what is shipped, which names are ours."""

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

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


def test_every_direct_requirement_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for lock, extra in (
        ("requirements.lock", "cpu"),
        ("requirements-gpu.lock", "gpu"),
        ("requirements-gpu-aarch64.lock", "gpu"),
    ):
        lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
        locked = {line.split("==")[0] for line in lines if "==" in line and line[0].isalpha()}
        for requirement in [*project["dependencies"], *extras[extra], *extras["dev"]]:
            name = requirement.split("[")[0].split("=")[0].split(">")[0].replace("_", "-")
            assert name in locked, f"{lock} lacks {name}: run ./dev lock"


@pytest.mark.parametrize("lock", [*ROOT.glob("*.lock"), *ROOT.glob("locks/*.lock")], ids=str)
def test_every_locked_file_has_its_hash(lock):
    entries = re.split(r"\n(?=[a-z])", lock.read_text(encoding="utf-8"))[1:]
    without = [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]
    assert entries and without == [], f"{lock.name}: run ./dev lock"


def test_what_installs_and_builds_the_rest_is_locked_in_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    group = project["dependency-groups"]["build"]
    lock = (ROOT / "locks/build.lock").read_text(encoding="utf-8")
    assert all(f"\n{requirement} " in lock for requirement in group)
    assert set(project["build-system"]["requires"]) <= set(group)
