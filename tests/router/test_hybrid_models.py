"""Hybrid models: the index expects of a prompt exactly the prefix that vLLM's own cache finds.

vLLM's cache manager allocates blocks, evicts them and makes the events, in the groups that the
models' layers have there; block sizes are smaller in proportion.
"""

import random
from collections import Counter

import msgspec
import pytest

from kappa.settings.front import BackendSettings
from kappa_router.index.kv_event_types import CacheGroups, decode
from kappa_router.index.prefix_hash import PrefixHasher, secret_from_seed
from kappa_router.index.prefix_index import PrefixIndex
from tests.router.building import match_worker

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

SIZE = 16
HASHER = PrefixHasher(SIZE, secret_from_seed("hybrid"))


def attention(block=SIZE, kind="FullAttentionSpec", **more):
    import vllm.v1.kv_cache_interface as vllm

    return getattr(vllm, kind)(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32, **more
    )


def window(tokens, block=SIZE, kind="SlidingWindowSpec"):
    return attention(block, kind, sliding_window=tokens)


def mamba(block=SIZE):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=block, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


# What of a model's layers forms groups, in vLLM's order, and how many of each kind are priced.
MODELS = {
    "gpt-oss": lambda: [window(128), attention()],
    "qwen3-next": lambda: [mamba(), mamba(), mamba(), attention()],
    "kimi-k3": lambda: [mamba(), mamba(), mamba(), attention(kind="MLAAttentionSpec")],
    "deepseek-v4": lambda: [
        attention(kind="MLAAttentionSpec"),
        window(8, 4, "SlidingWindowMLASpec"),
        window(2, 1, "SlidingWindowMLASpec"),
    ],
    "windows-in-larger-blocks": lambda: [attention(), window(100, 2 * SIZE)],
    "several-groups-of-the-first-kind": lambda: [attention(), window(40), attention()],
    "windows-alone": lambda: [window(40)],
}
PRICED = {
    "gpt-oss": {"priced_sliding_window": 1, "priced_full_attention": 1},
    "qwen3-next": {"priced_mamba": 3, "priced_full_attention": 1},
    "kimi-k3": {"priced_mamba": 3, "priced_mla_attention": 1},
    "deepseek-v4": {"priced_mla_attention": 1, "priced_sliding_window_mla": 2},
    "windows-in-larger-blocks": {"priced_full_attention": 1, "priced_sliding_window": 1},
    "several-groups-of-the-first-kind": {"priced_full_attention": 2, "priced_sliding_window": 1},
    "windows-alone": {"priced_sliding_window": 1},
}


class Engine:
    """vLLM's cache of a model, without the model, and the index that hears its events."""

    def __init__(self, groups, blocks, index=None, worker="w", rank=None):
        from math import gcd, lcm

        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        sizes = [spec.block_size for spec in groups]
        self.step = 4 * lcm(*sizes)
        layers = [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(groups)]
        self.manager = KVCacheManager(
            KVCacheConfig(blocks, [], layers),
            max_model_len=4096, scheduler_block_size=lcm(*sizes), hash_block_size=gcd(*sizes),
            enable_kv_cache_events=True,
        )  # fmt: skip
        self.hasher = get_request_block_hasher(gcd(*sizes), sha256)
        self.index, self.worker, self.rank = index or PrefixIndex(HASHER, 100_000), worker, rank
        self.groups, self.counts = CacheGroups(), Counter()

    def serve(self, name, tokens):
        """Compute a prompt; returns its tokens that were found, and those that were expected."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        expected = self.expected(tokens)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        at, more = found, {"num_new_computed_tokens": found, "new_computed_blocks": blocks}
        while at < len(tokens):
            self.manager.new_step_starts()
            new = min(self.step, len(tokens) - at)
            assert self.manager.allocate_slots(request, new, **more) is not None
            at += new
            request.num_computed_tokens, more = at, {}
            self.hear()
        self.manager.free(request)
        self.hear()
        return found, expected

    def hear(self):
        from vllm.distributed.kv_events import KVEventBatch

        sent = KVEventBatch(1.0, self.manager.take_events(), data_parallel_rank=self.rank)
        payload = msgspec.msgpack.encode(sent)
        for event in decode(payload, self.worker, self.counts, self.groups).events:
            self.index.handle(event)

    def expected(self, tokens):
        hashes = HASHER.prefix_hashes(tokens)
        most = (len(tokens) - 1) // SIZE
        device, behind, _ = match_worker(self.index, hashes, self.worker, most)
        assert not behind
        return min(device, most) * SIZE


def test_ranks_are_named_and_publish_as_vllm_has_it():
    from starlette.requests import Request
    from vllm.distributed.kv_events import ZmqEventPublisher
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    http = Request({"type": "http", "headers": [(b"x-data-parallel-rank", b"2")]})
    assert GenerateBaseServing._get_data_parallel_rank(http) == 2
    row = {"url": "http://a", "profile": "pcie", "data_parallel_size": 3, "events": "tcp://a:5557"}
    for made, rank in BackendSettings(**row).ranks():
        assert made.events == (ZmqEventPublisher.offset_endpoint_port("tcp://a:5557", rank),)


@pytest.mark.parametrize("model", ["gpt-oss", "windows-alone"])
def test_index_expects_of_each_rank_what_that_one_finds(model):
    index, rng = PrefixIndex(HASHER, 100_000), random.Random(0)
    ranks = [Engine(MODELS[model](), 250, index, f"a#{rank}", rank) for rank in range(4)]
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(100, 900))] for _ in range(6)]
    hits = Counter()
    for turn in range(80):
        at, prompt = rng.randrange(4), rng.choice(prompts)
        found, expected = ranks[at].serve(f"r{turn}", prompt + [rng.randrange(1000)] * 20)
        assert found == expected
        hits[at] += found > 0
    assert len(hits) == 4 and min(hits.values()) > 3, "each rank found some of what it had"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_index_expects_what_vllm_finds_of_a_prompt(model, seed):
    rng, engine = random.Random(seed), Engine(MODELS[model](), blocks=250)
    trunks = [[rng.randrange(1000) for _ in range(600)] for _ in range(4)]
    hits = 0
    for i in range(60):
        tokens = rng.choice(trunks)[: rng.randrange(20, 600)]
        if rng.random() < 0.5:
            tokens = tokens + [rng.randrange(1000) for _ in range(rng.randrange(100))]
        found, expected = engine.serve(f"r{i}", tokens)
        assert expected == found, (i, len(tokens))
        hits += found > 0
    assert hits > 10
    assert {k: n for k, n in engine.counts.items() if k.startswith("priced_")} == PRICED[model]
