"""Rows of `kappa demo`, real or emulated: requests with their decisions, and policies compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kappa_deploy.commands.console import print_table, seconds

OTHERS = {
    "ray_prefix": "prefix affinity (Ray Serve LLM's)",
    "llm_d": "llm-d's rule",
    "round_robin": "round robin",
}
"""What ours is compared with: policies of others by our names for them, reimplemented."""

TOKENS = ("device_tokens", "cached_tokens", "new_tokens")
HEADER = (
    f"{'session/turn':<13} {'node':<8} {'device':>6} {'C host':>6} {'N new':>6} {'κ':>7} "
    f"{'κ_crit':>7} {'bound':<8} {'reason':<14} {'predicted':>9} {'TTFT':>9}"
)

Row = dict[str, Any]


def line(row: Row) -> str:
    """One request as a row under `HEADER`."""
    head = f"{row['session'] + '/' + str(row['turn']):<13} {row['node'] or '-':<8} "
    if row["error"]:
        return f"{head}failed: {row['error']}"
    device, host, new = (row[name] for name in TOKENS)
    return (
        f"{head}{device:>6} {host:>6} {new:>6} {row['ratio']:>7.2f} {row['kappa_crit'] or 0:>7.1f} "
        f"{row['bound'] or '?':<8} {row['reason'] or '?':<14} "
        f"{row['predicted_ttft_s']:>7.2f} s {row['ttft_s']:>7.2f} s"
    )


class Worth(NamedTuple):
    """What requests got under a policy."""

    policy: str
    answered: int
    # Quantiles of TTFT; None: nothing was answered.
    p50_s: float | None
    p99_s: float | None
    # Requests in time, per second.
    goodput_rps: float


def print_compared(title: str, compared: Sequence[Worth]) -> None:
    """Policies side by side."""
    rows = [
        (name, f"{answered:,}", seconds(p50_s), seconds(p99_s), f"{goodput_rps:.3g}/s")
        for name, answered, p50_s, p99_s, goodput_rps in compared
    ]
    print_table(title, ("routed by", "answered", "TTFT p50", "p99", "goodput"), rows, left=1)
