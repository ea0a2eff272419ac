"""`kappa doctor`'s checks: from what a machine, a cluster file and a cluster answered to verdicts.

Pure: a `Snapshot` holds the answers as they came, each check is one function of `CHECKS`. A check
that lacks what it needs is skipped and says why; it never guesses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from deploy.app.machine import Machine
from deploy.app.preflight import old_driver
from kappa.hardware import NodeProfile
from kappa.plans.rates import LEAST_R2

Status = Literal["pass", "warn", "fail", "skip"]
Row = Mapping[str, Any]

_LEAST_SHM_BYTES, _LEAST_MEMORY_BYTES = 512 << 20, 2 << 30
_MOST_SKEW_S = (2.0, 30.0)
_LEAST_SAMPLES = 20
# Of predicted seconds, as shares of the real ones: median and p90 that are good, and that are bad.
_GOOD_ERRORS, _BAD_ERRORS = (0.15, 0.40), (0.50, 1.50)
# How far what things took may be from what was announced, as a factor.
_GOOD_FACTOR, _BAD_FACTOR = 1.5, 3.0
# A data sheet's figure is hardly ever reached, and never passed by much.
_PRIOR_SHARES = (0.2, 1.1)
_SEEN_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: its figure (why, of one that is skipped), and the remedy if it is bad."""

    status: Status
    figure: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt sent twice: tokens of the second that the router expected to be cached, and those
    that the engine found. fault: why it could not be done."""

    prompt_tokens: int = 0
    expected_tokens: int = 0
    found_tokens: int = 0
    block_tokens: int = 1
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was fetched; None: it was not wanted.

    installed, locked: versions by package. file_faults: of the cluster file; priors: its pools'
    profiles. nodes, decisions: rows of `/v1/nodes` and `/v1/decisions`. losses: blocks that the
    index could not place, by why; index_blocks: that it holds.
    """

    installed: Mapping[str, str]
    locked: Mapping[str, str]
    machine: Machine
    file_faults: Sequence[str] | None = None
    priors: Mapping[str, NodeProfile] = field(default_factory=dict)
    nodes: Sequence[Row] | None = None
    decisions: Sequence[Row] = ()
    losses: Mapping[str, float] = field(default_factory=dict)
    index_blocks: float = 0.0
    probe: Probe | None = None


Check = Callable[[Snapshot], Verdict]


def diagnose(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every check's name, status, figure and remedy, in the order of the table."""
    rows = []
    for name, (check, is_of_cluster) in CHECKS.items():
        if is_of_cluster and snapshot.nodes is None:
            verdict = Verdict("skip", "of a running cluster: give --url")
        elif is_of_cluster and not snapshot.nodes and check is not workers:
            verdict = Verdict("skip", "the cluster has no worker")
        else:
            verdict = check(snapshot)
        rows.append({
            "check": name, "status": verdict.status, "figure": verdict.figure,
            "remedy": "" if verdict.status in ("pass", "skip") else verdict.remedy,
        })  # fmt: skip
    return rows


# -- of a machine and a file ----------------------------------------------------------------------


def versions(s: Snapshot) -> Verdict:
    """Packages that a cluster stands on, against the lock."""
    if not s.locked:
        return Verdict("skip", "no lock file beside the package: an image is built from it")
    shown = ", ".join(f"{name} {have}" for name, have in s.installed.items())
    other = [f"{n} {have} for {s.locked[n]}" for n, have in s.installed.items()
             if n in s.locked and s.locked[n] != have]  # fmt: skip
    if other:
        return Verdict("fail", ", ".join(other), "run './dev setup': only the lock is tested")
    return Verdict("pass", shown)


def memory(s: Snapshot) -> Verdict:
    """Free memory and /dev/shm, where Ray's object store and vLLM's host tier lie."""
    left, shm = s.machine.memory_bytes, s.machine.shm_bytes
    shown = ", ".join(
        f"{'unknown' if free is None else f'{free / 1e9:.4g} GB'} free {where}"
        for free, where in ((left, "of memory"), (shm, "in /dev/shm"))
    )
    if shm is not None and shm < _LEAST_SHM_BYTES:
        least = f"{_LEAST_SHM_BYTES / 1e9:.2g} GB"
        return Verdict("fail", shown, f"give /dev/shm {least} or more (docker: --shm-size)")
    if left is not None and left < _LEAST_MEMORY_BYTES:
        return Verdict("warn", shown, "stop what else runs here, or lower engine.host_bytes")
    return Verdict("pass", shown)


def gpus(s: Snapshot) -> Verdict:
    """GPUs that may be used, and their driver."""
    if not s.machine.gpus:
        return Verdict("skip", s.machine.no_gpus or "no GPU")
    first = s.machine.gpus[0]
    shown = f"{len(s.machine.gpus)} x {first.name}, driver {first.driver or 'unknown'}"
    fault = old_driver(s.machine)
    if fault:
        return Verdict("fail", fault, "update NVIDIA's driver")
    if s.machine.engine_build == "cpu":
        return Verdict("warn", f"{shown}, and vLLM's CPU build", "KAPPA_EXTRA=gpu ./dev setup")
    return Verdict("pass", shown)


def cluster_file(s: Snapshot) -> Verdict:
    """What a dry run finds."""
    if s.file_faults is None:
        return Verdict("skip", "of a cluster file: give --config")
    if s.file_faults:
        shown = f"{len(s.file_faults)} fault(s): {s.file_faults[0]}"
        return Verdict("fail", shown, "'kappa serve --dry-run' shows all")
    return Verdict("pass", "0 faults")


# -- of a running cluster -------------------------------------------------------------------------


def workers(s: Snapshot) -> Verdict:
    """Workers that report and may be sent something."""
    nodes = s.nodes or ()
    bad = [
        f"{n['node']} {n['breaker']['state']} ({n['breaker']['why'] or 'no reason'})"
        if n["breaker"]["state"] != "closed"
        else f"{n['node']} silent for {n['seen_s_ago']:.0f} s"
        for n in nodes
        if n["breaker"]["state"] != "closed" or n["seen_s_ago"] > _SEEN_S
    ]
    if bad or not nodes:
        shown = ", ".join(bad) or "none"
        return Verdict("fail", shown, "see its log, and 'Who is slow' in docs/runbook.md")
    return Verdict("pass", f"{len(nodes)} report")


def clock(s: Snapshot) -> Verdict:
    """How far workers' clocks are from the decider's, as of their starts."""
    skews = {n["node"]: abs(n["clock_skew_s"]) for n in s.nodes or () if n.get("clock_skew_s")}
    if not skews:
        return Verdict("skip", "no worker has reported")
    node, skew_s = max(skews.items(), key=lambda found: found[1])
    warn_s, fail_s = _MOST_SKEW_S
    status: Status = "pass" if skew_s <= warn_s else "warn" if skew_s <= fail_s else "fail"
    return Verdict(status, f"at most {skew_s:.2g} s ({node})", "let NTP set the machines' clocks")


def kv_events(s: Snapshot) -> Verdict:
    """Events of every worker that kept a block arrive, and name a tier of ours."""
    bad, seen = [], 0
    for node in s.nodes or ():
        events, limits = node["kv_events"], node["limits"]
        seen += sum(events.get(tier, 0) for tier in ("device", "host", "disk"))
        other = [f"{count} of {what}" for what, count in events.items() if ":" in what]
        if other:
            bad.append(f"{node['node']}: {', '.join(other)}")
        longest = max(
            (sum(d["actual"][f"{part}_tokens"] for part in ("device", "cached", "new"))
             for d in s.decisions if d["node"] == node["node"] and _was_admitted(d)), default=0,
        )  # fmt: skip
        if longest >= 2 * limits["block_tokens"] and not events.get("device"):
            bad.append(f"{node['node']}: prompts of {longest:g} tokens, no event of tier device")
        stored = (node["totals"] or {}).get("store_tokens_total", 0)
        if stored and not events.get("host") and node["host_tier_contents"] != "estimated":
            bad.append(f"{node['node']}: {stored:g} tokens stored, no event of tier host")
    if bad:
        remedy = "the index cannot know what is cached: is the engine's version the lock's?"
        return Verdict("fail", "; ".join(bad), remedy)
    if not seen:
        return Verdict("skip", "no block was kept yet")
    return Verdict("pass", f"{seen} blocks were announced")


def index(s: Snapshot) -> Verdict:
    """Blocks of events that the index could not place."""
    lost = {why: count for why, count in s.losses.items() if count and why in _LOST}
    share = sum(lost.values()) / max(s.index_blocks + sum(lost.values()), 1.0)
    shown = f"{s.index_blocks:g} blocks held, {sum(lost.values()):g} lost {_pairs(lost)}".strip()
    remedy = "hits are missed: see kappa_index_losses_total, and event gaps below"
    return Verdict("pass" if share <= 0.01 else "warn", shown, remedy)


_LOST = ("orphans", "unjoined", "ambiguous")


def hashes(s: Snapshot) -> Verdict:
    """A prompt sent twice: the router expects what the engine then finds."""
    probe = s.probe
    if probe is None:
        return Verdict("skip", "--no-probe: nothing was sent")
    if probe.fault:
        return Verdict("fail", probe.fault, "see the workers' logs; is the model served at all?")
    shown = (
        f"expected {probe.expected_tokens} and found {probe.found_tokens} of "
        f"{probe.prompt_tokens} tokens cached"
    )
    is_equal = abs(probe.expected_tokens - probe.found_tokens) < probe.block_tokens
    if is_equal and probe.found_tokens:
        return Verdict("pass", shown)
    if not probe.expected_tokens and not probe.found_tokens:
        return Verdict("skip", f"{shown}: the router chose a worker without them; try again")
    remedy = "router and engine disagree on block size, hashes, salt or tokens: see kv events"
    return Verdict("fail", shown, remedy)


def host_hits(s: Snapshot) -> Verdict:
    """Tokens that came back from behind the device."""
    nodes = [n for n in s.nodes or () if n["tiers"] and n["totals"]]
    loaded, stored = (
        sum(n["totals"][f"{w}_tokens_total"] for n in nodes) for w in ("load", "store")
    )
    promised = [d for d in s.decisions if d["predicted"]["cached_tokens"] and _was_admitted(d)]
    kept = sum(bool(d["actual"]["cached_tokens"]) for d in promised)
    shown = f"{loaded:g} tokens loaded, {stored:g} stored"
    if promised and not kept:
        shown += f"; of {len(promised)} hits that were foreseen none came"
        return Verdict("fail", shown, "the tier drops or refuses loads: see failed loads below")
    if loaded:
        return Verdict("pass", shown)
    why = "nothing was evicted and wanted again yet" if nodes else "no host tier is on"
    return Verdict("skip", f"{why} ({shown})")


def _was_admitted(decision: Row) -> bool:
    return decision["actual"]["new_tokens"] is not None


def rates(s: Snapshot) -> Verdict:
    """What loads and steps really took over what was announced, and how well steps were fitted."""
    worst, shown = 1.0, []
    for node in s.nodes or ():
        scales = [node["calibration"][f"{part}_scale"] for part in ("link", "compute")]
        worst = max(worst, *(max(scale, 1 / scale) for scale in scales if scale > 0))
        shown.append("{} loads x{:.3g}, steps x{:.3g}".format(node["node"], *scales))
        fit = (node["measured"].get("step") or {}).get("r2")
        if fit is not None and fit < LEAST_R2:
            shown.append(f"{node['node']} step fit R² {fit:.3g}")
            worst = max(worst, _GOOD_FACTOR * 1.01)
    status: Status = "pass" if worst <= _GOOD_FACTOR else "warn" if worst <= _BAD_FACTOR else "fail"
    remedy = "measure again when the machine is idle: 'kappa profile --url', then compare"
    return Verdict(status, "; ".join(shown), remedy)


def priors(s: Snapshot) -> Verdict:
    """Measured rates as shares of the profile that the cluster file names."""
    low, high = _PRIOR_SHARES
    shares = {
        f"{node['node']} {name}": node["profile"][f"{name}_per_s"] / getattr(prior, f"{name}_per_s")
        for node in s.nodes or ()
        if (prior := s.priors.get(node["pool"])) and node["profile"]["source"] == "measured"
        for name in ("h2d_bytes", "flops")
    }
    if not shares:
        return Verdict("skip", "no measured worker of a pool whose --config is given")
    shown = _pairs({name: f"{share:.0%}" for name, share in shares.items()})
    is_sound = all(low <= share <= high for share in shares.values())
    remedy = "another GPU or link than the file says, or fewer lanes: nvidia-smi topo -m"
    return Verdict("pass" if is_sound else "warn", shown, remedy)


def prediction(s: Snapshot) -> Verdict:
    """Error of the predicted time to first token over the last decisions."""
    errors = [
        abs(d["predicted"]["ttft_s"] - real_s) / real_s
        for d in s.decisions
        if (real_s := d["actual"]["ttft_s"]) and d["steered"] == "kappa"
    ]
    if len(errors) < _LEAST_SAMPLES:
        return Verdict("skip", f"{len(errors)} of at least {_LEAST_SAMPLES} first tokens seen")
    found = statistics.median(errors), statistics.quantiles(errors, n=10)[-1]
    shown = f"median {found[0]:.1%}, p90 {found[1]:.1%} of {len(errors)}"
    is_good, is_bad = (
        [e <= limit for e, limit in zip(found, limits, strict=True)]
        for limits in (_GOOD_ERRORS, _BAD_ERRORS)
    )
    status: Status = "pass" if all(is_good) else "warn" if all(is_bad) else "fail"
    return Verdict(status, shown, "see 'rates' here, then 'kappa why' of a request")


# -- what goes on working, silently worse ---------------------------------------------------------


def profiled(s: Snapshot) -> Verdict:
    """Workers that serve by the catalogue's figures."""
    bad = [f"{n['node']}: {n['profile_error']}" for n in s.nodes or () if n["profile_error"]]
    return _fallen_back(bad, s, "see the worker's log; 'kappa profile --url' measures again")


def host_tier(s: Snapshot) -> Verdict:
    """Workers that offload nothing."""
    bad = [n["node"] for n in s.nodes or () if not n["tiers"] and n["role"] != "prefill"]
    return _fallen_back(bad, s, "give engine.host_bytes: prefixes that leave the device are lost")


def scheduler(s: Snapshot) -> Verdict:
    """Engines that run without our rule: they report steps and no iterations."""
    bad = [
        n["node"]
        for n in s.nodes or ()
        if n["engine"] == "vllm"
        and (t := n["totals"])
        and t["steps_total"]
        and not t["iterations_total"]
    ]
    return _fallen_back(bad, s, "scheduler.name is stock: tenants get no shares, loads no order")


def graphs(s: Snapshot) -> Verdict:
    """GPU workers without CUDA graphs."""
    on_gpus = [n for n in s.nodes or () if n["measured"].get("device", "cpu") != "cpu"]
    known = [n for n in on_gpus if n["graphs"]]
    if not known:
        return Verdict("skip", "no worker on a GPU says" if on_gpus else "no worker on a GPU")
    bad = [n["node"] for n in known if n["graphs"] == "NONE"]
    return _fallen_back(bad, s, "drop enforce_eager from engine.extra")


def steering(s: Snapshot) -> Verdict:
    """Requests that Ray's own rule steered."""
    by_ray = sum(decision["steered"] == "ray" for decision in s.decisions)
    shown = f"{by_ray} of {len(s.decisions)} requests steered by Ray's rule"
    return Verdict("warn" if by_ray else "pass", shown, "router.mode is not on: docs/upgrade.md")


def counted(total: str, status: Status, remedy: str, s: Snapshot) -> Verdict:
    """Workers of whose reports this total is not zero."""
    found = {n["node"]: n["totals"][total] for n in s.nodes or () if n["totals"]}
    # LMCache's failures come by what failed.
    sums = {n: sum(c.values()) if isinstance(c, Mapping) else c for n, c in found.items()}
    bad = {node: f"{count:g}" for node, count in sums.items() if count}
    return Verdict(status if bad else "pass", _pairs(bad) or "0", remedy)


def _fallen_back(bad: Iterable[str], s: Snapshot, remedy: str) -> Verdict:
    named = list(bad)
    shown = f"{len(named)} of {len(s.nodes or ())}" + (f": {'; '.join(named)}" if named else "")
    return Verdict("warn" if named else "pass", shown, remedy)


def _pairs(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _totals() -> Iterator[tuple[str, tuple[Check, bool]]]:
    table: tuple[tuple[str, str, Status, str], ...] = (
        ("dropped stores", "stores_dropped_total", "warn",
         "the link is behind: raise scheduler.store_backlog_s, or lower the load"),
        ("failed loads", "failed_loads_total", "fail",
         "each is computed anew: see the worker's log, and the tier's server if there is one"),
        ("tier failures", "tier_failures_total", "warn",
         "the LMCache server is slow or away: see engine.lmcache and its log"),
        ("event gaps", "event_gaps_total", "warn",
         "engine and replica lost step with each other: is the machine out of CPUs?"),
        ("rule errors", "rule_errors_total", "fail",
         "the scheduling rule failed and stock order took over: see rule_failed in the log"),
        ("misused blocks", "misused_blocks_total", "fail", "a fault of the engine: report it"),
    )  # fmt: skip
    for name, total, status, remedy in table:
        yield name, (partial(counted, total, status, remedy), True)


CHECKS: dict[str, tuple[Check, bool]] = {
    "versions": (versions, False),
    "memory": (memory, False),
    "gpus": (gpus, False),
    "cluster file": (cluster_file, False),
    "workers": (workers, True),
    "clock": (clock, True),
    "kv events": (kv_events, True),
    "index": (index, True),
    "hashes": (hashes, True),
    "host hits": (host_hits, True),
    "rates": (rates, True),
    "priors": (priors, True),
    "prediction": (prediction, True),
    "profile": (profiled, True),
    "host tier": (host_tier, True),
    "scheduler": (scheduler, True),
    "cuda graphs": (graphs, True),
    "steering": (steering, True),
    **dict(_totals()),
}
"""Every check by name; whether it is of a running cluster."""
