"""Checks of a running cluster by its answers: faults, and what gets worse silently. Pure.

A row that lacks what it needs is skipped and says why; it never guesses.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from kappa.plans.rates import LEAST_R2
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import Finding, Severity

_MOST_SKEW_S = (2.0, 30.0)
_LEAST_SAMPLES = 20
# Of predicted seconds, as shares of the real ones: median and p90 that are good, and that are bad.
_GOOD_ERRORS, _BAD_ERRORS = (0.15, 0.40), (0.50, 1.50)
# How far what things took may be from what was announced, as a factor.
_MOST_FACTOR = (1.5, 3.0)
# A data sheet's figure is hardly ever reached, and never passed by much.
_PRIOR_SHARES = (0.2, 1.1)
_SEEN_S = 10.0


def workers(facts: Facts) -> Finding:
    """Workers that report and may be sent something."""
    nodes = facts.nodes or ()
    bad = [
        f"{n['node']} {n['breaker']['state']} ({n['breaker']['why'] or 'no reason'})"
        if n["breaker"]["state"] != "closed"
        else f"{n['node']} silent for {n['seen_s_ago']:.0f} s"
        for n in nodes
        if n["breaker"]["state"] != "closed" or n["seen_s_ago"] > _SEEN_S
    ]
    if bad or not nodes:
        shown = ", ".join(bad) or "none"
        return Finding("fail", shown, "see its log, and 'Who is slow' in docs/runbook.md")
    tables = {n["node"]: table for n in nodes if (table := n["profile"].get("silicon"))}
    by = ", ".join(f"{node} by {table}" for node, table in tables.items())
    return Finding("pass", f"{len(nodes)} report" + (f"; steps of {by}" if by else ""))


def clock(facts: Facts) -> Finding:
    """How far workers' clocks are from the decider's, as of their starts."""
    skews = {n["node"]: abs(n["clock_skew_s"]) for n in facts.nodes or () if n.get("clock_skew_s")}
    if not skews:
        return Finding("skip", "no worker has reported")
    node, skew_s = max(skews.items(), key=lambda found: found[1])
    shown = f"at most {skew_s:.2g} s ({node})"
    return Finding(_graded(skew_s, _MOST_SKEW_S), shown, "let NTP set the machines' clocks")


def kv_events(facts: Facts) -> Finding:
    """Events of every worker that kept a block arrive, and name a tier of ours."""
    bad, seen = [], 0
    for node in facts.nodes or ():
        events, limits = node["kv_events"], node["limits"]
        seen += sum(events.get(tier, 0) for tier in ("device", "host", "disk"))
        other = [f"{count} of {what}" for what, count in events.items() if ":" in what]
        if other:
            bad.append(f"{node['node']}: {', '.join(other)}")
        longest = max(
            (sum(d["actual"][f"{part}_tokens"] for part in ("device", "cached", "new"))
             for d in facts.decisions if d["node"] == node["node"] and _was_admitted(d)), default=0,
        )  # fmt: skip
        if longest >= 2 * limits["block_tokens"] and not events.get("device"):
            bad.append(f"{node['node']}: prompts of {longest:g} tokens, no event of tier device")
        stored = (node["totals"] or {}).get("store_tokens_total", 0)
        if stored and not events.get("host") and node["host_tier_contents"] != "estimated":
            bad.append(f"{node['node']}: {stored:g} tokens stored, no event of tier host")
    if bad:
        remedy = "the index cannot know the cached blocks: is the engine's version the lock's?"
        return Finding("fail", "; ".join(bad), remedy)
    if not seen:
        return Finding("skip", "no block was kept yet")
    return Finding("pass", f"{seen} blocks were announced")


def index(facts: Facts) -> Finding:
    """Blocks of events that the index could not place."""
    lost = {why: count for why, count in facts.losses.items() if count and why in _LOST}
    share = sum(lost.values()) / max(facts.index_blocks + sum(lost.values()), 1.0)
    held = f"{facts.index_blocks:g} blocks held"
    shown = f"{held}, {sum(lost.values()):g} lost {_pairs(lost)}".strip()
    remedy = "hits are missed: see kappa_index_losses_total, and event gaps below"
    return Finding("pass" if share <= 0.01 else "warn", shown, remedy)


_LOST = ("orphans", "unjoined", "ambiguous")


def hashes(facts: Facts) -> Finding:
    """A prompt sent twice: the router expects what the engine then finds."""
    probe = facts.probe
    if probe is None:
        return Finding("skip", "--no-probe: nothing was sent")
    if probe.fault:
        return Finding("fail", probe.fault, "see the workers' logs; is the model served at all?")
    shown = (
        f"expected {probe.expected_tokens} and found {probe.found_tokens} of "
        f"{probe.prompt_tokens} tokens cached"
    )
    is_equal = abs(probe.expected_tokens - probe.found_tokens) < probe.block_tokens
    if is_equal and probe.found_tokens:
        return Finding("pass", shown)
    if not probe.expected_tokens and not probe.found_tokens:
        return Finding("skip", f"{shown}: the router chose a worker without them; try again")
    remedy = "router and engine disagree on block size, hashes, salt or tokens: see kv events"
    return Finding("fail", shown, remedy)


def host_hits(facts: Facts) -> Finding:
    """Tokens that came back from behind the device."""
    nodes = [n for n in facts.nodes or () if n["tiers"] and n["totals"]]
    loaded, stored = (
        sum(n["totals"][f"{w}_tokens_total"] for n in nodes) for w in ("load", "store")
    )
    promised = [d for d in facts.decisions if d["predicted"]["cached_tokens"] and _was_admitted(d)]
    kept = sum(bool(d["actual"]["cached_tokens"]) for d in promised)
    shown = f"{loaded:g} tokens loaded, {stored:g} stored"
    if promised and not kept:
        shown += f"; of {len(promised)} hits that were foreseen none came"
        return Finding("fail", shown, "the tier drops or refuses loads: see failed loads below")
    if loaded:
        return Finding("pass", shown)
    why = "nothing was evicted and wanted again yet" if nodes else "no host tier is on"
    return Finding("skip", f"{why} ({shown})")


def _was_admitted(decision: Mapping[str, Any]) -> bool:
    return decision["actual"]["new_tokens"] is not None


def rates(facts: Facts) -> Finding:
    """Measured over announced seconds of loads and steps, and the quality of the steps' fit."""
    worst, shown = 1.0, []
    for node in facts.nodes or ():
        scales = [node["calibration"][f"{part}_scale"] for part in ("link", "compute")]
        worst = max(worst, *(max(scale, 1 / scale) for scale in scales if scale > 0))
        shown.append("{} loads x{:.3g}, steps x{:.3g}".format(node["node"], *scales))
        fit = (node["measured"].get("step") or {}).get("r2")
        if fit is not None and fit < LEAST_R2:
            shown.append(f"{node['node']} step fit R² {fit:.3g}")
            worst = max(worst, 1.01 * _MOST_FACTOR[0])
    remedy = "measure again when the machine is idle: 'kappa profile --url', then compare"
    return Finding(_graded(worst, _MOST_FACTOR), "; ".join(shown), remedy)


def priors(facts: Facts) -> Finding:
    """Measured rates as shares of the profile that the cluster file names."""
    low, high = _PRIOR_SHARES
    shares = {
        f"{node['node']} {name}": node["profile"][f"{name}_per_s"] / getattr(prior, f"{name}_per_s")
        for node in facts.nodes or ()
        if (prior := facts.priors.get(node["pool"])) and node["profile"]["source"] == "measured"
        for name in ("h2d_bytes", "flops")
    }
    if not shares:
        return Finding("skip", "no measured worker of a pool in --config")
    shown = _pairs({name: f"{share:.0%}" for name, share in shares.items()})
    is_sound = all(low <= share <= high for share in shares.values())
    remedy = "another GPU or link than the file says, or fewer lanes: nvidia-smi topo -m"
    return Finding("pass" if is_sound else "warn", shown, remedy)


def prediction(facts: Facts) -> Finding:
    """Error of the predicted time to first token over the last decisions."""
    errors = [
        abs(d["predicted"]["ttft_s"] - real_s) / real_s
        for d in facts.decisions
        if (real_s := d["actual"]["ttft_s"]) and d["steered"] == "kappa"
    ]
    if len(errors) < _LEAST_SAMPLES:
        return Finding("skip", f"{len(errors)} of at least {_LEAST_SAMPLES} first tokens seen")
    found = statistics.median(errors), statistics.quantiles(errors, n=10)[-1]
    shown = f"median {found[0]:.1%}, p90 {found[1]:.1%} of {len(errors)}"
    is_good, is_bad = (
        [e <= limit for e, limit in zip(found, limits, strict=True)]
        for limits in (_GOOD_ERRORS, _BAD_ERRORS)
    )
    severity: Severity = "pass" if all(is_good) else "warn" if all(is_bad) else "fail"
    return Finding(severity, shown, "see 'rates' here, then 'kappa why' of a request")


# -- what goes on working, silently worse ---------------------------------------------------------


def profile(facts: Facts) -> Finding:
    """Workers that serve by the catalogue's figures."""
    bad = [f"{n['node']}: {n['profile_error']}" for n in facts.nodes or () if n["profile_error"]]
    return _fallen_back(bad, facts, "see the worker's log; 'kappa profile --url' measures again")


def host_tier(facts: Facts) -> Finding:
    """Workers that offload nothing."""
    bad = [n["node"] for n in facts.nodes or () if not n["tiers"] and n["role"] != "prefill"]
    remedy = "give engine.host_bytes: prefixes that leave the device are lost"
    return _fallen_back(bad, facts, remedy)


def scheduler(facts: Facts) -> Finding:
    """Engines that run without our rule: they report steps and no iterations."""
    counted = [(n["node"], n["totals"]) for n in facts.nodes or () if n["engine"] == "vllm"]
    bad = [n for n, t in counted if t and t["steps_total"] and not t["iterations_total"]]
    remedy = "scheduler.name is stock: tenants get no shares, loads no order"
    return _fallen_back(bad, facts, remedy)


def cuda_graphs(facts: Facts) -> Finding:
    """GPU workers without CUDA graphs."""
    on_gpus = [n for n in facts.nodes or () if n["measured"].get("device", "cpu") != "cpu"]
    known = [n for n in on_gpus if n["graphs"]]
    if not known:
        return Finding("skip", "no worker on a GPU says" if on_gpus else "no worker on a GPU")
    bad = [n["node"] for n in known if n["graphs"] == "NONE"]
    return _fallen_back(bad, facts, "drop enforce_eager from engine.extra")


def steering(facts: Facts) -> Finding:
    """Requests that Ray's own rule steered."""
    by_ray = sum(decision["steered"] == "ray" for decision in facts.decisions)
    shown = f"{by_ray} of {len(facts.decisions)} requests steered by Ray's rule"
    return Finding("warn" if by_ray else "pass", shown, "router.mode is not on: docs/upgrade.md")


def counted(total: str, severity: Severity, remedy: str, facts: Facts) -> Finding:
    """Workers that report more than zero of this total."""
    found = {n["node"]: n["totals"][total] for n in facts.nodes or () if n["totals"]}
    # LMCache's failures come by what failed.
    sums = {n: sum(c.values()) if isinstance(c, Mapping) else c for n, c in found.items()}
    bad = {node: f"{count:g}" for node, count in sums.items() if count}
    return Finding(severity if bad else "pass", _pairs(bad) or "0", remedy)


def _fallen_back(bad: Iterable[str], facts: Facts, remedy: str) -> Finding:
    named = list(bad)
    shown = f"{len(named)} of {len(facts.nodes or ())}" + (f": {'; '.join(named)}" if named else "")
    return Finding("warn" if named else "pass", shown, remedy)


def _graded(value: float, most: tuple[float, float]) -> Severity:
    """The severity of a value; most: the largest that passes, and the largest that is only a
    warning."""
    good, bad = most
    return "pass" if value <= good else "warn" if value <= bad else "fail"


def _pairs(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())
