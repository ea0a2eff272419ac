"""How near a shadow's estimate comes to what turning our routing on then shows, simulated.

    python -m benchmarks.routing.shadow miniswe 0.6

Engines that report nothing but times to first tokens, by laws that are not the router's, behind an
emulated present balancer; the router watches and learns. Its journal is replayed three ways, and
the same requests are then served with our routing on. Printed: seconds of p50, mean and p99 saved
in truth, and each estimate as a share of it: the replay corrected, the replay as it is, and the
sum of each request's predicted difference, which leaves queues and caches as they were.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kappa.protocol import Announcement
from kappa.shapes import model_shape
from router.config import RouterConfig
from router.decision import RouteRequest
from router.journal import JournaledRequest, JournaledWorker, RolloutSegment
from router.policy import Policy, policy_named
from router.rollout import PRESENT
from router.router import Router
from simulator import counterfactual as cf
from simulator.clusters import KINDS, SimulatedCluster, numbered
from simulator.decode import OURS, EngineLaw
from simulator.dispatch import RouterDispatch, SimulatedRoute
from simulator.faults import Faults
from simulator.play import Play
from simulator.run import SimulationConfig, announcements_of, node_models, traffic_of
from simulator.traffic import Traffic
from workload.catalogue import workload_named
from workload.shapes import TurnShape

_REQUESTS = 1500
_NOISE = 0.2
LAWS = {
    "ours": OURS,
    "compute and reads add up, half rate at 256 tokens": EngineLaw(adds=True, half_tokens=256.0),
    "tiles of 128, link shared with compute": EngineLaw(tile_tokens=128, link_slower=2.0),
}


class Watching(RouterDispatch):
    """A present balancer's rule steers, as live; what ours predicts beside it is noted."""

    def __init__(self, present: Policy, router: Router, announced: Sequence[Announcement]) -> None:
        super().__init__(router, announced, samples=False)
        self._present = present
        self.differences: dict[int, float] = {}

    def choose(
        self, key: int, turn: TurnShape, session: str, now_s: float, lost_on: int = -1
    ) -> SimulatedRoute | None:
        request = RouteRequest(
            str(key), prefix_hashes=turn.blocks, prompt_tokens=turn.input_tokens, session=session
        )
        ours = self._router.explain(request, now_s)
        index = self._present.choose(ours.priced).index
        chosen = ours.priced.workers[index]
        others = frozenset(ours.priced.workers) - {chosen}
        decision = self._router.route(replace(request, exclude=others), now_s)
        self.predicted[key] = decision.chosen.ttft_s, decision.kind
        self.differences[key] = decision.chosen.ttft_s - ours.chosen.ttft_s
        return SimulatedRoute(self._index[chosen])


class Run(NamedTuple):
    """A play and the router that steered or watched it."""

    play: Play
    router: Router
    dispatch: RouterDispatch


def run(config: SimulationConfig, traffic: Traffic, present: Policy | None = None) -> Run:
    """Play `traffic`, steered by `present` or ours; the router learns from first tokens."""
    models = node_models(config)
    blocks = sum(model.device_blocks + model.host_blocks for model in models)
    ours = policy_named("priced")
    router = Router(RouterConfig(ours, 1, blocks, stale_after_s=math.inf, forecast_workers=0))
    announced = announcements_of(config, models)
    dispatch = (
        RouterDispatch(router, announced, samples=False)
        if present is None
        else Watching(present, router, announced)
    )
    play = Play(models, traffic, dispatch, Faults(noise_sigma=_NOISE), config.seed)
    play.run()
    return Run(play, router, dispatch)


def segment_of(watched: Run, traffic: Traffic, present: str) -> RolloutSegment:
    """What a journal of the run would hold."""
    states = watched.router.workers
    segment = RolloutSegment("shadow", present, "priced")
    for name, state in states.items():
        segment.workers[name] = JournaledWorker(
            state.announcement, state.calibration.speed, state.calibration.overhead_s
        )
    names, play = list(states), watched.play
    for base, turns, conversation in zip(traffic.base, traffic.turns, traffic.ids, strict=True):
        for k, turn in enumerate(turns, base):
            if math.isnan(play.e2e_s[k]):
                continue
            at_s = play.arrival_s[k]
            segment.requests.append(
                JournaledRequest(
                    conversation, at_s, play.ttft_s[k], at_s + play.e2e_s[k], names[play.node[k]],
                    "present", turn.input_tokens, turn.output_tokens, turn.blocks,
                )
            )  # fmt: skip
    return segment


def main(trace: str, load: float, present: str, seed: int = 0) -> None:
    """Print a row per law."""
    nodes = tuple(numbered(KINDS["h100"], 2) + numbered(KINDS["a100"], 1))
    print(f"{trace} at {load}, {present}: saved in truth (p50, mean, p99), estimates / truth")
    print(
        "| law | in truth, s | replay corrected | replay raw | differences |\n|---|---|---|---|---|"
    )
    for name, law in LAWS.items():
        config = SimulationConfig(
            cluster=SimulatedCluster("three", nodes), workload=workload_named(trace), load=load,
            shape=model_shape("llama-3.1-8b"), requests=_REQUESTS, laws=(law,), seed=seed,
            warm=False,
        )  # fmt: skip
        traffic = traffic_of(config)
        watched = run(config, traffic, PRESENT[present]())
        on = run(config, traffic)
        late = np.argsort(watched.play.arrival_s)[traffic.requests // 5 :]
        before_s = np.array(watched.play.ttft_s)[late]
        before = cf.figures(before_s)
        after = cf.figures(np.array(on.play.ttft_s)[late])
        truth = np.subtract(before, after)
        found = cf.counterfactual(segment_of(watched, traffic, present), policy_named("priced"))
        raw = found.raw
        assert isinstance(watched.dispatch, Watching)
        noted = watched.dispatch.differences
        each_s = np.array([noted[k] for k in late])
        differences = np.subtract(before, cf.figures(np.maximum(before_s - each_s, 1e-6)))
        corrected = [one.saved_s for one in found.saved]
        cells = " | ".join(
            ", ".join(f"{value:.3g}" for value in row)
            for row in (truth, corrected / truth, raw / truth, differences / truth)
        )
        print(f"| {name} ({found.model_error:.0%} off) | {cells} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), (*sys.argv[3:], "round-robin")[0])
