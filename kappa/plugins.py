"""What is added by name from outside of a package: entry points, and versions, of distributions.

`kappa.commands` adds commands to `kappa`, `kappa.routing_policies` and `kappa.scheduling_rules`
what their names say, `kappa.doctor` examinations to `kappa doctor`. Our own `benchmarks` comes in
this way (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec

COMMANDS = "kappa.commands"
EXAMINATIONS = "kappa.doctor"
ROUTING_POLICIES = "kappa.routing_policies"
SCHEDULING_RULES = "kappa.scheduling_rules"


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group, by name in order of the alphabet; nothing is imported yet."""
    return {entry.name: entry for entry in sorted(entry_points(group=group))}


def version_of(distribution: str) -> str:
    """Which version of a distribution is installed; empty: none."""
    with suppress(PackageNotFoundError):
        return version(distribution)
    return ""


# Modules that extras bring, by the extra that a user would ask for (pyproject.toml).
_EXTRAS = {
    "serve": (
        "fastapi", "gguf", "opentelemetry", "packaging", "psutil", "pynvml", "ray", "safetensors",
        "transformers",
    ),
    "gpu": ("lmcache", "torch", "vllm"),
    "bench": ("grafana_foundation_sdk", "jinja2", "matplotlib", "polars", "xxhash"),
    "dev": ("jsonschema", "kubernetes_validate", "promql_parser"),
}  # fmt: skip


def remedy_for(module: str) -> str:
    """How to install what `import module` lacks; empty if no extra of ours brings it."""
    package = module.partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if package in modules:
            return f"needs {package}: pip install 'kappa-serve[{extra}]'"
    return ""


def lacking(extras: Iterable[str]) -> str:
    """How to install the first module of these extras that is not here; empty if all are."""
    for module in (module for extra in extras for module in _EXTRAS[extra]):
        try:
            is_here = find_spec(module) is not None
        except ValueError:  # it is known not to be importable
            is_here = False
        if not is_here:
            return remedy_for(module)
    return ""
