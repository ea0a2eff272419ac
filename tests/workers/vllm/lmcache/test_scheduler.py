"""The scheduler's half of the LMCache tier, beside a connector of LMCache that fails."""

from types import SimpleNamespace

import pytest

from workers.stats_channel import StatsSender
from workers.vllm.admission_reports import AdmissionReports
from workers.vllm.lmcache.link import LmcacheLink, TierGuard
from workers.vllm.lmcache.scheduler import LmcacheScheduler
from workers.vllm.tail_recompute import LOAD_ALL, TailRecompute

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


def test_a_load_that_fails_costs_only_the_blocks_that_it_was_to_fill():
    stats = StatsSender("")
    link = LmcacheLink(Inner, lambda _: None, TierGuard(1.0, 1.0), stats, 1.0)
    link.connect()
    tail = TailRecompute(LOAD_ALL, None, BLOCK)
    scheduler = LmcacheScheduler(link, AdmissionReports(stats), tail, BLOCK, 1, 100)
    request = SimpleNamespace(
        request_id="r", num_tokens=100, num_prompt_tokens=100, sampling_params=None
    )
    # The device holds two blocks of the prompt, which others may be using.
    assert scheduler.matched(request, 2 * BLOCK) == (HIT, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([7, 3, 11, 12, 13, 20, 21],))
    scheduler.allocated(request, blocks, HIT)
    nothing = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[])
    )
    assert scheduler.metadata(nothing).lost == {"r": [11, 12, 13]}
    assert scheduler.metadata(nothing).lost == {}
    link.close()
