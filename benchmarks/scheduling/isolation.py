"""What a heavy tenant costs a light one, in simulated time, against running alone at its share.

Both send the mixed case's requests as Poisson streams, the heavy one more than the node can serve.
The yardstick is the light tenant's TTFT when the same requests of its have a node to themselves
that has its share (by weight: half) of the blocks, the gpu and the link. Below 1 the light tenant
is better off beside the heavy one than with a node of its own.

    python -m benchmarks.scheduling.isolation --policy fcfs --policy fair
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.scheduling import mix
from benchmarks.scheduling.report import Played
from benchmarks.scheduling.simulated import node_of, play
from simulator.node import NodeModel

HEAVY, LIGHT = "heavy", "light"
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Traffic:
    """light_rps, heavy_rps: requests a second, for so many seconds; offloaded: share of those with
    a prefix to load; blocks: of the whole node."""

    light_rps: float = 3.0
    heavy_rps: float = 60.0
    seconds: float = 60.0
    offloaded: float = 1 / 3
    blocks: int = 390

    def workload(self, seed: int) -> mix.Workload:
        """Requests in order of arrival."""
        rng = np.random.default_rng(seed)
        found: list[mix.Ask] = []
        for tenant, rate in ((LIGHT, self.light_rps), (HEAVY, self.heavy_rps)):
            times = np.cumsum(rng.exponential(1 / rate, size=int(rate * self.seconds)))
            loads = rng.random(len(times)) < self.offloaded
            for at_s, load in zip(times.tolist(), loads.tolist(), strict=True):
                kind, prefix, new = (mix.OFFLOADED, 512, 16) if load else (mix.FRESH, 0, 96)
                ask = mix.Ask(
                    kind, prefix, new, at_s=at_s, tenant=tenant, priority=int(tenant == HEAVY)
                )
                found.append(ask)
        ordered = tuple(sorted(found, key=lambda ask: ask.at_s))
        return mix.Workload("isolation", self.blocks, ordered)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Medians over runs, TTFT in seconds: of both tenants on one node, of the light one alone on
    its share of it, and alone on all of it. slowdown: light_p99_s over share_p99_s."""

    policy: str
    stores: str
    light_p50_s: float
    light_p99_s: float
    heavy_p50_s: float
    heavy_p99_s: float
    share_p99_s: float
    alone_p99_s: float
    slowdown: float
    slowdown_most: float


def isolation(
    policy: str, stores: str = "free", traffic: Traffic | None = None, runs: int = 5
) -> Isolation:
    """Measure one policy."""
    traffic = traffic or Traffic()
    model = node_of(policy, mix.Setting("mixed", "x1", stores), traffic.blocks)
    share = share_of(model, _SHARE)
    found: list[dict[str, float]] = []
    for run in range(runs):
        both = traffic.workload(mix.SEED + run)
        light = replace(both, asks=tuple(a for a in both.asks if a.tenant == LIGHT))
        together, at_share, alone = (
            play(m, w, run)[0] for m, w in ((model, both), (share, light), (model, light))
        )
        found.append(
            {
                "light_p50_s": _ttft_s(together, LIGHT, 0.5),
                "light_p99_s": _ttft_s(together, LIGHT, 0.99),
                "heavy_p50_s": _ttft_s(together, HEAVY, 0.5),
                "heavy_p99_s": _ttft_s(together, HEAVY, 0.99),
                "share_p99_s": _ttft_s(at_share, LIGHT, 0.99),
                "alone_p99_s": _ttft_s(alone, LIGHT, 0.99),
            }
        )
    slowdowns = [one["light_p99_s"] / one["share_p99_s"] for one in found]
    middle = {key: median(one[key] for one in found) for key in found[0]}
    return Isolation(
        policy, stores, **middle, slowdown=median(slowdowns), slowdown_most=max(slowdowns)
    )


def share_of(model: NodeModel, share: float) -> NodeModel:
    """A node with a share of another's blocks, gpu and link: everything takes 1 / share as long."""
    step = model.step
    slower = replace(
        step, token_s=step.token_s / share, pair_s=step.pair_s / share,
        weights_s=step.weights_s / share, context_token_s=step.context_token_s / share,
        fixed_s=step.fixed_s / share,
    )  # fmt: skip
    return replace(
        model, step=slower, announced_step=slower,
        device_blocks=int(model.device_blocks * share),
        load_block_s=model.load_block_s / share, store_block_s=model.store_block_s / share,
        load_fixed_s=model.load_fixed_s / share,
    )  # fmt: skip


def _ttft_s(played: Played, tenant: str, q: float) -> float:
    values = [
        s.first_s - s.arrived_s
        for s in played.served
        if s.first_s is not None and s.ask.tenant == tenant
    ]
    return float(np.quantile(values, q))


def main(
    policy: Annotated[list[str] | None, typer.Option(help="As often as wanted.")] = None,
    stores: Annotated[str, typer.Option(help="free or shared.")] = "free",
    runs: Annotated[int, typer.Option(min=1, help="Seeds; the median is printed.")] = 5,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print the light tenant's TTFT beside the heavy one, by policy."""
    found = [isolation(name, stores, runs=runs) for name in policy or mix.POLICIES]
    if json_output:
        typer.echo(json.dumps({"rows": [asdict(one) for one in found]}, allow_nan=False))
        return
    for one in found:
        typer.echo(
            f"{one.policy:10s} light TTFT p50 {one.light_p50_s:7.3f} p99 {one.light_p99_s:7.3f} s, "
            f"heavy p50 {one.heavy_p50_s:7.3f} p99 {one.heavy_p99_s:7.3f} s; light alone p99 "
            f"{one.share_p99_s:.3f} s at its share, {one.alone_p99_s:.3f} s on all; "
            f"{one.slowdown:.2f} (at most {one.slowdown_most:.2f}) times its share's"
        )


if __name__ == "__main__":
    typer.run(main)
