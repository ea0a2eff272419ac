"""Our import packages, each in the folder of its distribution."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    init.parent.name: init.parent
    for init in sorted(ROOT.glob("*/*/__init__.py"))
    if (init.parents[1] / "pyproject.toml").is_file()
}


def modules(package: str) -> list[Path]:
    """A package's modules, without the ``__init__`` files."""
    found = PACKAGES[package].rglob("*.py")
    return sorted(path for path in found if path.name != "__init__.py")


def dotted(path: Path) -> str:
    """The name that a module of ours is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def path_of(module: str) -> Path:
    """Where a module of ours would stand, whether or not it does."""
    package, *rest = module.split(".")
    return PACKAGES.get(package, ROOT / package).joinpath(*rest).with_suffix(".py")
