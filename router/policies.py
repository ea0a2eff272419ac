"""Every policy by name: ours, and those that are installed as entry points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kappa.plugins import ROUTING_POLICIES, installed
from router.policy import LeastBacklog, LeastTtft, Policy, Priced, Threshold

OURS: dict[str, Callable[[], Policy]] = {
    "priced": Priced,
    "priced_fetch": partial(Priced, "priced_fetch", fetches=True),
    "ttft": LeastTtft,
    "threshold": Threshold,
    "least_backlog": LeastBacklog,
}
"""Name to a maker of a fresh one."""


def policy_named(spec: str, seed: int = 0) -> Policy:
    """The policy called `spec`, fresh; `name:key=value,...` sets parameters of an installed one.

    An entry point of `kappa.routing_policies` is a function of the spec and the seed.

    Raises:
        ValueError: lists those that exist, or the parameters that the named one takes.
    """
    if spec in OURS:
        return OURS[spec]()
    others = installed(ROUTING_POLICIES)
    entry = others.get(spec.partition(":")[0])
    if entry is None:
        raise ValueError(f"unknown policy {spec!r}: choose one of {sorted([*OURS, *others])}")
    made: Policy = entry.load()(spec, seed)
    return made
