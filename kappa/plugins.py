"""What is added by name from outside of a package: entry points, and versions, of distributions.

`kappa.commands` adds commands to `kappa`, `kappa.routing_policies` and `kappa.scheduling_rules`
what their names say, `kappa.doctor` examinations to `kappa doctor`. Our own `benchmarks` comes in
this way (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

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
