"""A rolling update of two workers, one after the other: which share of a workload is still held.

Host tiers, their folders and records, event batches and router are real; engines are left out. A
document counts as held where the router finds it and the manager of the tier does, too.
"""

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.config import RouterConfig
from router.decision import RouteRequest
from router.index.kv_events import decode_batch
from router.policy import policy_named
from router.router import Router
from workers.vllm.host_tier_manager import PersistentTierManager
from workers.vllm.options import LinkPace
from workers.vllm.persistent_tier import PersistentTier, StoredBlock, announcement
from workers.vllm.warm_restart import claim_folder

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS, DOCUMENTS = 16, 8, 10
SLOTS = BLOCKS * DOCUMENTS
CONTEXT = ReqContext(req_id="r")


def text(document):
    """The tokens of a document, and of a question after it."""
    body = np.random.default_rng(document).integers(0, 30_000, BLOCKS * TOKENS)
    return np.append(body, [1, 2, 3])


def hashes(document):
    return [bytes([document, block]) * 16 for block in range(BLOCKS)]


class Worker:
    """A worker's host tier in one life: in a folder, or gone with its engine."""

    lives = 0

    def __init__(self, router, name, folder):
        Worker.lives += 1
        self.name = f"{name}-{Worker.lives}"
        self.claimed = claim_folder(folder, {"pool": name})
        self.manager = PersistentTierManager(
            PersistentTier(self.claimed.folder, SLOTS, TOKENS, "seed"), num_blocks=SLOTS,
            enable_events=True, pace=LinkPace(), block_tokens=TOKENS, backlog_s=1e9,
            report=lambda _: None,
        )  # fmt: skip
        self.router = router
        router.join(
            Announcement(
                worker=self.name, model="m", node=node_profile("pcie"),
                step=StepModel(1e-4, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
                fingerprint="f", block_tokens=TOKENS, device_blocks=100, host_blocks=SLOTS,
                max_batch_tokens=512, max_context_tokens=1024, events_endpoint="",
                snapshot_endpoint="",
            ), 0.0,
        )  # fmt: skip
        self.announce(self.manager.tier.found)

    def announce(self, found):
        batches = announcement(found, TOKENS, "CPU", lambda key: bytes(key)[:-4], lambda p: p)
        for batch in batches:
            self.router.blocks(decode_batch(batch, self.name))

    def serve(self, document):
        """Compute a document and store it."""
        keys = [make_offload_key(h, 0) for h in hashes(document)]
        chunks = text(document)[: BLOCKS * TOKENS].reshape(BLOCKS, TOKENS).tolist()
        for i, key in enumerate(keys):
            parent = hashes(document)[i - 1] if i else None
            self.manager.tier.storing(StoredBlock(bytes(key), parent, tuple(chunks[i])))
        output = self.manager.prepare_store(keys, CONTEXT)
        self.manager.complete_store(output.keys_to_store, CONTEXT)
        self.announce(self.manager.tier.valid())

    def holds(self, document):
        keys = [make_offload_key(h, 0) for h in hashes(document)]
        return all(self.manager.lookup(key, CONTEXT) == LookupResult.HIT for key in keys)

    def end(self):
        self.router.leave(self.name)
        self.manager.shutdown()
        self.claimed.release()


class Cluster:
    """Two workers; documents go where the router sends them."""

    def __init__(self, folder):
        self.folder = folder
        config = RouterConfig(policy=policy_named("ttft"), secret=7, stale_after_s=1e9)
        self.router = Router(config)
        self.workers = {name: Worker(self.router, name, folder) for name in ("a", "b")}

    def hit_rate(self):
        """The share of documents that the worker chosen for them holds."""
        held = 0
        for document in range(DOCUMENTS):
            chosen = self.chosen(document)
            foreseen = chosen.counts.cached_tokens == BLOCKS * TOKENS
            held += foreseen and self.of(chosen.worker).holds(document)
        return held / DOCUMENTS

    def chosen(self, document):
        request = RouteRequest(str(document), text(document), 4)
        return self.router.explain(request, 1.0).chosen

    def of(self, worker):
        return next(w for w in self.workers.values() if w.name == worker)

    def fill(self):
        for document in range(DOCUMENTS):
            list(self.workers.values())[document % 2].serve(document)

    def stop(self, name):
        self.workers.pop(name).end()

    def start(self, name, folder=None):
        self.workers[name] = Worker(self.router, name, folder or self.folder)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "kept")
    yield made
    for name in list(made.workers):
        made.stop(name)


def test_the_hit_rate_before_during_and_after_a_rolling_update(cluster):
    assert cluster.hit_rate() == 0.0
    cluster.fill()
    assert cluster.hit_rate() == 1.0, "before"
    for name in ("a", "b"):
        cluster.stop(name)
        assert cluster.hit_rate() == 0.5, "during: the other worker's documents"
        cluster.start(name)
        assert cluster.hit_rate() == 1.0, "after: found, and the router knows"


def test_without_a_warm_restart_half_of_it_would_be_lost_each_time(cluster, tmp_path):
    cluster.fill()
    for expected, name in ((0.5, "a"), (0.0, "b")):
        cluster.stop(name)
        cluster.start(name, tmp_path / f"elsewhere-{name}")
        assert cluster.hit_rate() == expected
