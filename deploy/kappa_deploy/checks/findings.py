"""The result of a check, one record for a start that is refused and for a cluster that is examined.

Rows (`kappa_deploy.checks.table`) make findings; commands print them, count them and take their
exit code from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["pass", "skip", "warn", "fail"]
SEVERITIES: tuple[Severity, ...] = ("pass", "warn", "fail", "skip")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    # skip: the check lacked a fact that it needs, which `what` names.
    severity: Severity
    # The figure, or a whole sentence with figures and remedy.
    what: str
    remedy: str = ""
    # A pool, a Kubernetes object or the check's own name; empty: all settings together.
    where: str = ""


def faults(found: Iterable[Finding]) -> list[str]:
    """The sentences of findings that refuse a start."""
    return [finding.what for finding in found if finding.severity == "fail"]


def of_place(found: Iterable[Finding], where: str) -> list[str]:
    """The faults of one pool; of the settings together where `where` is empty."""
    return faults(finding for finding in found if finding.where == where)
