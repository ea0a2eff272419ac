"""The emulated engine behind vLLM's application: every API's bodies in and answers out; its blocks
and faults are told as any engine tells them. Durations are not tested, only what follows from
them."""

import asyncio
import json
import time
from types import SimpleNamespace

import msgspec
import openai
import pytest
import pytest_asyncio
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import RequestOutputKind

from kappa.silicon import silicon_table
from kappa_workers import generated
from kappa_workers.paced import emulated_engine
from kappa_workers.paced.emulated_engine import WORD, EmulatedEngine, EngineFaults, FaultsFile
from kappa_workers.vllm import output_collector
from kappa_workers.vllm.arguments import Endpoints, EngineLimits
from tests.workers.emulation import PATIENCE_MS, Heard, asking, emulated_plan, llm_config

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
BLOCK = 4
SAID = [{"role": "user", "content": "a b"}]


class Bench(Heard):
    def __init__(self, folder):
        super().__init__(folder)
        limits = EngineLimits(60, BLOCK, 17, 40 * BLOCK * 2, 16, 4, "float32")
        plan = emulated_plan("one", limits, self.ends)
        self.engine = EmulatedEngine(llm_config("m"), plan)
        self.messages, self.batches, self.numbers = [], [], []

    async def post(self, path, **fields):
        return await self.client.post(f"/v1/{path}", json={"model": "m", **fields})

    async def complete(self, tokens, name="r", **fields):
        """An answer of three tokens to a prompt in tokens."""
        words = {"kappa_request_id": name}
        body = {"prompt": list(tokens), "vllm_xargs": words, "max_tokens": 3, **fields}
        answer = await self.post("completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def told(self, kind):
        while not any(m["kind"] == kind for m in self.messages):
            self.hear(f"no {kind} was told")
        return [m for m in self.messages if m["kind"] == kind]

    def hear(self, why="nothing more was told"):
        """Take one message more."""
        assert self.stats.poll(PATIENCE_MS), why
        self.messages.append(msgspec.msgpack.decode(self.stats.recv()))

    def drain_kv(self):
        while self.kv.poll(500):
            _, number, payload = self.kv.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self.batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))
        return [event for batch in self.batches for event in batch.events]


@pytest_asyncio.fixture
async def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("KAPPA_EMULATED_FAULTS", str(tmp_path / "faults.json"))
    made = Bench(tmp_path)
    await made.engine.start()
    made.await_events()
    async with asking(made.engine) as made.client:
        yield made
    await made.engine.shutdown()
    made.close()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_answer_has_the_requested_tokens_and_names_the_engine(bench):
    answer = await bench.complete(range(10))
    assert answer["choices"][0]["text"] == WORD * 3 and answer["system_fingerprint"] == "emulated"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (10, 3)


async def test_a_chat_is_streamed_and_ends(bench):
    answer = await bench.post(
        "chat/completions", messages=SAID, max_tokens=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = [e.removeprefix("data: ") for e in answer.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    texts = [c["choices"][0]["delta"]["content"] for c in chunks if c["choices"]]
    assert texts[0] == "" and "".join(texts) == WORD * 3
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_every_api_is_answered(bench):
    there = {"base_url": "http://worker/v1", "api_key": "none", "http_client": bench.client}
    ours = openai.AsyncOpenAI(**there)
    response = await ours.responses.create(model="m", input="a b", max_output_tokens=3)
    assert (response.output_text, response.usage.output_tokens) == (WORD * 3, 3)
    async with ours.responses.stream(model="m", input="a b", max_output_tokens=3) as stream:
        texts = [e.delta for e in [e async for e in stream] if e.type.endswith("text.delta")]
    assert "".join(texts) == WORD * 3
    message = (await bench.post("messages", messages=SAID, max_tokens=3)).json()
    assert (message["content"][0]["text"], message["stop_reason"]) == (WORD * 3, "max_tokens")
    streamed = await bench.post("messages", messages=SAID, max_tokens=3, stream=True)
    assert streamed.text.count(WORD) == 3 and "event: message_stop" in streamed.text
    counted = await bench.client.post("/tokenize", json={"model": "m", "messages": SAID})
    assert counted.json()["count"] == message["usage"]["input_tokens"]


async def test_the_tokens_of_an_answer_are_counted_where_they_leave(bench, monkeypatch):
    monkeypatch.setattr("vllm.v1.engine.async_llm.RequestOutputCollector", None)
    output_collector.install()
    tally = generated.begin()
    await bench.complete(range(10), n=2, max_tokens=5)
    assert tally.tokens == 10


async def test_a_stop_string_ends_the_answer_and_its_work(bench):
    answer = await bench.complete(range(10), stop=[WORD * 2], max_tokens=40)
    assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "stop"
    while bench.engine._core.runner.call(lambda engine: engine.busy).result(20):
        pass


async def test_a_repeated_prompt_is_found_and_reported_by_source(bench):
    await bench.complete(range(18), "first")
    again = await bench.complete(range(18), "second")
    assert cached(again) == 16
    bench.told("step")
    while len(bench.told("admit")) < 2:
        bench.hear()
    first, second = bench.told("admit")
    assert (first["device_tokens"], first["new_tokens"]) == (0, 18)
    assert (second["device_tokens"], second["new_tokens"]) == (16, 2)


async def test_totals_leave_when_the_engine_falls_idle(bench):
    await bench.complete(range(10))
    while bench.told("iterations")[-1]["iterations"] < 3:
        bench.hear("the last iterations were not told")


async def test_what_the_device_evicts_is_loaded_from_the_host(bench):
    await bench.complete(range(30), "first")
    await bench.complete(range(100, 150), "other")  # fills the device
    assert cached(await bench.complete(range(30), "again")) == 28
    assert bench.told("load")[0]["tokens"] > 0


async def test_engine_names_unsupported_fields_before_a_stream_begins(bench):
    for path, fields, named in (
        ("completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
        ("chat/completions", {"messages": SAID, "response_format": {"type": "json_object"}},
         "response_format"),
        ("messages", {"messages": SAID, "max_tokens": 3, "top_k": 5}, "top_k"),
        ("responses", {"input": "a", "presence_penalty": 1.0}, "presence_penalty"),
    ):  # fmt: skip
        for stream in (False, True):
            answer = await bench.post(path, **fields, stream=stream)
            assert answer.status_code == 400
            assert f"{named}: the emulated engine" in answer.json()["error"]["message"]


async def test_what_never_fits_is_refused(bench):
    answer = await bench.post("completions", prompt=list(range(200)), stream=True)
    assert answer.status_code == 400 and "maximum context length is 60" in answer.text


async def test_steps_of_a_node_of_silicon_last_by_its_table(monkeypatch, tmp_path):
    slept, limits = [], EngineLimits(60, BLOCK, 17, 0, 16, 4, "float32")
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(emulated_engine, "time", clock)
    ends = Endpoints(f"ipc://{tmp_path}/stats", f"ipc://{tmp_path}/kv")
    own = emulated_plan("one", limits, ends, step_s=0.5, silicon="h100_sxm/llama-3.1-8b/tp1")
    engine = EmulatedEngine(llm_config("m"), own)
    await engine.start()
    async with asking(engine) as client:
        body = {"model": "m", "prompt": list(range(10)), "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    await engine.shutdown()
    table = silicon_table("h100_sxm/llama-3.1-8b/tp1")
    steps = table.step_s([(10, 0)]), table.step_s([], 1, 10)
    assert slept[:2] == pytest.approx([0.5 + seconds for seconds in steps])


async def test_a_client_that_leaves_frees_its_room(bench):
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
    prompt = {"type": "token", "prompt_token_ids": list(range(8))}
    stream = bench.engine._engine_client.generate(prompt, params, "left")
    await anext(stream)
    await stream.aclose()
    answer = await bench.complete(range(50, 90), "next")
    assert answer["usage"]["completion_tokens"] == 3
    assert not bench.engine._core._submitted


async def test_an_engine_that_fails_ends_its_requests_and_its_health(bench):
    await bench.engine.check_health()

    def fails(rows):
        raise MemoryError("no more memory")

    bench.engine._core.engine._runner.compute = fails
    answer = await bench.post("completions", prompt=[1, 2], stream=False)
    assert answer.status_code == 500 and "no more memory" not in answer.text
    with pytest.raises(RuntimeError, match="no more memory"):
        await bench.engine.check_health()
    assert (await bench.post("completions", prompt=[1, 2])).status_code == 500
    assert (await bench.client.get("/health")).status_code == 503


async def test_loads_that_fail_are_counted_and_computed(bench, tmp_path):
    await bench.complete(range(30), "first")
    await bench.complete(range(100, 150), "other")
    (tmp_path / "faults.json").write_text('{"one": {"loads_fail": true}}')
    for number in range(20):
        answer = await bench.complete(range(30), f"again {number}")
        assert answer["usage"]["completion_tokens"] == 3
        await bench.complete(range(100, 150), f"other {number}")
        if any(m["kind"] == "faults" for m in bench.messages):
            break
        while bench.stats.poll(50):
            bench.hear()
    assert bench.told("faults")[0]["failed_loads"] >= 1


async def test_a_hung_engine_answers_nothing_until_it_goes_on(bench, tmp_path):
    (tmp_path / "faults.json").write_text('{"one": {"hangs": true}}')
    asking = asyncio.create_task(bench.complete(range(8)))
    done, _ = await asyncio.wait({asking}, timeout=1.0)
    assert not done
    (tmp_path / "faults.json").unlink()
    assert (await asking)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("fault", ["lose", "repeat", "reorder"])
async def test_every_second_batch_of_events_is_lost_repeated_or_late(bench, tmp_path, fault):
    (tmp_path / "faults.json").write_text(json.dumps({"*": {"events": fault}}))
    for number in range(5):
        await bench.complete(range(number * 50, number * 50 + 8), str(number))
    bench.drain_kv()
    first, last = bench.numbers[0], max(bench.numbers)
    assert last > 4
    expected = []
    for number in range(first + first % 2, last + 1, 2):
        before = [] if number - 1 < first or fault == "lose" else [number - 1]
        expected += {"repeat": 2 * before + [number], "lose": [number]}.get(
            fault, [number, *before]
        )
    assert bench.numbers[first % 2 :][: len(expected)] == expected


def test_a_file_of_faults_that_is_nonsense_is_no_fault(tmp_path):
    now_s = [0.0]
    path = tmp_path / "faults.json"
    file = FaultsFile(str(path), "one", lambda: now_s[0])
    for text in ("{", "[]", '{"one": 3}', '{"one": {"meteor": 1}}', '{"one": {"link_slower": 0}}'):
        path.write_text(text)
        now_s[0] += 1.0
        assert file.now() == EngineFaults()
    path.write_text('{"one": {"link_slower": 3.0}, "two": {"loads_fail": true}}')
    now_s[0] += 1.0
    assert file.now() == EngineFaults(link_slower=3.0)
    path.unlink()
    now_s[0] += 1.0
    assert file.now() == EngineFaults()
