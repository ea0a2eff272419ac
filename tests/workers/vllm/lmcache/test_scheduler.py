"""The scheduler's half of the LMCache tier, beside a connector of LMCache that fails."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kappa_workers.vllm.lmcache.connector import LmcacheConnector
from kappa_workers.vllm.lmcache.scheduler import LmcacheScheduler

pytestmark = pytest.mark.vllm

BLOCK, HIT = 16, 48


class Inner:
    """LMCache's connector of a server that finds three blocks, and then breaks."""

    def __init__(self):
        self.request_trackers = {"r": SimpleNamespace(num_lmcache_hit_tokens=2 * BLOCK + HIT)}
        self.scheduler_adapter = SimpleNamespace(is_healthy=True)

    def get_num_new_matched_tokens(self, request, computed):
        return HIT, True

    def update_state_after_alloc(self, request, blocks, external):
        pass

    def build_connector_meta(self, output):
        raise RuntimeError("the server is gone")

    def shutdown(self):
        pass


def test_failed_load_loses_only_the_blocks_that_it_was_to_fill(monkeypatch):
    monkeypatch.setattr("kappa_workers.vllm.lmcache.base.LmcacheLink.connect", lambda link: None)
    lmcache = {"timeout_s": 1.0, "retry_s": 1.0, "most_blocks": 100}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kappa_lmcache": lmcache}),
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(world_size=1),
    )
    scheduler = LmcacheConnector(config, KVConnectorRole.SCHEDULER, None)
    assert isinstance(scheduler, LmcacheScheduler)
    scheduler._link.inner = Inner()
    request = SimpleNamespace(
        request_id="r", num_tokens=100, num_prompt_tokens=100, sampling_params=None, block_hashes=[]
    )
    # The device holds two blocks of the prompt, which others may be using.
    assert scheduler.get_num_new_matched_tokens(request, 2 * BLOCK) == (HIT, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([7, 3, 11, 12, 13, 20, 21],))
    scheduler.update_state_after_alloc(request, blocks, HIT)
    cached = SimpleNamespace(req_ids=[])
    nothing = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    assert scheduler.build_connector_meta(nothing).lost == {"r": [11, 12, 13]}
    assert scheduler.build_connector_meta(nothing).lost == {}
    scheduler.shutdown()
