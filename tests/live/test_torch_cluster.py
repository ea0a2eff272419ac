"""A cluster of our own engine: one, so that a prompt comes back to what it left there."""

import json

import anthropic
import httpx
import openai
import pytest

from tests.live.conftest import Live, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

CONFIG = """
engine:
  {kind: torch, device_blocks: 200, max_context_tokens: 6144, cpu_threads: 1, approx: ask,
   sparse: {lanes: 2}}
nodes:
  - {name: one, profile: pcie, paced: false}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch-cluster")
    with serving(folder, CONFIG) as ready:
        yield Live(ready, folder / "router.jsonl")


def long_text(name):
    return " ".join(f"{name} counts {i * 7919 % 1000}." for i in range(400))


def ask(own, text, plan=None, approx=None, **fields):
    raw = own.openai.chat.completions.with_raw_response.create(
        model=own.model,
        messages=[{"role": "user", "content": text}],
        **{"max_tokens": 8, "temperature": 0.0, **fields},
        extra_body={"ignore_eos": True, **({"approx": approx} if approx else {})},
        extra_headers={"x-kappa-plan": plan} if plan else {},
    )
    return raw.parse(), raw.headers


SAID = [{"role": "user", "content": "hello"}]


def test_every_api_is_answered_whole_and_in_pieces(own):
    ask = {"model": own.model, "extra_body": {"ignore_eos": True}}
    chats, texts = own.openai.chat.completions, own.openai.completions
    raw = chats.with_raw_response.create(**ask, messages=SAID, max_tokens=6)
    prompt_tokens = raw.parse().usage.prompt_tokens
    assert raw.parse().usage.completion_tokens == 6 and "x-kappa-engine" not in raw.headers
    text = texts.create(**ask, prompt="hello", max_tokens=6)
    assert text.usage.completion_tokens == 6
    assert list(texts.create(**ask, prompt="hello", max_tokens=6, stream=True))
    ask.pop("extra_body")
    response = own.openai.responses.create(**ask, input="hello", max_output_tokens=6)
    assert response.usage.output_tokens <= 6
    with own.openai.responses.stream(**ask, input="hello", max_output_tokens=6) as stream:
        ends = [event.type for event in stream]
    assert ends[-1] in ("response.completed", "response.incomplete")
    client = anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0)
    ask = {"model": own.model, "messages": SAID, "max_tokens": 6}
    assert client.messages.create(**ask).usage.output_tokens <= 6
    with client.messages.stream(**ask) as stream:
        assert stream.get_final_message().usage.output_tokens <= 6
    assert client.messages.count_tokens(model=own.model, messages=SAID).input_tokens > 0
    record = own.decision(raw.headers["x-request-id"])
    for told in (record["predicted"], record["actual"]):
        sources = (told[f"{source}_tokens"] for source in ("device", "cached", "new"))
        assert sum(sources) == prompt_tokens, "worker and decider tokenize alike"
    own.wait_idle()


def test_the_router_asks_the_engines_own_planner(own):
    for row in own.nodes():
        assert (row["engine"], row["planner"]) == ("torch", "auto")
        assert row["kappa_eff"] is None or row["kappa_eff"] > 0
    _, headers = ask(own, long_text("Ada"))
    assert headers["x-kappa-plan"]
    explained = own.http.post(
        "/v1/route", json={"model": own.model, "messages": [{"role": "user", "content": "x"}]}
    ).json()
    assert all(c["plan"] for c in explained["candidates"])


def test_evicted_prompts_come_back_by_the_plan_that_is_asked_for(own):
    first, _ = ask(own, long_text("Bea"))
    for number in range(12):
        ask(own, long_text(f"filler {number}"), max_tokens=1)
    for plan in ("kv", "recompute"):
        again, _ = ask(own, long_text("Bea"), plan)
        assert again.choices[0].message.content == first.choices[0].message.content


def test_a_prompt_that_stays_in_host_memory_is_attended_to_there(own):
    first, _ = ask(own, long_text("Dan"), max_tokens=24)
    for number in range(12):
        ask(own, long_text(f"other {number}"), max_tokens=1)
    again, _ = ask(own, long_text("Dan"), "cpu", max_tokens=24)
    assert again.choices[0].message.content == first.choices[0].message.content
    details = again.usage.prompt_tokens_details
    assert details.cached_tokens > 0.9 * again.usage.prompt_tokens


def test_an_approximate_answer_is_given_to_who_asks_and_says_so(own):
    _, headers = ask(own, long_text("Cid"), max_tokens=32)
    assert "x-kappa-approx" not in headers
    raw = own.openai.chat.completions.with_raw_response.create(
        model=own.model, messages=[{"role": "user", "content": long_text("Cid")}], max_tokens=32,
        temperature=0.0, extra_body={"ignore_eos": True}, extra_headers={"x-kappa-approx": "ok"},
    )  # fmt: skip
    assert raw.headers["x-kappa-approx"] == "ok"
    assert raw.parse().usage.completion_tokens == 32
    with pytest.raises(openai.BadRequestError, match="give 'ok'"):
        ask(own, "Hello", approx="perhaps")


def test_streams_errors_and_plans_are_as_openais(own):
    with own.openai.chat.completions.create(
        model=own.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=5,
        stream=True, temperature=0.0, extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) >= 1
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="no planner"):
        ask(own, "Hello", "best")
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        ask(own, "Hello", logprobs=True)
    own.wait_idle()
    metrics = httpx.get(f"{own.url}/metrics", timeout=30).text
    assert "kappa_misused_blocks_total" in metrics
    assert own.metric("kappa_misused_blocks_total") == own.metric("kappa_failed_loads_total") == 0
    assert json.loads(json.dumps(own.nodes()))
