"""Recorded router logs: each call that a router got, and what it decided then.

`router_logs.json` says of each how its router was configured. The calls are inputs and stay as
they are; only the decisions beside them are ever rewritten, by `tests.golden.regenerate`.
"""

import json
import lzma
from pathlib import Path

from kappa_router.config import RouterConfig
from kappa_router.policy import policy_named
from kappa_router.recording import replay
from kappa_router.router import Router

FOLDER = Path(__file__).parent / "router_logs"
CONFIGS = json.loads((FOLDER / "router_logs.json").read_text(encoding="utf-8"))


def entries(name):
    """The calls of one log."""
    with lzma.open(FOLDER / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def router(name):
    """A fresh router, configured as the one that was recorded."""
    config = CONFIGS[name]["config"]
    return Router(RouterConfig(secret=7, **{**config, "policy": policy_named(config["policy"])}))


def decisions(name):
    """Pairs of (decided then, decided now) for every `route` of a log."""
    return replay(entries(name), router(name))


def rewrite(name):
    """Put today's decisions into the log; returns how many of them changed."""
    log, pairs = entries(name), decisions(name)
    routes = [entry for entry in log if entry["call"] == "route"]
    for entry, (_, now) in zip(routes, pairs, strict=True):
        entry["decided"] = now
    changed = sum(then != now for then, now in pairs)
    if changed:
        write(name, log)
    return changed


def write(name, log):
    """Store a log."""
    text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in log)
    path = FOLDER / f"{name}.jsonl.xz"
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
