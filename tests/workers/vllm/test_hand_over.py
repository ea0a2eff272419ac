"""vLLM's own scheduler with our connector among peers: what is passed on, and what may be sent.

The scheduler and the connector's side are real; the model's steps are played.
"""

import os
import time

import msgspec
import pytest
import torch

from kappa.host import free_port
from kappa.protocol import PEER_PARAM, PLAN_KEY
from kappa.settings.engine import TransferSettings
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import CPU_ENV, EngineTier, meet_peers, transfer_config
from kappa_workers.vllm.options import SCHEDULER_KEY, STOCK, PeerOptions, SchedulerOptions

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS, PROMPT = 32, 64, 200
WHOLE = PROMPT // BLOCK * BLOCK
HAND_OVER = {"do_remote_decode": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    before = dict(os.environ)
    os.environ.update({**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model", ["hello world"] * 20)
    stats = f"ipc://{folder}/stats"
    tier = transfer_config(EngineTier(), 1 << 24, stats)
    place = PeerOptions("127.0.0.1", 0, "secret", str(folder / "layout"))
    meet_peers(TransferSettings(wait_s=1.0), {"kv_transfer_config": tier}, None, place)
    made = EngineArgs(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=1024,
        block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=512, enforce_eager=True,
        enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=KVTransferConfig(**tier),
    ).create_engine_config()  # fmt: skip
    made.cache_config.num_gpu_blocks = BLOCKS
    yield made
    os.environ.clear()
    os.environ.update(before)


SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


def cache_of(spec):
    """A cache of one layer with that spec."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    page = spec.page_size_bytes
    layer = KVCacheTensor(page * BLOCKS, ["layer"], page * BLOCKS, page)
    return KVCacheConfig(BLOCKS, [layer], [KVCacheGroupSpec(["layer"], spec)])


class Played:
    """vLLM's scheduler, or ours inside it, with an engine that samples the same token each step."""

    def __init__(self, config, rule, **options):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kappa_workers.vllm.scheduler import FairScheduler

        ours = SchedulerOptions(rule, **options)
        config.additional_config = {SCHEDULER_KEY: msgspec.to_builtins(ours)}
        self.port = free_port("127.0.0.1")
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["kappa_peers"] = {**extra["kappa_peers"], "port": self.port}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        cache = cache_of(FullAttentionSpec(**SHAPE))
        scheduler = Scheduler if rule == STOCK else FairScheduler
        self.scheduler = scheduler(config, cache, StructuredOutputManager(config), BLOCK)

    def add(self, name, params=None, tokens=PROMPT, count=4, first=100, **extra):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=count, ignore_eos=True, extra_args={"kv_transfer_params": params, **extra}
        )
        sampling.update_from_generation_config({}, 0)
        prompt = list(range(first, first + tokens))
        self.scheduler.add_request(
            Request(name, prompt, sampling, pooling_params=None, block_hasher=self._hasher)
        )

    def step(self):
        """One step; tokens by request, what the connector's workers get, and the answers."""
        from vllm.v1.outputs import ModelRunnerOutput

        planned = self.scheduler.schedule()
        names, meta = list(planned.num_scheduled_tokens), planned.kv_connector_metadata
        outputs = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
            ),
        )
        answers = [answer for group in outputs.values() for answer in group.outputs]
        return planned.num_scheduled_tokens, meta, answers

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(params=[STOCK, "fair"])
def engine(config, request):
    made = Played(config, request.param)
    yield made
    made.scheduler.connector.shutdown()


def test_a_prefill_is_answered_with_where_its_blocks_will_be(engine):
    engine.add("p", HAND_OVER, count=1)
    tokens, meta, (answer,) = engine.step()
    assert tokens == {"p": PROMPT}
    (place,) = answer.kv_transfer_params.values()
    endpoint = f"127.0.0.1:{engine.port}/secret"
    assert place == {"endpoint": endpoint, "start": 0, "stop": WHOLE, "handed": True}
    (job,) = meta.store_jobs.values()
    assert len(job.src_spec.block_ids) == WHOLE // BLOCK, "stored in the step that computes them"


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        *((params, PROMPT) for params in (None, {"do_remote_decode": False}, {PEER_PARAM: {}})),
        (HAND_OVER, BLOCK - 1),  # shorter than a block
    ],
)
def test_prompt_that_is_not_handed_over_is_answered_unplaced(engine, params, tokens):
    engine.add("p", params, tokens=tokens, count=1)
    (answer,) = engine.step()[2]
    assert answer.kv_transfer_params is None


NO_MAPPINGS = ["x", "", 7, 0, -1.5, float("nan"), True, [1, 2], [], [["do_remote_decode", True]]]
ODD = ["", "x", 7, -1, 2**63, 10**400, -1.5, float("nan"), float("inf"), True, [], [[1]], {"a": 1}]


def test_transfer_parameters_that_are_no_mapping_are_ignored(engine):
    for i, params in enumerate(NO_MAPPINGS):
        engine.add("p", params, count=1, first=2000 * i)
        engine.add("honest", HAND_OVER, count=1, first=2000 * i + 1000)
        tokens, _, answers = engine.step()
        assert tokens == {"p": PROMPT, "honest": PROMPT}, params
        places = {answer.request_id: answer.kv_transfer_params for answer in answers}
        assert places["p"] is None and PEER_PARAM in places["honest"], params


@pytest.mark.parametrize(
    "key",
    ["do_remote_prefill", "do_remote_decode", PEER_PARAM, "endpoint", "start", "stop", "handed",
     "max_offload_tokens", "kv_load_tiers"],
)  # fmt: skip
def test_transfer_parameters_of_any_content_end_no_engine(engine, key):
    nowhere = {"endpoint": "127.0.0.1:9/x", "start": 0, "stop": WHOLE, "handed": True}
    for i, value in enumerate([*ODD, [{"medium": 7}], [{"locality": []}]]):
        params = {PEER_PARAM: {**nowhere, key: value}} if key in nowhere else {key: value}
        engine.add(f"d{i}", params, count=1, first=1000 * i)
        engine.add(f"honest{i}", tokens=BLOCK - 1, count=1, first=1000 * i + 500)
        done, deadline_s = set(), time.monotonic() + 20.0
        while len(done) < 2 and time.monotonic() < deadline_s:
            done |= {answer.request_id for answer in engine.step()[2] if answer.finished}
        assert done == {f"d{i}", f"honest{i}"}


HINTS = [
    "kappa_request_id", "kappa_tenant", "kappa_weight", "kappa_prompt_tokens",
    "kappa_device_tokens", "kappa_host_tokens", "kappa_charges", "kappa_link_s", "kappa_gpu_s",
    "kappa_plan", "kv_cache_report_mode", "ec_transfer_params",
]  # fmt: skip
HINT_VALUES = [
    *ODD, -(10**400), "\ud800", "load=", "load=" + "9" * 5000, "{broken", "[" * 100_000, '{"a": 1}',
    '{"a": [1, 2]}', '{"a": [1e999, 0, 0]}', '{"a": [-1, 0, 0]}', '{"a": ["x", [], {}]}', "[1]",
    '{"a": [1' + "0" * 400 + ", 0, 0]}",
]  # fmt: skip


@pytest.mark.parametrize("key", HINTS)
def test_engine_answers_whatever_values_the_hints_have(engine, key):
    """Hints: without them a request is priced by measurement, and charged to no other tenant."""
    for i, value in enumerate(HINT_VALUES):
        engine.add(f"r{i}", tokens=BLOCK + 1, count=1, first=1000 * i, **{key: value})
        answers = engine.step()[2]
        assert [(answer.request_id, answer.finished) for answer in answers] == [(f"r{i}", True)]
    rule = getattr(engine.scheduler, "_rule", None)
    assert rule is None or rule.errors_total == 0
    assert not engine.scheduler.requests


@pytest.fixture
def refusing(config):
    """Our scheduler in a worker behind our decider."""
    made = Played(config, "fair", tenant_required=True)
    yield made
    made.scheduler.connector.shutdown()


@pytest.mark.parametrize("tenant", [None, "", 7, ["a"], {"a": 1}, float("nan")], ids=repr)
def test_request_without_a_tenant_ends_alone_with_an_error(refusing, tenant):
    from vllm.v1.engine import FinishReason

    scheduler, free = refusing.scheduler, refusing.free_blocks
    refusing.add("unowned", **({} if tenant is None else {"kappa_tenant": tenant}))
    refusing.add("alice's", tokens=BLOCK, count=1, kappa_tenant="alice")
    tokens, _, answers = refusing.step()
    assert tokens == {"alice's": BLOCK}, "it is never scheduled"
    reasons = {answer.request_id: answer.finish_reason for answer in answers}
    assert reasons == {"unowned": FinishReason.ERROR, "alice's": FinishReason.LENGTH}
    assert refusing.free_blocks == free and not scheduler.requests
    assert not scheduler._works and "default" not in scheduler._rule.charges()


def test_engine_steps_until_a_lone_refused_request_is_answered(refusing):
    refusing.add("unowned")
    assert refusing.scheduler.has_requests()
    (answer,) = refusing.step()[2]
    assert (answer.request_id, str(answer.finish_reason)) == ("unowned", "error")
    refusing.step()
    assert not refusing.scheduler.has_requests()


def test_a_refused_request_whose_client_leaves_is_gone(refusing):
    refusing.add("unowned")
    refusing.abort("unowned")
    assert refusing.step()[2] == [] and not refusing.scheduler.requests
    assert not refusing.scheduler._works


@pytest.mark.parametrize(("window", "loaded"), [(None, 64), (64, 128)])
def test_of_a_sliding_window_all_of_a_hit_is_loaded(config, monkeypatch, window, loaded):
    """Asked to load 64 of 128 tokens: of a window the blocks before those need not be there."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kappa_workers.vllm.connector import HostTierConnector

    windowed = SlidingWindowSpec(**SHAPE, sliding_window=window) if window else None
    cache = cache_of(windowed or FullAttentionSpec(**SHAPE))
    extra = config.kv_transfer_config.kv_connector_extra_config
    monkeypatch.delitem(extra, "kappa_peers")  # which give blocks of full attention alone
    connector = HostTierConnector(config, KVConnectorRole.SCHEDULER, cache)
    hits = []
    status = SimpleNamespace(update_num_hit_chunks=hits.append)
    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", lambda *_: (128, True))
    monkeypatch.setattr(connector, "_kappa_status", lambda _: status)
    asked = SamplingParams(extra_args={PLAN_KEY: "load=64"})
    request = SimpleNamespace(request_id="r", num_tokens=200, sampling_params=asked)
    assert connector.get_num_new_matched_tokens(request, 32) == (loaded, True)
    assert hits == ([] if window else [32 + 64])
    connector.shutdown()
