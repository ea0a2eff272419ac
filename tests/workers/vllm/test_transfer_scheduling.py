"""vLLM's own scheduler with our transfer connector: what is given, taken, and still computed.

The scheduler and the connector's side of it are real; the model's steps are played.
"""

import os

import msgspec
import pytest
import torch
import zmq

from kappa.protocol import PLAN_KEY
from kappa.settings.engine import TransferSettings
from workers.tiny_model import make_tiny_model
from workers.vllm.arguments import (
    CPU_ENV,
    EngineTier,
    hand_over,
    transfer_config,
)
from workers.vllm.options import SCHEDULER_KEY, STOCK, SchedulerOptions

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS, PROMPT = 32, 64, 200
WHOLE = PROMPT // BLOCK * BLOCK
PLACE = {"do_remote_prefill": True, "transfer_name": "a" * 32, "remote_tokens": WHOLE}


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
    files = TransferSettings(folder=str(folder / "files"), most_bytes=1 << 26, wait_s=1.0)
    hand_over(files, {"kv_transfer_config": tier}, None)
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


@pytest.fixture
def reports(config):
    """A function that returns the next message of the stats channel."""
    endpoint = config.kv_transfer_config.kv_connector_extra_config["kappa_stats"]
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.bind(endpoint)
        yield lambda: msgspec.msgpack.decode(socket.recv())


class Played:
    """vLLM's scheduler, or ours inside it, with an engine that samples the same token each step."""

    def __init__(self, config, rule, **options):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        from workers.vllm.scheduler import FairScheduler

        ours = SchedulerOptions(rule, **options)
        config.additional_config = {SCHEDULER_KEY: msgspec.to_builtins(ours)}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32
        )
        page = spec.page_size_bytes
        layer = KVCacheTensor(page * BLOCKS, ["layer"], page * BLOCKS, page)
        cache = KVCacheConfig(BLOCKS, [layer], [KVCacheGroupSpec(["layer"], spec)])
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

    def step(self, lost=(), **connector):
        """One step; tokens by request, what the connector's workers get, and the answers.

        connector: what they report. lost: blocks that did not come, of this step's transfers.
        """
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        planned = self.scheduler.schedule()
        names, meta = list(planned.num_scheduled_tokens), planned.kv_connector_metadata
        if lost:
            connector["invalid_block_ids"] = {i for r in meta.receives for i in r.block_ids}
        outputs = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
                kv_connector_output=KVConnectorOutput(**connector) if connector else None,
            ),
        )
        answers = [answer for group in outputs.values() for answer in group.outputs]
        return planned.num_scheduled_tokens, meta, answers

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def receiving(self):
        """Requests that wait for their KV."""
        found = self.scheduler.requests.values()
        return {r.request_id for r in found if r.status.name == "WAITING_FOR_REMOTE_KVS"}

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(params=[STOCK, "fair"])
def engine(config, request):
    return Played(config, request.param)


def test_a_prefill_is_answered_with_its_place_and_sent_in_the_next_step(engine):
    engine.add("p", {"do_remote_decode": True}, count=1)
    tokens, meta, (answer,) = engine.step()
    assert tokens == {"p": PROMPT} and meta.sends == []
    place = answer.kv_transfer_params
    assert place["do_remote_prefill"] and place["remote_tokens"] == WHOLE
    # The engine would go to sleep without work: the step that copies must come by itself.
    assert engine.scheduler.has_requests()
    tokens, meta, _ = engine.step()
    (send,) = meta.sends
    assert tokens == {} and send.name == place["transfer_name"]
    assert len(send.block_ids) == WHOLE // BLOCK == len(set(send.block_ids))
    assert engine.step()[1].sends == []


def test_a_prompt_that_nobody_wants_is_not_sent(engine):
    engine.add("p", {"do_remote_decode": False}, count=1)
    (answer,) = engine.step()[2]
    assert answer.kv_transfer_params is None and engine.step()[1].sends == []


def test_what_is_received_is_not_computed(engine):
    engine.add("d", PLACE)
    tokens, meta, _ = engine.step(finished_recving={"d"})
    (receive,) = meta.receives
    assert tokens == {} and (receive.request_id, receive.name) == ("d", PLACE["transfer_name"])
    assert (receive.start, receive.tokens) == (0, WHOLE)
    assert len(receive.block_ids) == WHOLE // BLOCK
    tokens, meta, _ = engine.step()
    assert tokens == {"d": PROMPT - WHOLE} and meta.receives == []
    assert engine.step()[0] == {"d": 1}


@pytest.mark.parametrize("held", [1, 3])
def test_only_what_the_device_does_not_hold_is_received_and_reported_as_loaded(
    engine, reports, held
):
    engine.add("before", tokens=held * BLOCK + 1, count=1)
    engine.step()
    engine.add("d", PLACE)
    (receive,) = engine.step(finished_recving={"d"})[1].receives
    assert (receive.start, receive.tokens) == (held, WHOLE - held * BLOCK)
    assert engine.step()[0] == {"d": PROMPT - WHOLE}
    # Engines of other tests report late, now that somebody listens.
    while (report := reports())["device_tokens"] != held * BLOCK:
        assert report["kind"] == "admit"
    assert (report["host_tokens"], report["new_tokens"]) == (receive.tokens, PROMPT - WHOLE)


def test_what_does_not_come_is_computed(engine):
    engine.add("d", PLACE)
    engine.step(lost=True, finished_recving={"d"})
    tokens, meta, _ = engine.step()
    assert tokens == {"d": PROMPT} and meta.receives == [], "tried once, not again"


@pytest.mark.parametrize("claimed", [0, -64, "many", None])
def test_a_claim_that_is_no_number_of_tokens_does_no_harm(engine, claimed):
    engine.add("d", {**PLACE, "remote_tokens": claimed})
    tokens, meta, _ = engine.step()
    assert meta.receives == [] and tokens == {"d": PROMPT}


def test_a_claim_beyond_the_prompt_is_cut_to_it(engine):
    engine.add("d", {**PLACE, "remote_tokens": 1 << 40})
    (receive,) = engine.step(finished_recving={"d"})[1].receives
    assert receive.tokens == WHOLE


def test_a_request_that_is_aborted_while_it_receives_leaves_nothing(engine):
    free = engine.free_blocks
    engine.add("d", PLACE)
    engine.step()
    assert engine.free_blocks < free
    engine.abort("d")
    # Its blocks are being written to: they are free once the transfer has ended.
    assert engine.free_blocks < free
    engine.step(finished_recving={"d"})
    engine.step()
    assert engine.free_blocks == free


def test_an_answer_that_found_no_room_holds_no_longer(engine):
    """Asked again, the device and the host tier may hold so much that nothing is received."""
    connector = engine.scheduler.connector
    engine.add("d", PLACE)
    (request,) = engine.scheduler.requests.values()
    assert connector.get_num_new_matched_tokens(request, 0) == (WHOLE, True)
    hit, _ = connector.get_num_new_matched_tokens(request, WHOLE)
    assert not hit and "d" not in connector._kappa_receiving


NO_MAPPINGS = ["x", "", 7, 0, -1.5, float("nan"), True, [1, 2], [], [["do_remote_prefill", True]]]
ODD = ["", "x", 7, -1, 2**63, 10**400, -1.5, float("nan"), float("inf"), True, [], [[1]], {"a": 1}]


def test_transfer_parameters_that_are_no_mapping_are_ignored(engine):
    for i, params in enumerate(NO_MAPPINGS):
        engine.add("p", params, count=1, first=2000 * i)
        engine.add("honest", {"do_remote_decode": True}, count=1, first=2000 * i + 1000)
        tokens, _, answers = engine.step()
        assert tokens == {"p": PROMPT, "honest": PROMPT}, params
        places = {answer.request_id: answer.kv_transfer_params for answer in answers}
        assert places["p"] is None and places["honest"]["do_remote_prefill"], params


@pytest.mark.parametrize(
    "key",
    ["do_remote_prefill", "do_remote_decode", "transfer_name", "remote_tokens",
     "max_offload_tokens", "kv_load_tiers"],
)  # fmt: skip
def test_transfer_parameters_of_any_content_end_no_engine(engine, key):
    for i, value in enumerate([*ODD, [{"medium": 7}], [{"locality": []}]]):
        engine.add(f"d{i}", {**PLACE, key: value}, count=1, first=1000 * i)
        engine.add(f"honest{i}", tokens=BLOCK - 1, count=1, first=1000 * i + 500)
        answers = engine.step()[2]
        receiving = engine.receiving()
        answers += engine.step(**({"finished_recving": receiving} if receiving else {}))[2]
        answers += engine.step()[2]
        done = {answer.request_id for answer in answers if answer.finished}
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
def test_what_the_ingress_sends_along_may_be_anything_without_harm(engine, key):
    """Hints: without them a request is priced by what is measured, and charged to nobody else."""
    for i, value in enumerate(HINT_VALUES):
        engine.add(f"r{i}", tokens=BLOCK + 1, count=1, first=1000 * i, **{key: value})
        answers = engine.step()[2]
        assert [(answer.request_id, answer.finished) for answer in answers] == [(f"r{i}", True)]
    rule = getattr(engine.scheduler, "_rule", None)
    assert rule is None or rule.errors_total == 0
    assert not engine.scheduler.requests


@pytest.fixture
def refusing(config):
    """Our scheduler in a worker behind our ingress."""
    return Played(config, "fair", tenant_required=True)


@pytest.mark.parametrize("tenant", [None, "", 7, ["a"], {"a": 1}, float("nan")], ids=repr)
def test_a_request_without_a_tenant_is_ended_with_an_error_and_alone(refusing, tenant):
    from vllm.v1.engine import FinishReason

    scheduler, free = refusing.scheduler, refusing.free_blocks
    refusing.add("nobody's", **({} if tenant is None else {"kappa_tenant": tenant}))
    refusing.add("alice's", tokens=BLOCK, count=1, kappa_tenant="alice")
    tokens, _, answers = refusing.step()
    assert tokens == {"alice's": BLOCK}, "it is never scheduled"
    reasons = {answer.request_id: answer.finish_reason for answer in answers}
    assert reasons == {"nobody's": FinishReason.ERROR, "alice's": FinishReason.LENGTH}
    assert refusing.free_blocks == free and not scheduler.requests
    assert not scheduler._works and "default" not in scheduler._rule.charges()


def test_a_refused_request_alone_keeps_the_engine_stepping_until_it_is_answered(refusing):
    refusing.add("nobody's")
    assert refusing.scheduler.has_requests()
    (answer,) = refusing.step()[2]
    assert (answer.request_id, str(answer.finish_reason)) == ("nobody's", "error")
    refusing.step()
    assert not refusing.scheduler.has_requests()


def test_a_refused_request_whose_client_leaves_is_gone(refusing):
    refusing.add("nobody's")
    refusing.abort("nobody's")
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
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )

    from workers.vllm.connector import HostTierConnector

    shape = dict(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    spec = (
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    )
    page = spec.page_size_bytes
    layer = KVCacheTensor(page * BLOCKS, ["layer"], page * BLOCKS, page)
    cache = KVCacheConfig(BLOCKS, [layer], [KVCacheGroupSpec(["layer"], spec)])
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
