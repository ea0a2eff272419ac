"""Whatever is sent to the Messages and the Responses API: an answer in its shape, and no 500.

Good bodies with any of their values, however deep, replaced, doubled or taken away.
`KAPPA_FUZZ_REQUESTS` raises the number.
"""

import copy
import json
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kappa_benchmarks.faults.fuzz import complaint_of
from tests.conformance.conftest import MODEL

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

EXAMPLES = max(int(os.environ.get("KAPPA_FUZZ_REQUESTS", "400")) // 5, 100)
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
AS_JSON = {"content-type": "application/json"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}


def text(kind="text"):
    return {"type": kind, "text": "hello", "cache_control": {"type": "ephemeral"}}


MESSAGE = {
    "max_tokens": 2, "system": [text()], "temperature": 0.5, "top_p": 1,
    "stop_sequences": ["END"], "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"},
    "messages": [
        {"role": "user", "content": [text()]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, text(),
            {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [text()]}, text()]},
    ],
}  # fmt: skip
RESPONSE = {
    "max_output_tokens": 2, "instructions": "hello", "metadata": {"a": "b"}, "store": False,
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "include": [],
    "input": [
        {"role": "user", "content": [text("input_text")]},
        {"type": "reasoning", "summary": [], "content": [text("reasoning_text")]},
        {"type": "message", "role": "assistant", "content": [text("output_text")]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "red"},
    ],
}  # fmt: skip
# What the emulated engines do not do; the decider must read it all the same.
MORE = {
    "tools": [{"type": "function", "name": "look", "input_schema": SCHEMA, "parameters": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "look"}, "top_logprobs": 0, "top_k": 3, "user": "u",
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "stop": "END",
    "previous_response_id": "r", "chat_template_kwargs": {"thinking": True}, "seed": 7,
    "image": {"type": "image", "source": PNG},
}  # fmt: skip
GOOD = {MESSAGES: MESSAGE, COUNT: MESSAGE, RESPONSES: RESPONSE}
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUE = st.recursive(
    LEAF | st.sampled_from([
        "\ud800", [[]], *MORE.values(), text(), MESSAGE["messages"], RESPONSE["input"],
    ]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
).map(copy.deepcopy)  # fmt: skip


def places(value, at=()):
    """Every place in a JSON value, itself among them."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(inner, (*at, key)) if isinstance(inner, dict | list) else [(*at, key)]


def shaped(path, status, body):
    """The fault of an answer; empty if it has none."""
    if status < 400:
        return ""
    if status == 500 or path == RESPONSES:
        return complaint_of(status, body)
    error = json.loads(body)
    good = error["type"] == "error" and set(error["error"]) == {"type", "message"}
    return "" if good and error["error"]["message"] else f"{status} in another shape: {body[:200]}"


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)  # fmt: skip
@given(path=st.sampled_from(list(GOOD)), data=st.data())
def test_any_change_of_a_good_body_gets_an_answer(stack, path, data):
    body = copy.deepcopy({"model": MODEL, "stream": data.draw(st.booleans())} | GOOD[path])
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from([*MORE, *MESSAGE, *RESPONSE]))
            body[name] = data.draw(st.just(MORE.get(name)).map(copy.deepcopy) | VALUE)
            continue
        *way, last = data.draw(st.sampled_from([at for at in places(body) if at]))
        inside = body
        for key in way:
            inside = inside[key]
        inside[last] = data.draw(VALUE)
    answer = stack.http.post(path, content=json.dumps(body).encode(), headers=AS_JSON)
    complaint = shaped(path, answer.status_code, answer.text)
    assert not complaint, f"{complaint}\n{path} {json.dumps(body)}"
    assert answer.status_code < 500, f"{answer.text} {json.dumps(body)}"


@pytest.mark.parametrize("path", [COUNT, MESSAGES, RESPONSES])
def test_good_bodies_are_answered(stack, path):
    for streamed in (False, True):
        answer = stack.http.post(path, json={**GOOD[path], "model": MODEL, "stream": streamed})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", GOOD)
def test_apis_refuse_bodies_of_too_many_parts_or_without_json(stack, path):
    part = "input_text" if path == RESPONSES else "text"
    many = "[" + f'{{"type":"{part}"}},' * 2700 + "{}]"
    field = "input" if path == RESPONSES else "messages"
    for body in (
        f'{{"{field}": [{{"role": "user", "content": {many}}}], "max_tokens": 1}}', "{", "[]", "7",
        f'{{"{field}": ' + "[" * 20_000 + "]" * 20_000 + "}", '{"max_tokens": ' + "1" * 5000 + "}",
    ):  # fmt: skip
        answer = stack.http.post(path, content=body.encode(), headers=AS_JSON)
        assert answer.status_code == 400, answer.text
        assert not shaped(path, 400, answer.text)


def test_nothing_stays_reserved(stack):
    deadline_s = time.monotonic() + 20.0
    while stack.reserved():  # Envoy tells of an end a moment after it
        assert time.monotonic() < deadline_s
