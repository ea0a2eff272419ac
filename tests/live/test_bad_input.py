"""What a client gets wrong is told in OpenAI's shape, and costs the cluster nothing."""

import json

import httpx
import openai
import pytest

pytestmark = pytest.mark.live

HELLO = [{"role": "user", "content": "Hello"}]


def check(answer, status, code):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"]
    assert error["code"] == code
    return error


def post(live, body, path="/v1/chat/completions"):
    return live.http.post(path, json={"model": live.model} | body)


def test_an_unknown_model_is_404(idle):
    for path in ("/v1/chat/completions", "/v1/route"):
        answer = post(idle, {"model": "gpt-x", "messages": HELLO}, path)
        error = check(answer, 404, "model_not_found")
        assert error["param"] == "model" and idle.model in error["message"]


def test_the_official_client_raises_its_own_exceptions(idle):
    with pytest.raises(openai.NotFoundError):
        idle.openai.chat.completions.create(model="gpt-x", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        idle.openai.chat.completions.create(model=idle.model, messages=[])


def test_what_is_no_object_of_json_is_400(idle):
    malformed = ("", "{", '{"model": }', "\x00", '{"a": "\\ud800')
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/route"):
        for text in (*malformed, "[]", "3", "null", '"text"'):
            answer = idle.http.post(path, content=text.encode(), headers=headers)
            assert answer.status_code == 400, answer.text
            code = answer.json()["error"]["code"]
            assert code == "invalid_value" or (code == "invalid_json" and text in malformed)


WRONG = (
    ("messages", "Hello"), ("messages", None), ("messages", []), ("temperature", "hot"),
    ("max_tokens", "many"), ("max_tokens", 0), ("max_tokens", -1), ("stream", "perhaps"), ("n", 0),
    ("n", 129), ("n", 10**9), ("max_completion_tokens", 0),
)  # fmt: skip


def test_wrong_chat_fields_are_400_and_named(idle):
    for param, value in WRONG:
        body = {k: v for k, v in {"messages": HELLO, param: value}.items() if v is not None}
        error = check(post(idle, body), 400, "invalid_value")
        assert error["param"].split(".")[0] == param
        assert param in error["message"]


def test_what_only_the_engine_knows_to_be_wrong_is_400_too(idle):
    for changes in (
        {"messages": 7}, {"top_p": 7}, {"temperature": -1},
        {"messages": [{"role": "wizard", "content": "Hello"}]},
        {"stream_options": {"include_usage": True}}, {"logprobs": True, "top_logprobs": 10_000},
        # With its status, not inside of the stream.
        {"stream": True, "top_p": 7},
    ):  # fmt: skip
        answer = post(idle, {"messages": HELLO, **changes})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    for prompt in ([], [-1, 5], [10**9]):
        answer = post(idle, {"prompt": prompt, "max_tokens": 1}, "/v1/completions")
        assert answer.status_code == 400, answer.text


def test_a_prompt_beyond_the_context_is_400_with_both_numbers(idle):
    limit = idle.max_context_tokens
    body = {"prompt": [5] * limit, "max_tokens": 3}
    error = check(post(idle, body, "/v1/completions"), 400, "context_length_exceeded")
    assert str(limit) in error["message"] and str(limit + 3) in error["message"]
    body = {"messages": [{"role": "user", "content": "word " * limit}]}
    error = check(post(idle, body), 400, "context_length_exceeded")
    assert str(limit) in error["message"]


def test_answer_longer_than_the_context_is_400_with_both_numbers(idle):
    limit = idle.max_context_tokens
    error = check(
        post(idle, {"messages": HELLO, "max_tokens": limit}), 400, "context_length_exceeded"
    )
    assert f"is {limit} tokens" in error["message"] and f"{limit} to generate" in error["message"]


def test_a_body_over_the_limit_is_413_declared_or_chunked(idle):
    size = idle.max_body_bytes + 1
    text = json.dumps({"model": idle.model, "messages": HELLO, "user": "x" * size}).encode()
    check(idle.http.post("/v1/chat/completions", content=text), 413, "body_too_large")
    pieces = (text[i : i + 4096] for i in range(0, len(text), 4096))
    check(idle.http.post("/v1/chat/completions", content=pieces), 413, "body_too_large")


def test_a_body_just_under_the_limit_is_read(idle):
    body = {"model": idle.model, "messages": HELLO, "max_tokens": 1}
    padding = idle.max_body_bytes - len(json.dumps(body | {"user": ""}).encode())
    text = json.dumps(body | {"user": "x" * padding}).encode()
    assert len(text) == idle.max_body_bytes
    answer = idle.http.post(
        "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


def test_unknown_paths_and_methods_are_told_in_the_same_shape(idle):
    for answer, status, code in (
        (idle.http.get("/v1/nothing"), 404, "not_found"),
        (idle.http.get("/v1/chat/completions"), 405, "method_not_allowed"),
        (idle.http.post("/v1/models"), 405, None),
    ):
        check(answer, status, code)


def test_a_client_cannot_choose_its_worker_or_fake_our_marks(idle):
    body = {
        "model": idle.model,
        "messages": HELLO,
        "max_tokens": 1,
        "vllm_xargs": {
            "kappa_request_id": "forged",
            "kv_cache_report_mode": "all",
            "kappa_tenant": "forged",
            "kappa_weight": -1,
            "kappa_charges": "no JSON",
            "kappa_host_tokens": "many",
        },
    }
    answer = httpx.post(
        f"{idle.url}/v1/chat/completions",
        json=body,
        headers={"x-kappa-pin": "nobody"},
        timeout=120.0,
    )
    assert answer.status_code == 200, answer.text
    record = idle.decision(answer.headers["x-request-id"])
    assert record["actual"]["new_tokens"] is not None
    assert all(r["request_id"] != "forged" for r in idle.decisions())
    assert record["tenant"] == "default"
    assert "forged" not in idle.http.get("/v1/tenants").text


def test_any_key_or_none_is_the_default_tenant_without_tenants(idle):
    body = {"model": idle.model, "messages": HELLO, "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer anything"}, {"x-api-key": "anything"}):
        answer = idle.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert idle.decision(answer.headers["x-request-id"])["tenant"] == "default"
    rows = idle.http.get("/v1/tenants").json()["tenants"]
    assert [row["tenant"] for row in rows] == ["default"]
