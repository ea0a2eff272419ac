"""Every policy by name: ours and the baselines that peers are reimplemented as."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from router.baselines.catalogue import BASELINES, baseline_named
from router.policy import LeastBacklog, LeastTtft, Policy, Threshold
from router.prices import Priced

OURS: dict[str, Callable[[], Policy]] = {
    "priced": Priced,
    "priced_fetch": partial(Priced, "priced_fetch", fetches=True),
    "priced_copy": partial(Priced, "priced_copy", fetches=True, replicates=True),
    "ttft": LeastTtft,
    "threshold": Threshold,
    "least_backlog": LeastBacklog,
}
"""Name to a maker of a fresh one."""


def policy_named(spec: str, seed: int = 0) -> Policy:
    """The policy called `spec`, fresh; `name:key=value,...` sets a baseline's parameters.

    Raises:
        ValueError: lists those that exist, or the parameters that the named one takes.
    """
    if spec in OURS:
        return OURS[spec]()
    made = baseline_named(spec, seed)
    if made is None:
        known = sorted([*OURS, *BASELINES])
        raise ValueError(f"unknown policy {spec!r}: choose one of {known}")
    return made
