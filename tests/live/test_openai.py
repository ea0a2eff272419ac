"""The OpenAI endpoints as the official client sees them, and what we add to the answers."""

import json

import anthropic
import openai
import pytest

pytestmark = pytest.mark.live

BLOCK_TOKENS = 32


def chat(live, text, **options):
    options = {"max_tokens": 4, "temperature": 0.0} | options
    return live.openai.chat.completions.with_raw_response.create(
        model=live.model, messages=[{"role": "user", "content": text}], **options
    )


def test_the_cluster_was_warm_when_it_said_ready(live):
    nodes = {row["node"] for row in live.nodes_at_start}
    assert {record["node"] for record in live.decisions_at_start} == nodes
    assert {record["end"] for record in live.decisions_at_start} == {"done"}


def test_models_lists_and_describes_the_model(idle):
    names = [model.id for model in idle.openai.models.list()]
    assert names == [idle.model]
    assert idle.openai.models.retrieve(idle.model).id == idle.model
    with pytest.raises(openai.NotFoundError) as caught:
        idle.openai.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_a_chat_answers_with_usage_and_headers(idle):
    raw = chat(idle, "What does the rooflined river say? " * 20)
    answer = raw.parse()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert 1 <= answer.usage.completion_tokens <= 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert raw.headers["x-kappa-paced"] == "true"
    assert raw.headers["x-kappa-node"] in {row["node"] for row in idle.nodes()}
    assert float(raw.headers["x-kappa-predicted-ttft-ms"]) > 0
    record = idle.decision(raw.headers["x-request-id"])
    assert record["node"] == raw.headers["x-kappa-node"]
    assert record["reason"] == raw.headers["x-kappa-reason"]
    assert f"{record['ratio']:.2f}" == raw.headers["x-kappa-ratio"]
    assert f"{record['kappa_crit']:.2f}" == raw.headers["x-kappa-crit"]
    assert sum(record["actual"][key] for key in ("device_tokens", "cached_tokens", "new_tokens")) \
        == answer.usage.prompt_tokens  # fmt: skip


def test_a_stream_brings_the_same_text_and_usage_as_one_answer(idle):
    whole = chat(idle, "A stream is a river of tokens.", max_tokens=12).parse()
    stream = chat(
        idle,
        "A stream is a river of tokens.",
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    chunks = list(stream.parse())
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] is not None


def test_output_tokens_are_counted_streamed_or_not(idle):
    before = idle.metric("kappa_output_tokens_total")
    chat(idle, "Count me.", max_tokens=7, extra_body={"ignore_eos": True}).parse()
    list(chat(idle, "Count me.", max_tokens=7, stream=True,
              extra_body={"ignore_eos": True}).parse())  # fmt: skip
    idle.wait_idle()
    assert idle.metric("kappa_output_tokens_total") - before == 14


def test_completions_answer_texts_and_token_ids(idle):
    for prompt in ("Once upon a node", [5, 6, 7, 8]):
        answer = idle.openai.completions.create(
            model=idle.model, prompt=prompt, max_tokens=3, temperature=0.0
        )
        assert answer.usage.completion_tokens >= 1
    streamed = list(
        idle.openai.completions.create(
            model=idle.model, prompt="Once upon a node", max_tokens=3, temperature=0.0, stream=True
        )
    )
    assert "".join(c.choices[0].text for c in streamed if c.choices)


FIXED = {"type": "object", "properties": {"on": {"const": True}}, "required": ["on"]}


def test_messages_and_responses_call_a_tool_whole_and_streamed(idle):
    """Which tool, and its arguments, are demanded: the model's weights are random. It puts some 90
    spaces between them, of 96 times once more than 200."""
    tool = {"name": "switch", "description": "Switches.", "input_schema": FIXED}
    ask = {
        "model": idle.model, "max_tokens": 1000, "tools": [tool],
        "messages": [{"role": "user", "content": "On, please. " * 20}],
        "tool_choice": {"type": "tool", "name": "switch"},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=idle.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(
            **{k: v for k, v in ask.items() if k != "max_tokens"}
        ).input_tokens
        whole = client.messages.create(**ask)
        idle.wait_idle()  # Else it may go where nobody is in its way.
        with client.messages.stream(**ask) as stream:
            live = stream.get_final_message()
    for made in (whole, live):
        (used,) = made.content
        assert (used.type, used.name, used.input) == ("tool_use", "switch", {"on": True})
        # vLLM's own word where a tool is demanded by its name.
        assert made.stop_reason in ("tool_use", "end_turn") and made.usage.output_tokens > 3
        used = made.usage
        cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
        assert used.input_tokens + cached == counted
    assert live.usage.cache_read_input_tokens > 0
    function = {"type": "function", "name": "switch", "parameters": FIXED, "strict": True}
    ask = {
        "model": idle.model, "input": "On, please.", "tools": [function],
        "tool_choice": {"type": "function", "name": "switch"},
        "max_output_tokens": 1000,
    }  # fmt: skip
    whole = idle.openai.responses.create(**ask)
    with idle.openai.responses.stream(**ask) as stream:
        live = stream.get_final_response()
    for made in (whole, live):
        (called,) = made.output
        assert made.status == "completed" and called.name == "switch"
        assert json.loads(called.arguments) == {"on": True}
    text = idle.openai.responses.create(model=idle.model, input="Hello", max_output_tokens=4)
    assert text.usage.output_tokens <= 4 and text.usage.input_tokens > 0


def test_several_choices_come_back(idle):
    answer = chat(idle, "Choose.", n=3, max_tokens=2, temperature=1.0).parse()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_the_same_prompt_goes_where_its_blocks_are(idle):
    text = "The blocks of this prompt are on one device now. " * 20
    first = chat(idle, text)
    usable = (first.parse().usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    idle.until_known(usable, messages=[{"role": "user", "content": text}])
    again = chat(idle, text)
    assert again.headers["x-kappa-node"] == first.headers["x-kappa-node"]
    usage = again.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == usable > 0
    record = idle.decision(again.headers["x-request-id"])
    assert record["policy"] == "priced"
    assert record["actual"]["device_tokens"] == usable == record["predicted"]["device_tokens"]
    assert again.parse().choices == first.parse().choices or (
        again.parse().choices[0].message.content == first.parse().choices[0].message.content
    )


def test_route_explains_what_a_request_will_get(idle):
    text = "Explained first, then sent. " * 30
    body = {"model": idle.model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    usage = chat(idle, text, max_tokens=2).parse().usage
    idle.wait_idle()
    idle.until_known(usage.prompt_tokens - BLOCK_TOKENS, messages=body["messages"])
    told = idle.http.post("/v1/route", json=body).json()
    sent = chat(idle, text, max_tokens=2)
    assert {c["node"] for c in told["candidates"]} == {row["node"] for row in idle.nodes()}
    (chosen,) = (c for c in told["candidates"] if c["node"] == told["node"])
    assert sent.headers["x-kappa-node"] == told["node"]
    assert sent.headers["x-kappa-reason"] == told["reason"]
    assert sent.headers["x-kappa-ratio"] == f"{chosen['ratio']:.2f}"
    # Something may have been learnt in between.
    assert float(sent.headers["x-kappa-crit"]) == pytest.approx(chosen["kappa_crit"], rel=0.2)
    assert told["prompt_tokens"] == sent.parse().usage.prompt_tokens


def test_nodes_say_that_they_are_paced_and_how(idle):
    for row in idle.nodes():
        assert row["paced"] and row["profile"]["source"] == "paced"
        assert row["emulated_model"] == "llama-3.1-8b"
        assert row["profile"]["dilation"] == 10
        assert row["profile_error"] is None
        assert row["measured"]["h2d_bytes_per_s"] > 0
    pcie, c2c = sorted(idle.nodes(), key=lambda row: row["profile"]["h2d_bytes_per_s"])
    # Links are 375 to 55 GB/s; attention to loaded tokens takes the threshold further, or away.
    assert c2c["kappa_crit"] is None or c2c["kappa_crit"] > 4 * pcie["kappa_crit"] > 0


def test_metrics_and_readiness_answer(idle):
    assert idle.http.get("/ready").json() == {"workers": 2}
    assert idle.metric("kappa_workers", paced="true") == 2
    assert idle.metric("kappa_requests_total", status="200") > 0
