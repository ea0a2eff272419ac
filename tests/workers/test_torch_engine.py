"""Our own engine behind Ray's engine interface: a real model, loop and sockets, no cluster."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
import typer
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import RequestOutputKind

from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa.plans.clo import read_heads, thresholds
from kappa.plans.measured import rates_from_measured
from kappa.settings.engine import EngineSettings
from kappa.shapes import model_shape
from kappa_deploy.commands.heads import heads
from kappa_engine.config import read_config
from kappa_engine.kv_cache import ArenaSize
from kappa_scheduler.config import FairConfig
from kappa_workers.identity import WorkerPlan
from kappa_workers.own_engine.reports import EngineReports, KvPublisher
from kappa_workers.own_engine.server import OwnPlan
from kappa_workers.own_engine.torch_engine import TorchEngine, given_device, host_blocks
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import EngineLimits
from kappa_workers.vllm.options import SchedulerOptions
from tests.engine import hf
from tests.engine.books import check_engine
from tests.engine.engines import engine as small_engine
from tests.engine.engines import generate
from tests.workers.emulation import Heard, asking, llm_config

# One loop, in which the engine lives: every test is a coroutine.
pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
PATIENCE_MS = 30_000
# With all tokens chosen, sparse answers are the exact ones.
ALL = {"share": 1.0, "recent_tokens": 16, "lanes": 2}
SPARSE = EngineSettings(kind="torch", approx="ask", cpu_threads=1, sparse=ALL)
TEXTS = [f"Line {i} of a short text about nothing in particular." for i in range(200)]


class Bench(Heard):
    """An engine, and both ends of what it says."""

    def __init__(self, folder, model=None, shape=None, **changed):
        self.model = model or make_tiny_model(folder / "tiny", TEXTS)
        super().__init__(folder)
        shape = shape or ModelShape("tiny", 2, 64, 2, 1, 32, 5e5, 5e5, "gqa", 4.0, 4.0)
        plan = WorkerPlan(
            (node_profile("pcie"),), shape, shape,
            EngineLimits(1000, BLOCK, 64, 0, 256, 8, "float32"), str(self.model), "",
            str(folder), "", scheduler=SchedulerOptions("fair"), engine=SPARSE,
        )  # fmt: skip
        plan = replace(plan, **changed)
        limits = replace(plan.limits, host_bytes=int(128 * plan.block_bytes))
        own = OwnPlan(replace(plan, limits=limits), "w", 0, self.ends)
        self.engine = TorchEngine(llm_config("tiny", self.model), own)
        self.messages, self.events, self.numbers = [], [], []

    def told(self, kind, enough=lambda messages: messages):
        """The messages of a kind, once they are enough."""
        while not enough(found := [m for m in self.messages if m["kind"] == kind]):
            assert self.stats.poll(PATIENCE_MS), f"no {kind} was told"
            self.messages.append(msgspec.msgpack.decode(self.stats.recv()))
        return found

    def batches(self, enough):
        while not enough(self.events):
            assert self.kv.poll(PATIENCE_MS), "no event was published"
            _, number, payload = self.kv.recv_multipart()
            # A subscriber hears nothing before its connection stands, and everything after that.
            self.numbers.append(int.from_bytes(number, "big"))
            first = self.numbers[0]
            assert self.numbers == list(range(first, first + len(self.numbers)))
            self.events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return self.events


@asynccontextmanager
async def running(bench):
    await bench.engine.start()
    try:
        bench.await_events()
        async with asking(bench.engine) as bench.client:
            yield bench
    finally:
        await bench.engine.shutdown()
        bench.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    async with running(Bench(tmp_path_factory.mktemp("torch"))) as bench:
        yield bench


def marks(name="r", plan=None, approx=False):
    words = {"kappa_request_id": name, "kappa_tenant": "alice", "kappa_plan": plan}
    words["kappa_approx"] = "ok" if approx else None
    return {key: value for key, value in words.items() if value}


async def asked(bench, tokens, name="r", plan=None, approx=False, **fields):
    """What a completion is answered with; the prompt is in tokens."""
    given = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **fields}
    body = {"model": "tiny", "prompt": tokens, "vllm_xargs": marks(name, plan, approx), **given}
    return await bench.client.post("/v1/completions", json=body)


async def completed(bench, *given, **fields):
    answer = await asked(bench, *given, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(count, seed):
    return np.random.default_rng(seed).integers(100, 450, count).tolist()


def text_of(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_answer_is_the_same_whole_and_in_pieces(started):
    tokens = prompt(50, 1)
    whole = await completed(started, tokens)
    assert whole["usage"]["completion_tokens"] == 6 and whole["system_fingerprint"] is None
    assert whole["choices"][0]["finish_reason"] == "length"
    pieces = (await asked(started, tokens, stream=True)).text
    events = [json.loads(p[6:]) for p in pieces.split("\n\n") if p and "[DONE]" not in p]
    assert "".join(e["choices"][0]["text"] for e in events) == text_of(whole)
    assert pieces.endswith("data: [DONE]\n\n")
    assert cached(await completed(started, tokens)) == 48


async def test_a_chat_is_the_completion_of_its_rendered_prompt(started):
    said = [{"role": "user", "content": TEXTS[0]}]
    rendered = await started.client.post("/tokenize", json={"model": "tiny", "messages": said})
    whole = await completed(started, rendered.json()["tokens"])
    body = {"model": "tiny", "messages": said, "vllm_xargs": marks(), "ignore_eos": True}
    talk = await started.client.post(
        "/v1/chat/completions", json={**body, "temperature": 0.0, "max_tokens": 6}
    )
    assert talk.json()["choices"][0]["message"]["content"] == text_of(whole)


async def test_an_answer_ends_at_the_end_of_text_which_is_not_shown(started):
    tokens = prompt(30, 9)
    whole = await completed(started, tokens, max_tokens=20, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    cut = await completed(
        started, tokens, max_tokens=20, stop_token_ids=[ids[7]], return_token_ids=True
    )
    choice, first = cut["choices"][0], ids.index(ids[7])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[7])
    assert choice["token_ids"] == ids[: first + 1]
    assert text_of(whole).startswith(choice["text"])


async def test_engine_answers_alike_when_the_prefix_stays_in_host(started):
    tokens = prompt(100, 21)
    first = await completed(started, tokens, "fresh")
    for seed in range(3):
        # 1,024 tokens are on the device: these push the first prompt out of it.
        await completed(started, prompt(400, 300 + seed), f"other-{seed}")
    again = await completed(started, tokens, "stays", plan="cpu")
    assert text_of(again) == text_of(first)
    assert cached(again) == 96
    told = started.told("admit", lambda all: any(m["request_id"] == "stays" for m in all))
    admitted = {m["request_id"]: m for m in told}
    assert (admitted["stays"]["device_tokens"], admitted["stays"]["host_tokens"]) == (0, 96)
    assert admitted["stays"]["new_tokens"] == 4


async def test_what_a_request_did_is_reported_as_by_a_vllm_engine(started):
    tokens = prompt(100, 2)
    await completed(started, tokens, "first")
    await completed(started, tokens, "second")
    admitted = {m["request_id"]: m for m in started.told("admit", lambda found: len(found) >= 2)}
    while "second" not in admitted:
        started.messages.append(msgspec.msgpack.decode(started.stats.recv()))
        admitted = {m["request_id"]: m for m in started.messages if m["kind"] == "admit"}
    assert (admitted["first"]["device_tokens"], admitted["first"]["new_tokens"]) == (0, 100)
    assert (admitted["second"]["device_tokens"], admitted["second"]["new_tokens"]) == (96, 4)
    steps = started.told("step", lambda found: any("second" in m["prefilled"] for m in found))
    spent = {name: compute_s for m in steps for name, _, compute_s in m["spent"]}
    assert spent["first"] > 0 and all(not m["overrun"] for m in steps)
    works = [m["work"] for m in steps]
    # The prompt in one step, then a token over 101 tokens of context.
    assert [100, 5000.0, 100, 1] in works and [1, 100.5, 101, 1] in works
    totals = started.told("iterations")[-1]
    assert totals["charges"]["alice"][1] > 0


async def test_preempted_requests_are_in_the_record_of_iterations(tmp_path):
    reports = EngineReports("", KvPublisher(""), str(tmp_path / "iterations.jsonl"))
    unaware, size = FairConfig(expected_output_tokens=1), ArenaSize(13, 8, block_tokens=4)
    with small_engine(size=size, fair=unaware, observer=reports) as made:
        generate(made, *(list(range(3, 9 + n)) for n in range(4)), count=16)
        preempted = made.batcher.preemptions
    reports.close()
    rows = map(json.loads, (tmp_path / "iterations.jsonl").read_text().splitlines())
    assert sum(row["preempted"] for row in rows) == preempted > 0


async def test_evicted_prefixes_come_back_from_host_memory_by_any_plan(started):
    tokens = prompt(320, 3)
    first = await completed(started, tokens, "cold")
    for plan in ("kv", "recompute", "auto"):
        for seed in range(10, 16):
            await completed(started, prompt(300, seed), "filler")
        again = await completed(started, tokens, f"by-{plan}", plan)
        assert text_of(again) == text_of(first)
        by = started.told("admit", lambda f, n=f"by-{plan}": any(m["request_id"] == n for m in f))[
            -1
        ]
        assert (by["host_tokens"] > 0) == (plan == "kv") or plan == "auto"
        assert by["device_tokens"] + by["host_tokens"] + by["new_tokens"] == 320
    assert sum(m["bytes"] for m in started.told("load")) > 0
    assert sum(m["bytes"] for m in started.told("store")) > 0


async def test_engine_publishes_device_and_host_blocks_with_tokens(started):
    tokens = prompt(64, 4)
    await completed(started, tokens, cache_salt="pepper")

    def of_ours(events, medium):
        return [
            e for e in events
            if getattr(e, "token_ids", None) and e.medium == medium and e.token_ids[0] == tokens[0]
        ]  # fmt: skip

    events = started.batches(lambda found: of_ours(found, "GPU") and of_ours(found, "CPU"))
    first = of_ours(events, "GPU")[0]
    assert first.token_ids[:BLOCK] == tokens[:BLOCK] and first.parent_block_hash is None
    assert (first.block_size, list(first.extra_keys[0])) == (BLOCK, ["pepper"])


async def test_bad_requests_are_answered_with_400_and_their_reason(started):
    for tokens, fields, why in (
        (prompt(20, 5), {"logprobs": 3}, "logprobs: the engine of kind torch"),
        (prompt(20, 5), {"plan": "best"}, "no planner 'best'"),
        (prompt(2000, 5), {}, "maximum context length is 1000"),
        ([10_000_000], {}, "token ids"),
    ):
        answer = await asked(started, tokens, **fields)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]


async def test_what_may_be_approximate_is_computed_sparsely(started):
    decoder = started.engine._core.engine.approximate
    promoted, promote = list[bool](), decoder.promote
    decoder.promote = lambda one: promoted.append(promote(one)) or promoted[-1]
    tokens = prompt(90, 8)
    exact = await completed(started, tokens, max_tokens=40)
    assert not any(promoted)
    again = await completed(started, tokens, "approx", approx=True, max_tokens=40)
    assert text_of(again) == text_of(exact)
    assert sum(promoted) == 1 and len(decoder) == 0


async def test_a_model_is_served_with_its_heads_as_measured(tmp_path):
    text, out = tmp_path / "text", tmp_path / "heads.json"
    text.write_text("\n".join(TEXTS), encoding="utf-8")
    model, app = make_tiny_model(tmp_path / "tiny", TEXTS), typer.Typer()
    app.command()(heads)
    given = [str(model), "--text", str(text), "--out", str(out), "--texts", "2", "--tokens", "256"]
    done = CliRunner().invoke(app, [*given, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["pieces"], facts["kv_heads"], facts["out"]) == (2, 2, str(out))
    shape = read_config(model).shape
    measured = read_heads(out, shape)
    assert measured.importance.max() > 0 and measured.similarity.max() <= 1
    assert measured.codes.balance.shape == (2, 1, 32, 32)
    async with running(Bench(tmp_path, model, heads=measured)) as bench:
        tokens = prompt(90, 8)
        exact = await completed(bench, tokens, max_tokens=40)
        again = await completed(bench, tokens, "approx", approx=True, max_tokens=40)
        assert text_of(again) == text_of(exact)
        cache = bench.engine._core.engine.approximate._sparse.cache
        want = thresholds(measured.kv_importance(1), 0.8, 3.0)[1]
        assert cache._tau[1].tolist() == pytest.approx(want.tolist())
        assert cache.counts().lookups > 0


async def test_a_stop_string_ends_the_answer_early(started):
    tokens = prompt(40, 6)
    whole = await completed(started, tokens, max_tokens=20)
    text = text_of(whole)
    stop = text[len(text) // 2 :][:3]
    cut = await completed(started, tokens, max_tokens=20, stop=[stop])
    assert text_of(cut) == text[: text.find(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def test_a_client_that_leaves_frees_everything(started):
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    given = {"type": "token", "prompt_token_ids": prompt(60, 7)}
    stream = started.engine._engine_client.generate(given, params, "left")
    await anext(stream)
    await stream.aclose()
    runner = started.engine._core.runner
    for _ in range(200):
        if not runner.call(lambda engine: engine.busy).result(20):
            break
    runner.call(check_engine).result(20)
    await started.engine.check_health()


async def test_rates_are_known_at_the_start_measured_or_by_law(started):
    rates = rates_from_measured(started.engine.rates)
    assert rates.load_token_s > 0 and rates.prefill_s(100, 0) > 0
    used = started.engine._core.runner.call(lambda engine: engine.planning.rates).result(20)
    assert used.load_token_s == pytest.approx(rates.load_token_s)


async def test_activations_take_their_room_from_the_same_host_memory():
    shape = model_shape("opt-6.7b")  # activations are half as long as the KV
    assert host_blocks(shape, 300, 0.0) == (300, 0)
    assert host_blocks(shape, 300, 1.0) == (200, 200)
    assert host_blocks(shape, 300, 1.0, keep_kv=False) == (0, 600)
    assert host_blocks(shape, 300, 0.5, keep_kv=False) == (200, 200)


async def test_activations_on_the_device_take_no_host_memory():
    shape = model_shape("opt-6.7b")
    assert host_blocks(shape, 300, 0.5, keep_kv=False, on_device=60) == (220, 160)
    assert host_blocks(shape, 300, 1.0, keep_kv=False, on_device=60) == (0, 600)
    # More on the device than the share allows stay unused.
    assert host_blocks(shape, 300, 0.1, keep_kv=False, on_device=600) == (300, 0)


@pytest.mark.parametrize(
    ("planner", "share", "refused", "weights", "on_device"),
    [
        ("host-kvpr", 1.0, "host-hybrid", {}, 0),
        ("host-hybrid", 0.75, "host-kv", {}, 0),
        ("host-hybrid", 0.0, "host-kv", {}, 0),
        ("host-kvpr", 1.0, "host-hybrid", {"place": "host"}, 0),
        ("host-hybrid", 0.75, "host-kv", {"place": "host", "share": 0.5, "part": "mlp"}, 9),
        ("host-hybrid", 0.0, "host-kv", {"place": "host"}, 9),
    ],
)
async def test_engine_has_hugging_faces_logits_for_contexts_in_host(
    tmp_path, planner, share, refused, weights, on_device
):
    """Through the body that the decider sends, in double precision, to 1e-10."""
    model = hf.save(hf.reference("opt"), tmp_path / "opt")
    for file in make_tiny_model(tmp_path / "tiny", TEXTS).glob("tokenizer*"):
        shutil.copy(file, model)
    shape = read_config(model).shape
    limits = EngineLimits(500, BLOCK, 24, 0, 256, 8, "float64")
    changes = {"act_share": share, "weights": weights, "act_device_blocks": on_device}
    given = EngineSettings(kind="torch", planner=planner, cpu_threads=1, **changes)
    bench = Bench(tmp_path, model, shape, limits=limits, engine=given)
    async with running(bench):
        runner, scores = bench.engine._core.engine._runner, {}
        compute = runner.compute

        def recorded(chunks):
            logits = compute(chunks)
            for one, row in logits.items():
                scores.setdefault(one, {})[chunks[one].stop] = row
            return logits

        runner.compute = recorded
        # The last one is longer than the device's 24 blocks.
        lengths = 150, 150, 430
        prompts = [np.random.default_rng(n).integers(3, 96, n).tolist() for n in lengths]
        answers = await asyncio.gather(
            *(completed(bench, each, f"r{i}", max_tokens=20) for i, each in enumerate(prompts))
        )
        assert all(answer["usage"]["completion_tokens"] == 20 for answer in answers)
        assert len(scores) == 3
        for one, rows in scores.items():
            want = hf.logits(hf.reference("opt"), one.tokens)
            assert one.resides == planner and len(rows) >= 20
            assert all((row - want[stop - 1]).abs().max() <= 1e-10 for stop, row in rows.items())
        engine = bench.engine._core.engine
        assert engine.mover.counters["h2d"].copied_bytes > 0 and not engine.batcher.preemptions
        arena = engine.arena
        assert on_device <= arena.size.act_device and not arena.pools["act", "device"].used
        answer = await asked(bench, prompts[0], plan=refused)
        assert answer.status_code == 400 and f"no planner '{refused}' here" in answer.text


async def test_given_device_is_rays_gpu_and_hides_the_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert given_device(1, ["2"], environment) == torch.device("cuda", 0)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"


async def test_given_device_is_the_cpu_when_ray_gave_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    environment = {}
    assert given_device(0, (), environment) == torch.device("cpu")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


async def test_a_gpu_that_is_not_there_is_named_with_the_remedy():
    with pytest.raises(ValueError, match="Ray gave this worker no GPU"):
        given_device(1, [], {})
    with pytest.raises(ValueError, match=r"GPU 3, and torch .* cannot use it.*nvidia-smi"):
        given_device(1, [3], {})
