"""The emulated engine: real bodies in, OpenAI's shapes out; its blocks and faults are told as any
engine tells them. Durations are not tested, only what follows from them."""

import asyncio
import base64
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import zmq
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.distributed.kv_events import KVEventBatch

from tests.workers.emulation import emulated_plan
from workers.own_engine.emulated import WORD, EmulatedEngine, EngineFaults, FaultsFile
from workers.vllm.arguments import Endpoints, EngineLimits

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
BLOCK = 4
PATIENCE_MS = 20_000


class Bench:
    def __init__(self, folder, faults=""):
        self.context = zmq.Context()
        self.stats = self.context.socket(zmq.PULL)
        self.stats.bind(f"ipc://{folder}/stats")
        self.kv = self.context.socket(zmq.SUB)
        self.kv.setsockopt(zmq.SUBSCRIBE, b"")
        self.kv.connect(f"ipc://{folder}/kv")
        limits = EngineLimits(60, BLOCK, 17, 40 * BLOCK * 2, 16, 4, "float32")
        ends = Endpoints(f"ipc://{folder}/stats", f"ipc://{folder}/kv")
        plan = emulated_plan("one", limits, ends)
        config = SimpleNamespace(engine_kwargs={"kappa_own": plan}, model_id="m")
        self.engine = EmulatedEngine(config)
        self.messages, self.batches, self.numbers = [], [], []

    def told(self, kind):
        while not any(m["kind"] == kind for m in self.messages):
            assert self.stats.poll(PATIENCE_MS), f"no {kind} was told"
            self.messages.append(msgspec.msgpack.decode(self.stats.recv()))
        return [m for m in self.messages if m["kind"] == kind]

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
    made.kv.poll(300)  # a subscriber hears nothing before its connection stands
    yield made
    await made.engine.shutdown()
    made.context.destroy(linger=0)


def marks(tokens, name="r"):
    packed = base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()
    return {"kappa_prompt": packed, "kappa_request_id": name}


def completion(tokens, name="r", **fields):
    return CompletionRequest(
        model="m", prompt="x", vllm_xargs=marks(tokens, name), **{"max_tokens": 3} | fields
    )


async def answers(engine, body, method="completions"):
    return [item async for item in getattr(engine, method)(body)]


async def test_an_answer_has_as_many_tokens_as_requested_and_names_the_engine(bench):
    (answer,) = await answers(bench.engine, completion(range(10)))
    assert answer.choices[0].text == WORD * 3 and answer.system_fingerprint == "emulated"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 3)


async def test_a_chat_is_streamed_token_by_token_and_ends(bench):
    body = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], vllm_xargs=marks(range(10)),
        max_tokens=3, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    text = "".join(await answers(bench.engine, body, "chat"))
    events = [e.removeprefix("data: ") for e in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]] == [
        "", WORD, WORD, WORD
    ]  # fmt: skip
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_a_repeated_prompt_is_found_and_reported_by_source(bench):
    await answers(bench.engine, completion(range(18), "first"))
    (again,) = await answers(bench.engine, completion(range(18), "second"))
    assert again.usage.prompt_tokens_details.cached_tokens == 16
    bench.told("step")
    while len(bench.told("admit")) < 2:
        bench.messages.append(msgspec.msgpack.decode(bench.stats.recv()))
    first, second = bench.told("admit")
    assert (first["device_tokens"], first["new_tokens"]) == (0, 18)
    assert (second["device_tokens"], second["new_tokens"]) == (16, 2)


async def test_totals_leave_when_the_engine_falls_idle(bench):
    await answers(bench.engine, completion(range(10)))
    while bench.told("iterations")[-1]["iterations"] < 3:
        assert bench.stats.poll(PATIENCE_MS), "the last iterations were not told"
        bench.messages.append(msgspec.msgpack.decode(bench.stats.recv()))


async def test_what_the_device_evicts_is_loaded_from_the_host(bench):
    await answers(bench.engine, completion(range(30), "first"))
    await answers(bench.engine, completion(range(100, 150), "other"))  # fills the device
    (again,) = await answers(bench.engine, completion(range(30), "again"))
    assert again.usage.prompt_tokens_details.cached_tokens == 28
    assert bench.told("load")[0]["tokens"] > 0


@pytest.mark.parametrize("fields", [{"logprobs": 3}, {"n": 2}])
async def test_what_it_cannot_do_is_refused_by_name(bench, fields):
    (answer,) = await answers(bench.engine, completion(range(5), **fields))
    assert answer.error.code == 400 and next(iter(fields)) in answer.error.message


async def test_what_never_fits_is_refused(bench):
    (answer,) = await answers(bench.engine, completion(range(200)))
    assert answer.error.code == 400 and "a prompt of 200 tokens" in answer.error.message


async def test_a_node_that_is_not_paced_is_refused(tmp_path):
    limits = EngineLimits(60, BLOCK, 17, 0, 16, 4, "float32")
    own = emulated_plan("one", limits, Endpoints("", ""), source="catalogue")
    config = SimpleNamespace(engine_kwargs={"kappa_own": own}, model_id="m")
    with pytest.raises(ValueError, match="pcie is not paced"):
        await EmulatedEngine(config).start()


async def test_a_client_that_leaves_frees_its_room(bench):
    stream = bench.engine.completions(completion(range(8), max_tokens=50, stream=True))
    await anext(stream)
    await stream.aclose()
    (answer,) = await answers(bench.engine, completion(range(50, 90), "next"))
    assert answer.usage.completion_tokens == 3


async def test_loads_that_fail_are_counted_and_computed(bench, tmp_path):
    await answers(bench.engine, completion(range(30), "first"))
    await answers(bench.engine, completion(range(100, 150), "other"))
    (tmp_path / "faults.json").write_text('{"one": {"loads_fail": true}}')
    for number in range(20):
        (answer,) = await answers(bench.engine, completion(range(30), f"again {number}"))
        assert answer.usage.completion_tokens == 3
        await answers(bench.engine, completion(range(100, 150), f"other {number}"))
        if any(m["kind"] == "faults" for m in bench.messages):
            break
        while bench.stats.poll(50):
            bench.messages.append(msgspec.msgpack.decode(bench.stats.recv()))
    assert bench.told("faults")[0]["failed_loads"] >= 1


async def test_a_hung_engine_answers_nothing_until_it_goes_on(bench, tmp_path):
    (tmp_path / "faults.json").write_text('{"one": {"hangs": true}}')
    asking = asyncio.create_task(answers(bench.engine, completion(range(8))))
    done, _ = await asyncio.wait({asking}, timeout=1.0)
    assert not done
    (tmp_path / "faults.json").unlink()
    (answer,) = await asking
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("fault", ["lose", "repeat", "reorder"])
async def test_every_second_batch_of_events_is_lost_repeated_or_late(bench, tmp_path, fault):
    (tmp_path / "faults.json").write_text(json.dumps({"*": {"events": fault}}))
    for number in range(5):
        await answers(bench.engine, completion(range(number * 50, number * 50 + 8), str(number)))
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
