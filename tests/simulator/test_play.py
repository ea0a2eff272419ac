"""What a dispatcher receives of a run, and what moves between nodes."""

from collections import defaultdict
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from kappa_router.index.kv_event_types import Tier
from kappa_simulator.clusters import SimulatedCluster
from kappa_simulator.dispatch import PlanDispatch, SimulatedRoute
from kappa_simulator.faults import Failure, Faults
from kappa_simulator.play import Play, SimulationError
from kappa_simulator.run import SimulationConfig, node_models, traffic_of


@pytest.fixture
def config(trio, documents, shape):
    return SimulationConfig(
        cluster=trio, workload=documents, shape=shape, rate_rps=8.0, requests=250
    )


def play_of(config, traffic, dispatcher, faults=None):
    return Play(
        node_models(config), traffic, dispatcher, faults or Faults(), config.seed
    )  # fmt: skip


class Witness(PlanDispatch):
    """Keeps book of every block, and refuses what does not add up."""

    listens = True

    def __init__(self, assignment):
        super().__init__(assignment)
        self.held = defaultdict(set)
        self.counts = defaultdict(int)

    def hold(self, node, tier, ids):
        blocks = set(ids.tolist())
        assert blocks and not blocks & self.held[node, tier]
        self.held[node, tier] |= blocks

    def drop(self, node, tier, ids):
        for gone in ids:
            assert set(gone.tolist()) <= self.held[node, tier]
            self.held[node, tier] -= set(gone.tolist())

    def lost(self, node):
        for tier in get_args(Tier):
            self.held[node, tier].clear()

    def first_token(self, job, now_s):
        self.counts["first", job.key] += 1

    def finished(self, job, now_s):
        self.counts["finished", job.key] += 1

    def report(self, node, now_s):
        self.counts["report", node.index] += 1


def with_disks(config, host_bytes, disk_bytes):
    """The same on nodes with little host memory before a disk."""
    nodes = tuple(
        replace(
            node, host_bytes=host_bytes, disk_bytes=disk_bytes,
            profile=replace(node.profile, disk_bytes_per_s=4e9),
        )
        for node in config.cluster.nodes
    )  # fmt: skip
    return config.replaced(cluster=SimulatedCluster("disks", nodes))


@pytest.mark.parametrize("failures", [(), (Failure(0, 10.0, 5.0),)])
def test_a_dispatcher_receives_every_change_of_every_cache(config, failures):
    config = with_disks(config, host_bytes=2e9, disk_bytes=6e9)
    traffic = traffic_of(config)
    plan = np.random.default_rng(0).integers(0, 3, traffic.requests)
    witness = Witness(plan)
    play = play_of(config, traffic, witness, Faults(failures=failures))
    play.run()
    for node in play.nodes:
        memory = node.memory
        assert memory.disk.blocks > memory.host.blocks > 0
        for tier in get_args(Tier):
            held, cache = witness.held[node.index, tier], getattr(memory, tier)
            assert len(held) == cache.blocks and not cache.pinned
            for turns in traffic.turns:
                ids = turns[-1].kept_blocks
                found = cache.match(ids, len(ids))[1]
                assert set(ids[:found].tolist()) <= held
        assert witness.counts["report", node.index] > 3
    if not failures:
        assert all(witness.counts["first", key] == 1 for key in range(traffic.requests))
        assert all(witness.counts["finished", key] == 1 for key in range(traffic.requests))


class Fetching(PlanDispatch):
    """Everything runs on node 0 and takes its document from where it lies."""

    def choose(self, key, turn, session, now_s, lost_on=-1):
        homes = [node.memory.host.match(turn.blocks, len(turn.blocks))[1] for node in self.nodes]
        source = int(np.argmax(homes))
        return SimulatedRoute(0, source, homes[source] * 64)


def test_a_document_is_fetched_from_a_peers_host_tier_once(config):
    traffic = traffic_of(config)
    local = play_of(config, traffic, PlanDispatch([0] * traffic.requests))
    local.run()
    dispatcher = Fetching([])
    fetched = play_of(config, traffic, dispatcher)
    dispatcher.nodes = fetched.nodes
    fetched.run()
    assert sum(fetched.new_tokens) < sum(local.new_tokens)
    assert fetched.fetches.busy_s[0] > 0 and local.fetches.busy_s == [0.0] * 3
    elsewhere = sum(fetched.fetches.busy_s[1:])
    assert elsewhere == pytest.approx(fetched.fetches.busy_s[0])


class Silent(PlanDispatch):
    """Sends requests to a node that never serves them."""

    def choose(self, key, turn, session, now_s, lost_on=-1):
        self.nodes[0].scheduler.max_running = 0
        return SimulatedRoute(0)


def test_a_stuck_run_raises_instead_of_waiting_for_ever(config):
    traffic = traffic_of(config)
    dispatcher = Silent([])
    play = play_of(config, traffic, dispatcher)
    dispatcher.nodes = play.nodes
    with pytest.raises(SimulationError, match="never ended"):
        play.run()
