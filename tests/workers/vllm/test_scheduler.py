"""Rules inside a real engine: same answers, no request stuck, nothing left behind.

One tiny engine in this process for the whole file, with a host tier; a test puts its rule into it.
"""

import json
import os
import random
import threading

import msgspec
import numpy as np
import pytest

from kappa.cost import StepLimit, StepModel
from kappa.model import kv_bytes_per_token
from kappa.protocol import CHARGES_KEY, DEVICE_TOKENS_KEY, HOST_TOKENS_KEY, TENANT_KEY, WEIGHT_KEY
from kappa.shapes import model_shape
from kappa_scheduler.catalogue import SCHEDULERS, rule_named
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import VRAM, Plan
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import (
    CPU_ENV,
    Endpoints,
    EngineLimits,
    engine_kwargs,
)
from kappa_workers.vllm.options import SchedulerOptions
from kappa_workers.vllm.rule_guard import GuardedRule

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK, BUDGET, SLOTS = 39, 32, 256, 8
CORPUS = [f"word{i} and number {i * 7919 % 10007}" for i in range(2000)]
VOCABULARY = 2000
MOST_STEPS = 3000
VLLMS_OWN = "vLLM's own order"
COPY = "kappa_workers.paced.link.Route.copy_layer"


class Fifo:
    """A rule in twenty lines: in order of arrival; with `skip`, past those that do not fit."""

    name, max_skips, max_wait_s = "fifo", 0, 0.0

    def __init__(self, skip=False):
        self.skip = skip
        self.waiting = []
        self.running = []
        self.events = []

    def __len__(self):
        return len(self.waiting)

    def add(self, work, now_s):
        self.waiting.append(work)
        return True

    def plan(self, room, now_s):
        plan = Plan()
        for work in list(self.waiting):
            if room.slots <= len(plan.admitted):
                break
            quote = room.memory.quote(work)
            if quote is None or quote.blocks > room.memory.available():
                plan.passed[VRAM] = plan.passed.get(VRAM, 0) + 1
                if self.skip:
                    continue
                break
            plan.admitted.append((work, room.memory.take(work, quote)))
            self.waiting.remove(work)
            self.running.append(work)
        return plan

    def _again(self, event, work):
        self.events.append(event)
        self.running.remove(work)
        self.waiting.insert(0, work)

    def returned(self, work, now_s):
        self._again("returned", work)

    def preempted(self, work, now_s):
        self._again("preempted", work)

    def landed(self, work, now_s):
        assert work in self.running
        self.events.append("landed")

    def finished(self, work, output_tokens, now_s):
        self.events.append("finished")
        self.running.remove(work)

    def aborted(self, work, now_s):
        self.events.append("aborted")
        self.waiting.remove(work)

    def ran(self, seconds, tokens, now_s, iterations=1):
        assert seconds >= 0 and sum(tokens.values()) > 0

    def victim(self, running):
        assert set(running) <= set(self.running)
        return running[0]


class Engine:
    """The engine, and what a test needs."""

    def __init__(self, engine):
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.admitted = []
        self.step_of = 0

    def use(self, make):
        """Put a rule in: a name, a function that makes one, or VLLMS_OWN."""
        guard = self.scheduler._rule
        guard._make = make if callable(make) else lambda: rule_named(make, FairConfig())
        if make == VLLMS_OWN:
            guard._make = lambda: None
        guard._in_a_row = guard.errors_total = 0
        guard.given_up = False
        assert guard.restart((), 0.0) == (make != VLLMS_OWN)
        return guard._rule

    def forget(self, host=True):
        """Empty the device's cache, and the host tier."""
        self.settle()
        assert self.scheduler.reset_prefix_cache(reset_connector=host)

    def add(self, name, prompt, max_tokens=8, tenant="t", **extra):
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True,
            extra_args={TENANT_KEY: tenant, **extra},
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self):
        """One step; the answers that it completed."""
        self.step_of += 1
        return {o.request_id: o for o in self.engine.step() if o.finished}

    def run(self):
        """Step until nothing is left; answers by name, in order of completion."""
        answers = {}
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished_requests():
                return answers
            answers |= self.step()
        raise AssertionError(f"stuck: {self.scheduler._counts()} wait, load, run")

    def settle(self):
        """Let transfers end for which no request waits."""
        for _ in range(MOST_STEPS):
            if not self.core.scheduler.has_requests():
                return
            self.engine.step()
        raise AssertionError("transfers do not end")

    def assert_empty(self):
        self.settle()
        scheduler = self.scheduler
        assert scheduler._counts() == (0, 0, 0)
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS
        assert not scheduler._works and not scheduler.requests
        guard = scheduler._rule
        assert not len(guard) and not guard._admitted
        assert guard._rule is None or not len(guard._rule)


def prompt(seed, tokens):
    return np.random.default_rng(seed).integers(10, VOCABULARY, tokens).tolist()


def tokens_of(answers):
    return {name: list(answer.outputs[0].token_ids) for name, answer in answers.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model", CORPUS, seed=0)
    before = dict(os.environ)
    os.environ.update(CPU_ENV, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    del os.environ["KAPPA_DIE_WITH_PARENT"]
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    limits = EngineLimits(1024, BLOCK, BLOCKS + 1, 8 << 20, BUDGET, SLOTS, "float32")
    given = engine_kwargs(
        limits, Endpoints("", f"ipc://{folder}/kv"), None, SchedulerOptions("fair")
    )
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(model), **given))
    yield Engine(engine)
    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def engine(started):
    started.forget()
    yield started
    started.assert_empty()


def mixed(engine):
    """Twenty prompts of all lengths, some with a common beginning; the answers."""
    shared = prompt(1, 320)
    for i in range(20):
        own = prompt(100 + i, 20 + 37 * i % 400)
        engine.add(f"m{i}", shared + own if i % 3 == 0 else own, 6 + i % 5, tenant=f"t{i % 3}")
    return tokens_of(engine.run())


@pytest.fixture(scope="module")
def reference(started):
    started.forget()
    started.use(VLLMS_OWN)
    answers = mixed(started)
    assert len(answers) == 20
    return answers


def test_what_an_engine_runs_with_is_read_back_from_its_worker(started):
    (facts,) = started.engine.collective_rpc("kappa_engine")
    folder = started.scheduler.vllm_config.model_config.model
    shape = model_shape(folder, kv_dtype="float32")
    assert facts == {
        "max_context_tokens": 1024, "block_tokens": BLOCK, "device_blocks": BLOCKS + 1,
        "max_batch_tokens": BUDGET, "max_sequences": SLOTS, "dtype": "float32", "kv_dtype": "",
        "kv_token_bytes": kv_bytes_per_token(shape),
        "weight_bytes": 0, "graphs": "NONE",
    }  # fmt: skip


@pytest.mark.parametrize("rule", SCHEDULERS)
def test_every_rule_gives_vllms_own_tokens(engine, reference, rule):
    engine.use(rule)
    assert mixed(engine) == reference
    assert engine.scheduler._rule.errors_total == 0


def test_the_engine_gives_the_tokens_of_transformers(engine):
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(engine.scheduler.vllm_config.model_config.model)
    engine.use("fair")
    ids = prompt(7, 40)
    engine.add("r", list(ids), max_tokens=24)
    (tokens,) = tokens_of(engine.run()).values()
    with torch.no_grad():
        for _ in range(24):
            ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens == ids[40:]


def test_vllm_itself_stops_at_the_head_and_a_rule_goes_past_it(engine):
    def order():
        """A long decoder holds most blocks; a big prompt waits, a small one behind it."""
        engine.add("holder", prompt(1, 600), max_tokens=30)
        engine.step(), engine.step(), engine.step()
        engine.add("big", prompt(2, 900), max_tokens=2)
        engine.add("small", prompt(3, 40), max_tokens=2)
        answers = list(engine.run())
        engine.forget()
        return answers

    engine.use(VLLMS_OWN)
    assert order() == ["holder", "big", "small"]
    engine.use(Fifo)
    assert order() == ["holder", "big", "small"]
    engine.use(lambda: Fifo(skip=True))
    assert order() == ["small", "holder", "big"]


def test_aborts_leave_nothing_behind_wherever_the_request_is(engine):
    cached = prompt(5, 512)
    engine.use("fair")
    engine.add("first", cached)
    engine.run()
    engine.forget(host=False)
    for turn in range(4):
        engine.add(f"load{turn}", cached, **{HOST_TOKENS_KEY: 480})
        for i in range(6):
            engine.add(f"run{turn}-{i}", prompt(50 + i, 200), max_tokens=40)
        for _ in range(turn):
            engine.step()
        # In turn: waiting, loading, just loaded or running, running.
        counts = engine.scheduler._counts()
        assert sum(counts) == 7
        engine.engine.abort_request([f"load{turn}", *(f"run{turn}-{i}" for i in range(6))])
        assert not engine.engine.has_unfinished_requests()
        engine.assert_empty()
        engine.forget(host=False)


def test_engine_gives_the_same_tokens_from_the_host_tier(engine):
    rule = engine.use(Fifo)
    texts = [prompt(60 + i, 480 + i) for i in range(3)]
    for i, text in enumerate(texts):
        engine.add(f"cold{i}", text)
    cold = tokens_of(engine.run())
    engine.forget(host=False)
    rule.events.clear()
    for i, text in enumerate(texts):
        engine.add(f"warm{i}", text, **{DEVICE_TOKENS_KEY: 0, HOST_TOKENS_KEY: 480})
    answers = engine.run()
    assert [answer.num_cached_tokens for answer in answers.values()] == [480] * 3
    assert list(tokens_of(answers).values()) == list(cold.values())
    assert rule.events.count("landed") == 3


@pytest.fixture
def layered(engine, monkeypatch):
    """The engine, loading by layers; and a function that has it compute a prompt, and the device
    forget it (what its blocks hold, too)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kappa_workers.paced.link import Route

    monkeypatch.setattr(engine.scheduler.connector, "_kappa_by_layer", True)
    engine.use("fair")
    engine.tier, engine.copy = get_kv_transfer_group()._kappa_tier(), Route.copy_layer

    def known(text):
        engine.add("cold", text)
        (tokens,) = tokens_of(engine.run()).values()
        engine.forget(host=False)
        for tensor in engine.tier.device:
            tensor.fill_(1)
        return tokens

    engine.known = known
    return engine


@pytest.mark.parametrize(("tokens", "cached"), [(500, 480), (480, 448)])
def test_each_layer_is_waited_for_and_the_tokens_are_the_same(layered, monkeypatch, tokens, cached):
    text = prompt(61, tokens)
    cold, tier, events = layered.known(text), layered.tier, []
    waits = [threading.Event() for _ in range(3)]
    wait, copy = tier.wait_for_layer, layered.copy

    def waited(number):
        events.append(f"wait {number}")
        waits[number].set()
        wait(number)
        events.append(f"go on {number}")

    def copied(route, number, *ids):
        assert waits[number].wait(20.0)  # none comes before somebody wants it
        copy(route, number, *ids)
        events.append(f"copy {number}")

    monkeypatch.setattr(tier, "wait_for_layer", waited)
    monkeypatch.setattr(COPY, copied)
    layered.add("warm", text)
    layered.step()
    assert layered.scheduler._counts() == (0, 0, 1), "its load takes no step of its own"
    # vLLM attends to a layer once it may go on; behind the last, the step ends.
    ends = ["wait 2", "go on 2"]
    assert events == [f"{what} {n}" for n in (0, 1) for what in ("wait", "copy", "go on")] + ends
    (answer,) = layered.run().values()
    assert list(answer.outputs[0].token_ids) == cold
    assert answer.num_cached_tokens == cached


def test_missing_layer_is_recomputed_before_blocks_are_shared(layered, monkeypatch):
    text = prompt(62, 560)  # more than two steps compute
    cold, copy, failures = layered.known(text), layered.copy, []

    def copied(route, number, *ids):
        if number == 1 and not failures:
            failures.append(number)
            raise RuntimeError("no such memory")
        copy(route, number, *ids)

    monkeypatch.setattr(COPY, copied)
    layered.add("warm", text)
    layered.step()
    (warm,) = layered.scheduler.requests.values()
    assert failures and warm.num_computed_tokens == 0
    (blocks,) = layered.scheduler.kv_cache_manager.get_blocks(warm.request_id).blocks
    assert blocks and not any(block.block_hash for block in blocks)
    layered.add("same", text)
    layered.step()
    assert 0 < warm.num_computed_tokens < 544, "it is under way"
    assert tokens_of(layered.run()) == {"warm": cold, "same": cold}
    layered.add("again", text)
    assert tokens_of(layered.run()) == {"again": cold}


def test_request_aborted_while_it_loads_leaves_nothing_behind(layered, monkeypatch):
    text = prompt(63, 500)
    cold, wait = layered.known(text), layered.tier.wait_for_layer

    def waited(number):
        if number == 1:
            layered.engine.abort_request(["warm"])
        wait(number)

    monkeypatch.setattr(layered.tier, "wait_for_layer", waited)
    layered.add("warm", text)
    layered.step()
    monkeypatch.undo()
    assert not layered.engine.has_unfinished_requests()
    layered.assert_empty()
    layered.add("again", text)
    assert tokens_of(layered.run()) == {"again": cold}


def test_who_is_not_alone_loads_ahead_of_its_prompt(layered):
    texts = [prompt(64 + i, 480 + i) for i in range(2)]
    cold = [layered.known(text) for text in texts]
    for i, text in enumerate(texts):
        layered.add(f"{i}", text)
    layered.step()
    _, loading, running = layered.scheduler._counts()
    assert loading and not running
    assert tokens_of(layered.run()) == {"0": cold[0], "1": cold[1]}


def test_no_newcomer_starts_while_a_loaded_request_lacks_blocks(engine, monkeypatch):
    """vLLM's pull request 57841: otherwise holders of blocks can wait for one another for ever."""
    from vllm.v1.request import RequestStatus

    from kappa_workers.paced.link import Link
    from kappa_workers.vllm.load_sources import LOAD

    may_load, copy = threading.Event(), Link._copy
    monkeypatch.setattr(
        Link, "_copy",
        lambda link, piece: (piece.transfer.direction != LOAD or may_load.wait(20))
        and copy(link, piece),
    )  # fmt: skip
    engine.use(lambda: Fifo(skip=True))
    texts = [prompt(90 + i, 400) for i in range(3)]
    for i, text in enumerate(texts):
        engine.add(f"cold{i}", text, max_tokens=1)
    engine.run()
    engine.forget(host=False)
    for i, text in enumerate(texts):
        engine.add(f"held{i}", [*text, *prompt(94 + i, 150)], 20, **{HOST_TOKENS_KEY: 384})
        for j in range(4):
            engine.add(f"new{i}-{j}", prompt(200 + 10 * i + j, 100 + 60 * j), 20)
    scheduler, schedule, held_up = engine.scheduler, engine.scheduler.schedule, []

    def watched(*args):
        output = schedule(*args)
        unblocked = [r for r in scheduler.held if r.status == RequestStatus.WAITING]
        left = [request.request_id for request in unblocked if request.num_computed_tokens]
        started = [new.req_id for new in output.scheduled_new_reqs if not new.num_computed_tokens]
        held_up.extend((left, started) for _ in range(bool(left and started)))
        return output

    scheduler.schedule = watched
    try:
        answers = {}
        for _ in range(12):  # meanwhile newcomers take what they may
            answers |= engine.step()
        may_load.set()
        answers |= engine.run()
    finally:
        del scheduler.schedule
    assert len(answers) == 15 and not held_up
    assert [answers[f"held{i}"].num_cached_tokens for i in range(3)] == [384] * 3


def test_engine_measures_itself_and_keeps_its_host_tier(engine):
    text = prompt(70, 500)
    engine.add("cold", text)
    cold = tokens_of(engine.run())
    engine.settle()
    worker = engine.core.model_executor.driver_worker.worker
    caches = worker.model_runner.kv_caches
    assert any(cache.any() for cache in caches)
    prior = StepModel(1e-5, 1e-9, 1e-3, 1e-7).to_dict()
    found = worker.kappa_profile({
        "sizes_bytes": [1 << 12], "hidden": 64, "intermediate": 256, "dtype": "float32",
        "engine": {"prior": prior, "budget_s": 4.0},
    })  # fmt: skip
    assert found["unmeasured"] == []
    # Blocks of both tensors that the tiny model's layers share, as many at a time as there are.
    rows = found["h2d"]
    assert [row["blocks"] for row in rows][:5] == [1, 2, 4, 8, 16]
    assert {row["bytes"] / row["blocks"] for row in (*rows, *found["d2h"])} == {rows[0]["bytes"]}
    assert found["h2d_bytes_per_s"] > 0 and found["d2h_bytes_per_s"] > 0
    assert found["peaks"]["h2d_bytes_per_s"] != found["h2d_bytes_per_s"]
    step = found["step"]
    assert step["steps"] > 10 and step["token_s"] > 0 and step["error"] < step["prior_error"]
    assert not worker.model_runner.requests
    assert not any(cache.any() for cache in caches)  # nothing that is not a number
    engine.forget(host=False)
    engine.add("warm", text, **{DEVICE_TOKENS_KEY: 0, HOST_TOKENS_KEY: 480})
    answers = engine.run()
    assert answers["warm"].num_cached_tokens == 480
    assert tokens_of(answers)["warm"] == cold["cold"]


def test_scheduler_reads_load_rates_once_they_are_measured(engine, tmp_path):
    scheduler, profile = engine.scheduler, tmp_path / "profile.json"
    options = SchedulerOptions("fair", profile=str(profile))
    before = scheduler._options, scheduler._rule
    scheduler._rule = GuardedRule(options.make_rule, scheduler._rule_failed)
    scheduler._rule.restart((), 0.0)
    scheduler._options, scheduler._measured = options, False
    assert scheduler._rule._rule._link._rates is None
    profile.write_text(json.dumps({"load_token_s": 2e-3, "load_fixed_s": 0.5}))
    engine.add("first", prompt(71, 40))
    assert scheduler._rule._rule._link.load_s(100) == pytest.approx(0.7)
    assert len(engine.run()) == 1
    engine.settle()
    scheduler._options, scheduler._rule = before


def test_long_prompt_is_computed_in_parts_beside_a_decode(engine, monkeypatch, tmp_path):
    # A token 1 ms, one request alone 60 ms: 150 ms, with one that decodes 149 tokens: 150, a tile.
    step, scheduler = StepModel(1e-3, 0.0, 60e-3, 0.0, 0.0), engine.scheduler
    profile = tmp_path / "profile.json"
    options = SchedulerOptions("fair", profile=str(profile))
    assert options.make_limit() is None
    profile.write_text(json.dumps({"step": {**step.to_dict(), "error": 0.1, "prior_error": 0.2}}))
    assert options.make_limit() == StepLimit(step, FairConfig().step_factor)
    assert SchedulerOptions("fcfs", step=step.to_dict()).make_limit() is None
    assert SchedulerOptions("fair", {"step_factor": 0.0}, step=step.to_dict()).make_limit() is None
    monkeypatch.setattr(scheduler, "_limit", options.make_limit())
    parts, schedule = [], scheduler.schedule

    def watched(*given):
        output = schedule(*given)
        parts.append(dict(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    engine.add("decodes", prompt(81, 40), 30)
    for _ in range(3):
        engine.step()
    engine.add("long", prompt(82, 600), 2)
    answers = tokens_of(engine.run())
    assert {name: len(tokens) for name, tokens in answers.items()} == {"decodes": 30, "long": 2}
    long = [next(v for k, v in part.items() if "long" in k) for part in parts
            if any("long" in k for k in part)]  # fmt: skip
    assert long[:4] == [127] * 4 and sum(long[:5]) == 600
    monkeypatch.undo()
    engine.add("alone", prompt(82, 600), 2)
    assert tokens_of(engine.run())["alone"] == answers["long"]
    scheduler._step_tokens(0.0)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"load_token_s": -1, "load_fixed_s": 0}'])
def test_measured_link_is_unknown_without_loads_in_the_profile(tmp_path, text):
    from kappa_workers.vllm.options import measured_link

    path = tmp_path / "profile.json"
    path.write_text(text)
    assert measured_link(str(path)) is None
    assert measured_link("") is None and measured_link(str(tmp_path)) is None


def test_a_wrong_estimate_of_the_host_tier_does_no_harm(engine):
    rule, text = engine.use(Fifo), prompt(70, 300)
    engine.add("cold", text, **{HOST_TOKENS_KEY: 288})
    (cold,) = tokens_of(engine.run()).values()
    assert "landed" in rule.events
    engine.forget(host=False)
    engine.add("warm", text)  # it is not expected there
    answers = engine.run()
    assert tokens_of(answers)["warm"] == cold
    assert answers["warm"].num_cached_tokens == 288


def test_two_that_want_the_same_blocks_load_them_once(engine):
    rule = engine.use("fair")
    text = prompt(80, 500)
    engine.add("cold", text)
    (cold,) = tokens_of(engine.run()).values()
    engine.forget(host=False)
    for name in "ab":
        engine.add(name, text, **{HOST_TOKENS_KEY: 480})
    engine.add("c", text[:200], **{HOST_TOKENS_KEY: 192})
    answers = engine.run()
    assert tokens_of(answers)["a"] == tokens_of(answers)["b"] == cold
    assert rule.max_wait_s < 60


@pytest.mark.parametrize("rule", ["fair", Fifo])
def test_preempted_request_returns_and_gives_the_same_tokens(engine, rule):
    def answers():
        for i in range(8):
            engine.add(f"p{i}", prompt(20 + i, 130), max_tokens=120)
        return tokens_of(engine.run())

    engine.use(VLLMS_OWN)
    before = engine.scheduler._log._preemptions
    expected = answers()
    assert engine.scheduler._log._preemptions > before
    engine.forget()
    used = engine.use(rule)
    assert answers() == expected
    assert engine.scheduler._rule.errors_total == 0
    if isinstance(used, Fifo):
        assert "preempted" in used.events


def test_the_rules_victim_is_the_one_that_loses_its_blocks(engine):
    lost = []

    class Picky(Fifo):
        def victim(self, running):
            return next(work for work in running if work.tenant == "meek")

        def preempted(self, work, now_s):
            lost.append(work.tenant)
            super().preempted(work, now_s)

    engine.use(Picky)
    engine.add("meek", prompt(30, 130), max_tokens=250, tenant="meek")
    for i in range(7):
        engine.add(f"bold{i}", prompt(31 + i, 130), max_tokens=120, tenant="bold")
    engine.run()
    assert lost and set(lost) == {"meek"}


def unsound(seed, share):
    """A rule that raises now and then, in any of its methods."""
    rule, chance = Fifo(skip=True), random.Random(seed)

    def wrapped(name, method):
        def call(*arguments):
            if chance.random() < share:
                raise RuntimeError(f"{name} is unsound")
            return method(*arguments)

        return call

    for name in ("add", "plan", "finished", "preempted", "ran", "landed", "returned"):
        setattr(rule, name, wrapped(name, getattr(rule, name)))
    return rule


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_a_rule_that_raises_stops_nobody(engine, reference, share):
    seeds = iter(range(10_000))
    engine.use(lambda: unsound(next(seeds), share))
    assert mixed(engine) == reference
    guard = engine.scheduler._rule
    assert guard.errors_total > 1
    assert guard.given_up or share < 1.0


def test_a_rule_that_admits_nobody_is_caught(engine, monkeypatch):
    class Lazy(Fifo):
        def plan(self, room, now_s):
            return Plan()

    monkeypatch.setattr("kappa_workers.vllm.rule_guard._STALL_S", 0.05)
    engine.use(Lazy)
    engine.add("a", prompt(1, 50))
    assert set(engine.run()) == {"a"}
    assert engine.scheduler._rule.errors_total == 1


def test_a_rule_that_admits_what_does_not_fit_is_corrected(engine):
    class Greedy(Fifo):
        def plan(self, room, now_s):
            admitted, self.waiting = self.waiting, []
            self.running += admitted
            return Plan([(work, room.memory.quote(work)) for work in admitted])

    rule = engine.use(Greedy)
    for i in range(20):
        engine.add(f"g{i}", prompt(i, 300))
    assert len(engine.run()) == 20
    assert "returned" in rule.events
    assert engine.scheduler._rule.errors_total == 0


def test_rule_receives_charges_and_weights_of_the_decider(engine):
    received = []

    class Receiving(Fifo):
        def charged_elsewhere(self, charges, weights, now_s):
            received.append((dict(charges), dict(weights)))

    rule = engine.use(Receiving)
    engine.add("a", prompt(1, 40), tenant="x",
               **{WEIGHT_KEY: 2.5, CHARGES_KEY: '{"y": [1.0, 2.0, 3.0]}'})  # fmt: skip
    engine.add("b", prompt(2, 40), tenant="y", **{WEIGHT_KEY: "heavy", CHARGES_KEY: "{broken"})
    assert [work.tenant for work in rule.waiting] == ["x", "y"]
    engine.run()
    assert received == [({"y": (1.0, 2.0, 3.0)}, {"x": 2.5}), ({}, {})]


def test_malformed_metadata_changes_no_answer(engine, reference):
    """By way of vLLM's own front end, as a client's words come: no rule fails, all are answered."""
    engine.use("fair")
    for i, value in enumerate(["x", 7, [1, 2], -1.5, float("nan"), 2**62, '{"a": [1, 2]}']):
        for key in ("kv_transfer_params", WEIGHT_KEY, CHARGES_KEY, HOST_TOKENS_KEY, TENANT_KEY):
            engine.add(f"odd{i}{key}", prompt(300 + i, 40), max_tokens=1, **{key: value})
    answers = mixed(engine)
    assert {name: answers[name] for name in reference} == reference
    assert len(answers) == 20 + 7 * 5
    assert engine.scheduler._rule.errors_total == 0


def test_request_without_a_tenant_fails_only_behind_a_decider(engine, monkeypatch):
    engine.use("fair")
    engine.add("without", prompt(1, 40), tenant=None)
    assert len(tokens_of(engine.run())["without"]) == 8, "it is the default tenant's"
    required = msgspec.structs.replace(engine.scheduler._options, tenant_required=True)
    monkeypatch.setattr(engine.scheduler, "_options", required)
    engine.add("without", prompt(1, 40), tenant=None)
    engine.add("alice's", prompt(2, 40), tenant="alice")
    answers = engine.run()
    assert answers["without"].outputs[0].finish_reason == "error"
    assert not tokens_of(answers)["without"] and len(tokens_of(answers)["alice's"]) == 8


def test_charges_and_fills_reach_the_stats_channel(engine):
    messages = []
    engine.use("fair")
    engine.scheduler._log._send = messages.append
    engine.scheduler._log._sent_charges.clear()
    mixed(engine)
    engine.settle()
    last = messages[-1]
    assert (last["waiting"], last["loading"], last["running"]) == (0, 0, 0)
    assert 0 < last["budget_fill"] <= last["queued_iterations"] <= last["iterations"]
    charged = {t: c for message in messages for t, c in message["charges"].items()}
    assert {"t0", "t1", "t2"} <= set(charged)
    assert all(vram_s > 0 and gpu_s > 0 for vram_s, gpu_s, _ in charged.values())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rule": "no-such"}, "unknown scheduler 'no-such'.*fair"),
        ({"rules": "fair"}, "kappa_scheduler: .*unknown field `rules`"),
        ({"config": {"windows": 1}}, "windows"),
        ({"link": {"token_s": -1.0}}, "token_s is -1"),
        ({"rule": "p_pas"}, "'p_pas' bounds steps of simulated engines alone"),
    ],
)
def test_options_are_refused_when_wrong(given, reason):
    with pytest.raises(ValueError, match=reason):
        SchedulerOptions.read({"kappa_scheduler": given})
