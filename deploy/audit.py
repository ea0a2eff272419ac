"""The dependency audit of `./dev check`: known vulnerabilities in the lock.

`python -m deploy.audit [LOCK]`. The lock is held against the floors of `locks/audit.yaml`, always,
and by pip-audit (in an environment of its own, made by uv) against its advisory service. Where that
cannot be reached, the audit says so and passes by the floors alone: no check may fail for want of a
network. What is accepted stands in the same file with its reason and its last day; an entry past
that day, or of no use any more, fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
RULES = ROOT / "locks" / "audit.yaml"
PIP_AUDIT = "pip-audit==2.10.1"

_TIMEOUT_S = 240.0
# Local builds are in no service; with fewer of the packages known, it was no audit.
_LEAST_KNOWN = 0.8
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


class AuditError(RuntimeError):
    """The audit could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An advisory against a package of the lock; fixed: versions without it."""

    package: str
    version: str
    advisories: frozenset[str]
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(sorted(self.advisories))
        remedy = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no fixed version yet"
        return f"{self.package} {self.version}: {names} ({remedy})"


class Floor(BaseModel, extra="forbid"):
    """The lowest version of a package without the advisory."""

    version: str
    advisory: str


class Accepted(BaseModel, extra="forbid"):
    """An advisory that stands in the lock on purpose, until its last day."""

    advisory: str
    reason: str
    until: datetime.date


class Rules(BaseModel, extra="forbid"):
    """The file of local rules; floors by package."""

    floors: dict[str, Floor]
    accepted: list[Accepted]


def read_rules(path: Path) -> Rules:
    """The local rules.

    Raises:
        ValueError: the file is no such file; the message names the entry.
    """
    return Rules.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def pins(lock: str) -> dict[str, str]:
    """Package -> version of each line of a lock that pins one; names as PyPI normalises them."""
    return {canonicalize_name(found[1]): found[2] for found in _PIN.finditer(lock)}


def below_floors(pinned: Mapping[str, str], rules: Rules) -> list[Finding]:
    """Packages of the lock under the lowest version that the rules allow."""
    return [
        Finding(package, pinned[package], frozenset({floor.advisory}), (floor.version,))
        for package, floor in rules.floors.items()
        if package in pinned and Version(pinned[package]) < Version(floor.version)
    ]


def findings(report: Any) -> list[Finding]:
    """What pip-audit's JSON report holds.

    Raises:
        AuditError: it is not such a report, or its service knew too few of the packages.
    """
    found = []
    try:
        packages = report["dependencies"]
        known = [package for package in packages if "skip_reason" not in package]
        if len(known) < _LEAST_KNOWN * len(packages) or not known:
            raise AuditError(
                f"its advisory service knew {len(known)} of {len(packages)} packages: it cannot "
                "be reached from here, or is a mirror without advisories"
            )
        for package in known:
            for advisory in package["vulns"]:
                names = frozenset({advisory["id"], *advisory.get("aliases", ())})
                fixed = tuple(advisory.get("fix_versions", ()))
                found.append(Finding(package["name"], package["version"], names, fixed))
    except (KeyError, TypeError) as error:
        raise AuditError(f"pip-audit's report has another shape than expected: {error!r}") from None
    return found


def faults(found: list[Finding], rules: Rules, today: datetime.date) -> list[str]:
    """What is wrong: findings that nobody accepted, or that are accepted no longer."""
    wrong, last_days = [], {entry.advisory: entry.until for entry in rules.accepted}
    for finding in found:
        until = [last_days[name] for name in finding.advisories & last_days.keys()]
        if not until:
            wrong.append(str(finding))
        elif max(until) < today:
            wrong.append(f"{finding}; accepted until {max(until)}, which is past")
    return wrong


def unused(found: list[Finding], rules: Rules) -> list[str]:
    """Accepted advisories that are in no package of the lock."""
    accepted = {entry.advisory for entry in rules.accepted}
    names = accepted.difference(*(finding.advisories for finding in found))
    why = "is in no package of the lock any more: drop the entry"
    return [f"{RULES.name}: {name} {why}" for name in sorted(names)]


def report_of(lock: Path) -> Any:
    """pip-audit's report on a lock file, whose pins it takes as they are.

    Raises:
        AuditError: it could not be run, or reached no advisory service.
    """
    runner = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if runner is None:
        raise AuditError("there is no uv here to run pip-audit with")
    command = [
        runner, "tool", "run", "--quiet", PIP_AUDIT, "--requirement", str(lock), "--no-deps",
        "--disable-pip", "--progress-spinner", "off", "--format", "json", "--timeout", "15",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise AuditError(f"pip-audit took over {_TIMEOUT_S:g} s") from None
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AuditError(f"pip-audit gave no report: {last[:300]}") from None


def main(arguments: list[str] | None = None) -> int:
    """Audit a lock; 1 if something in it is known to be vulnerable and not accepted."""
    parser = argparse.ArgumentParser(prog="python -m deploy.audit", description=__doc__)
    parser.add_argument("lock", nargs="?", type=Path, default=ROOT / "requirements.lock")
    lock = parser.parse_args(arguments).lock
    try:
        rules, pinned = read_rules(RULES), pins(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    found, wrong = below_floors(pinned, rules), []
    try:
        found += findings(report_of(lock))
        wrong = unused(found, rules)
        by = "pip-audit and the floors"
    except AuditError as error:
        print(f"audit: pip-audit NOT done: {error}", file=sys.stderr)
        by = f"the {len(rules.floors)} floors of {RULES.name} alone"
    wrong += faults(found, rules, datetime.datetime.now(datetime.UTC).date())
    summary = f"{len(pinned)} packages of {lock.name} by {by}: {len(wrong)} fault(s)"
    for line in (*wrong, summary):
        print(f"audit: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
