"""What a replica does around its engine: it looks after its health, and has it measured.

The replica is real but for its start: no Ray, and an engine that does what a test says.
"""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio
from ray.serve.llm.openai_api_models import CompletionRequest

from kappa.protocol import TO_BODY_HEADER, TO_SECRET_HEADER, EngineDiedError
from kappa.settings.engine import EngineSettings
from kappa.settings.routing import ObservingSettings
from kappa.shapes import model_shape
from kappa_workers.http_gate import WorkerGate
from kappa_workers.in_flight import InFlight
from kappa_workers.measuring import _alone
from kappa_workers.paced.emulated_engine import EmulatedEngine
from kappa_workers.reaper import HangWatch
from kappa_workers.replica import KappaServer, configure_logs
from kappa_workers.report_totals import ReportTotals
from kappa_workers.vllm.arguments import Endpoints, EngineLimits
from kappa_workers.vllm_plugin import LOG_ENV, log_as
from tests.workers.emulation import emulated_plan, llm_config
from tests.workers.plans import worker_plan

pytestmark = pytest.mark.vllm

PATIENCE_S = 120.0
STEP = {"kind": "step", "tokens": 1, "prefilled": [], "took_s": 0.1, "overrun": False}


class Engine:
    """Dead or not; owed: requests that it has not answered."""

    def __init__(self):
        self.error, self.owed = None, 0
        processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.owed)
        self._engine_client = SimpleNamespace(output_processor=processor)

    async def check_health(self):
        if self.error is not None:
            raise self.error


class Replica(KappaServer):
    """A replica that has started."""

    def __init__(self):
        self.engine, self._worker, self._death = Engine(), "w", ""
        here = self.here = InFlight(0.0)
        self._stream = SimpleNamespace(totals=ReportTotals("w", here), in_flight=here)
        self._hang = HangWatch(PATIENCE_S, 0.0)

    def __del__(self):
        """Nothing was started."""


def body(request_id="r", **fields):
    words = {"kappa_request_id": request_id, "kappa_gpu_s": 1.0}
    given = {"model": "m", "prompt": ["a", "b"], "vllm_xargs": words, **fields}
    return CompletionRequest.model_validate(given)


async def test_check_health_names_a_dead_engines_requests_every_time():
    replica = Replica()
    sent = [replica.here.arrived(body(name), 0.0) for name in "pq"]
    replica.engine.error = RuntimeError("EngineCore is gone")
    for name in sent:  # the second time too, though the first has left by then
        with pytest.raises(EngineDiedError, match=r"worker w: .*EngineCore is gone.*\['p', 'q'\]"):
            await replica.check_health()
        replica.here.ended(name)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets, in place of the replica's."""
    now = [0.0]
    monkeypatch.setattr("kappa_workers.replica.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def look_for(replica, clock, seconds):
    for _ in range(int(seconds)):
        clock[0] += 1.0
        await replica.check_health()


async def test_check_health_fails_when_an_engine_owes_but_does_nothing(clock):
    replica = Replica()
    replica.here.arrived(body("stuck"), 0.0)
    replica.engine.owed = 1
    # The first look sees what was there before: silence counts from then.
    await look_for(replica, clock, 1 + PATIENCE_S)
    with pytest.raises(EngineDiedError, match=r"owes 1 answers.*\['stuck'\]"):
        await look_for(replica, clock, 1)


async def test_an_engine_that_works_or_is_idle_is_healthy_however_long(clock):
    replica = Replica()
    await look_for(replica, clock, 2 * PATIENCE_S)
    replica.engine.owed = 3
    for _ in range(5):
        await look_for(replica, clock, PATIENCE_S - 1)
        replica._stream.totals.add(STEP)
    # What comes to the replica is no sign of its engine's life.
    replica.here.ended(replica.here.arrived(body("other"), 0.0))
    with pytest.raises(EngineDiedError, match="owes 3"):
        await look_for(replica, clock, 2 + PATIENCE_S)


async def test_check_health_ignores_time_in_which_the_replica_stalled(clock):
    replica = Replica()
    replica.engine.owed = 1
    await replica.check_health()
    clock[0] += 10 * PATIENCE_S
    await replica.check_health()
    await look_for(replica, clock, PATIENCE_S - 5)  # the long pause counted for 5 s


@pytest_asyncio.fixture
async def own():
    """A replica of an emulated engine, on its thread."""
    limits = EngineLimits(60, 4, 17, 0, 16, 4, "float32")
    plan = emulated_plan("w", limits, Endpoints("", ""))
    replica = Replica()
    replica.engine = EmulatedEngine(llm_config("m"), plan)
    await replica.engine.start()
    yield replica
    await replica.engine.shutdown()


async def answers(replica):
    """What its port answers."""
    app = await replica.engine.build_asgi_app()
    gate = WorkerGate(app, "secret", replica.here, replica.check_health)
    words = {"vllm_xargs": {"kappa_request_id": "r"}}
    headers = {TO_SECRET_HEADER: "secret", TO_BODY_HEADER: json.dumps(words)}
    asked = {"model": "m", "prompt": list(range(10)), "max_tokens": 3}
    through = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=through, base_url="http://worker") as client:
        return (await client.post("/v1/completions", json=asked, headers=headers)).json()


async def test_an_own_engine_that_has_answered_is_healthy_however_long(own, clock):
    for _ in range(2):
        answer = await answers(own)
        assert answer["usage"]["completion_tokens"] == 3
        await look_for(own, clock, 3 * PATIENCE_S)


async def test_an_own_engine_that_hangs_fails_the_replicas_health(own, clock):
    runner, begun, go_on = own.engine._core.engine._runner, Event(), Event()
    compute = runner.compute

    def hangs(chunks):
        begun.set()
        assert go_on.wait(20)
        return compute(chunks)

    runner.compute = hangs
    answer = asyncio.create_task(answers(own))
    try:
        assert await asyncio.to_thread(begun.wait, 20)
        await look_for(own, clock, 1 + PATIENCE_S)
        with pytest.raises(EngineDiedError, match=r"owes 1 answers.*\['r'\]"):
            await look_for(own, clock, 1)
    finally:
        go_on.set()
        await answer


async def test_check_health_finds_no_hang_before_the_announcement(clock):
    replica = Replica()
    replica._hang, replica.engine.owed = None, 1
    await look_for(replica, clock, 2 * PATIENCE_S)


def test_the_engines_processes_log_as_their_replica_does(tmp_path, monkeypatch, capsys):
    import structlog

    before = structlog.get_config()
    monkeypatch.setenv(LOG_ENV, "")
    log_file = str(tmp_path / "a|b.jsonl")
    try:
        seen = ObservingSettings(log_format="json", log_file=log_file)
        configure_logs(SimpleNamespace(observing=seen, log_level="INFO"))
        log_as(os.environ[LOG_ENV])
        structlog.get_logger("engine").info("hello", node="pcie")
    finally:
        structlog.configure(**before)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["event"] == "hello"
    assert json.loads(Path(log_file).read_text())["node"] == "pcie"


async def test_replicas_that_start_at_once_measure_in_turns(tmp_path):
    path, order = tmp_path / "profiles" / "a.lock", []

    async def measure(name):
        async with _alone(path):
            order.append(name)
            await asyncio.sleep(0.05)
            order.append(name)

    await asyncio.gather(measure("a"), measure("b"))
    assert order in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    async with _alone(tmp_path / "profiles" / "a.lock" / "not a folder"):
        order.append("without a lock")


class Measured(Replica):
    """A replica of an unpaced engine that was asked to measure: `asked`, what it was asked for."""

    def __init__(self, folder):
        super().__init__()
        limits = EngineLimits(1024, 16, 64, 1 << 20, 256, 8, "float32")
        self._plan = self._given = worker_plan(
            served=model_shape("llama-3.1-8b"), limits=limits, cache_dir=str(folder)
        )
        self._rank, self.asked, self.peak = 0, [], 1.0

    async def collective_rpc(self, method, args=(), **_):
        (request,) = args
        self.asked.append(request)
        found = {"device": "cpu", "peaks": {"x": self.peak}, "gemm": []}
        names = ("h2d_bytes_per_s", "d2h_bytes_per_s", "hbm_bytes_per_s", "flops_per_s")
        found |= dict.fromkeys(names, 9e9)
        if request.get("engine"):
            found |= {"unmeasured": [], "load_fixed_s": 1e-3, "h2d_bytes_per_s": 131072e3}
        return [found]


async def test_measure_times_the_engine_once_and_the_machine_on_demand(tmp_path):
    first = Measured(tmp_path)
    cold = (await first._measure()).measured
    assert first.asked[0]["engine"]["budget_s"] <= 20
    # 128 KiB a token: a thousandth of a second.
    assert (cold["load_token_s"], cold["peaks"]) == (pytest.approx(1e-3), {"x": 1.0})
    warm = Measured(tmp_path)
    assert (await warm._measure()).measured == cold and warm.asked == []
    warm.peak = 2.0
    again = (await warm._measure(again=True)).measured
    assert "engine" not in warm.asked[0]
    assert again == cold | {"peaks": {"x": 2.0}}
    other = Measured(tmp_path)
    other._given = replace(other._given, limits=replace(other._given.limits, max_batch_tokens=512))
    await other._measure()
    assert len(other.asked) == 1


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "[1]", "{", '{"device": "cpu"}', '{"step": {}, "h2d_bytes_per_s": NaN}'],
)
async def test_a_file_that_is_no_measurement_is_measured_anew(tmp_path, text):
    replica = Measured(tmp_path)
    good = (await replica._measure()).measured
    replica._profile_path().write_text(text)
    assert replica._cached_profile() == {}
    assert (await replica._measure()).measured == good and len(replica.asked) == 2
    step = {"error": 0.1, "prior_error": 0.2, "r2": 1.0, "token_s": 1.0}
    replica._profile_path().write_text(json.dumps(good | {"step": step}))
    assert replica._cached_profile() == {}


def limits_of(engine):
    return worker_plan(limits=EngineLimits.of(EngineSettings(**engine).on(gpus=1)))


async def read_back(plan, answer):
    replica = Replica()
    replica._plan = plan

    async def rpc(method):
        assert method == "kappa_engine"
        if isinstance(answer, Exception):
            raise answer
        return answer

    replica.collective_rpc = rpc
    return await replica._read_back()


async def test_read_back_fails_when_the_engine_tells_no_limits():
    with pytest.raises(RuntimeError, match=r"KeyError.*give engine.max_context_tokens, engine\."):
        await read_back(limits_of({"dtype": "bfloat16"}), KeyError("layout"))


async def test_an_engine_that_was_given_everything_need_not_say_it():
    given = {
        "max_context_tokens": 4096, "block_tokens": 16, "device_blocks": 1000, "dtype": "bfloat16",
        "max_batch_tokens": 2048, "max_sequences": 8,
    }  # fmt: skip
    plan = limits_of(given)
    assert await read_back(plan, KeyError("layout")) is plan
    facts = {**given, "kv_dtype": "", "kv_token_bytes": 100.0, "weight_bytes": 10**10, "graphs": ""}
    started = await read_back(plan, [{**facts, "device_blocks": 900}])
    assert started.limits.device_blocks == 900
    assert started.block_bytes == 1600
