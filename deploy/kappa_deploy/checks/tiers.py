"""Whether a server's tiers behind the device are read back: seconds, cached tokens and the server's
counters of a prompt that was evicted and sent again (`kappa_deploy.commands.evicting`). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kappa_deploy.checks.facts import Facts, ReadBack
from kappa_deploy.checks.findings import Finding

_TELLING = "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report"


def tiers(facts: Facts) -> Iterator[Finding]:
    """One finding for each server that was tried."""
    for name, tried in facts.read_backs.items():
        found = _judged(tried)
        yield Finding(found.severity, found.what, found.remedy, where=f"tier of {name}")


def _judged(tried: ReadBack) -> Finding:
    if tried.fault:
        return Finding("skip", tried.fault)
    (new_s, _), (device_s, device), (evicted_s, evicted) = tried.new, tried.on_device, tried.evicted
    shown = (
        f"of {tried.prompt_tokens} tokens {evicted} came back once evicted, in {evicted_s:.3g} s "
        f"(new {new_s:.3g} s, on the device {device_s:.3g} s); "
        + ("no counter of loads" if tried.loads is None else f"{tried.loads} loads counted")
    )
    if not device or evicted is None:
        return Finding("skip", f"it tells of no cached tokens; try {_TELLING} ({shown})")
    if evicted < device / 2:
        remedy = "nothing behind the device is read back: is its host tier on, and large enough?"
        return Finding("fail", shown, remedy)
    if tried.loads == 0:
        return Finding("skip", f"it was not evicted, or its loads are not counted: {shown}")
    if evicted_s >= new_s:
        return Finding("warn", shown, "to read it back takes as long as to compute it: its link?")
    return Finding("pass", shown)
