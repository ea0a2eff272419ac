"""The table of all checks: which command runs which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from kappa_deploy.checks import machine, running
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import Finding, Severity
from kappa_deploy.checks.manifests import schemas, selections
from kappa_deploy.checks.places import places
from kappa_deploy.checks.settings import model_folders, settings_together
from kappa_deploy.checks.tiers import tiers
from kappa_deploy.checks.workers import workers_alone, workers_together

Command = Literal["start", "doctor", "manifests"]
Row = Callable[[Facts], Iterator[Finding]]
Verdict = Callable[[Facts], Finding]

# What workers count since their start: the total, how bad it is, and what to do.
_TOTALS: dict[str, tuple[str, Severity, str]] = {
    "dropped stores": (
        "stores_dropped_total", "warn",
        "the link is behind: raise scheduler.store_backlog_s, or lower the load"),
    "failed loads": (
        "failed_loads_total", "fail",
        "each is computed instead: see the worker's log, and the tier's server if there is one"),
    "tier failures": (
        "tier_failures_total", "warn",
        "the LMCache server is slow or away: see engine.lmcache and its log"),
    "event gaps": (
        "event_gaps_total", "warn",
        "engine and replica lost step with each other: is the machine out of CPUs?"),
    "rule errors": (
        "rule_errors_total", "fail",
        "the scheduling rule failed and stock order took over: see rule_failed in the log"),
    "misused blocks": ("misused_blocks_total", "fail", "a fault of the engine: report it"),
}  # fmt: skip


def _by_name(*verdicts: Verdict) -> dict[str, Verdict]:
    return {verdict.__name__.replace("_", " "): verdict for verdict in verdicts}


OF_MACHINE = _by_name(machine.versions, machine.memory, machine.gpus, machine.cluster_file)
OF_CLUSTER = _by_name(
    running.workers, running.clock, running.kv_events, running.index, running.hashes,
    running.host_hits, running.rates, running.priors, running.prediction, running.profile,
    running.host_tier, running.scheduler, running.cuda_graphs, running.steering,
) | {name: partial(running.counted, *total) for name, total in _TOTALS.items()}  # fmt: skip


def _machine(facts: Facts) -> Iterator[Finding]:
    """One finding for each check of the machine, also where nothing is wrong."""
    for name, verdict in OF_MACHINE.items():
        yield _named(name, verdict(facts))


def _cluster(facts: Facts) -> Iterator[Finding]:
    """One finding for each check of the running cluster, also where nothing is wrong."""
    for name, verdict in OF_CLUSTER.items():
        if facts.nodes is None:
            found = Finding("skip", "of a running cluster: give --url")
        elif not facts.nodes and verdict is not running.workers:
            found = Finding("skip", "the cluster has no worker")
        else:
            found = verdict(facts)
        yield _named(name, found)


def _named(name: str, found: Finding) -> Finding:
    """The finding of the check of this name; the remedy only where something is wrong."""
    is_bad = found.severity in ("warn", "fail")
    return replace(found, where=name, remedy=found.remedy if is_bad else "")


TABLE: dict[Command, tuple[Row, ...]] = {
    # `kappa serve`, with and without --dry-run.
    "start": (model_folders, settings_together, workers_together, places, workers_alone),
    "doctor": (_machine, _cluster, tiers),
    # `./dev manifests`, of one overlay.
    "manifests": (schemas, selections),
}


def findings(command: Command, facts: Facts) -> list[Finding]:
    """What the command's rows find, in the order of the table."""
    return [finding for row in TABLE[command] for finding in row(facts)]
