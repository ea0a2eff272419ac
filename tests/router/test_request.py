"""What a request asks for, read from its body and its headers."""

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.requests import Request

from router.api.app import Inbound
from router.api.request import ApiRequest
from router.api.tenants import Tenant
from router.index.prefix_hash import salt_of

pytestmark = pytest.mark.ray


def request(headers=None, *, completion=False, tenant=None, **fields):
    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    inbound = Inbound("r", 0.0, tenant or Tenant())
    http = Request({"type": "http", "headers": given, "state": {"inbound": inbound}})
    if completion:
        return ApiRequest.of(
            http, CompletionRequest(model="m", prompt="x", **fields), "completions"
        )
    messages = [{"role": "user", "content": "x"}]
    return ApiRequest.of(
        http, ChatCompletionRequest(model="m", messages=messages, **fields), "chat"
    )


def test_the_load_plan_is_asked_for_by_a_header():
    assert request({"x-kappa-plan": " recompute "}).load_plan == "recompute"
    assert request().load_plan == ""


def test_a_conversation_is_named_by_header_cache_key_user_or_not_at_all():
    named = {"prompt_cache_key": "key", "user": "u"}
    assert request({"x-session-id": "s"}, **named).conversation == "s"
    assert request(**named).conversation == "key"
    assert request(user="u").conversation == "u"
    assert request().conversation == "r"


def test_the_later_bound_on_generated_tokens_counts():
    assert request().max_tokens == 0
    assert request(max_tokens=5).max_tokens == 5
    assert request(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"logprobs": True, "top_logprobs": 2}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True, "logprobs": True, "top_logprobs": 2}, False),
    ],
)
def test_a_prompt_whose_logprobs_are_asked_for_finds_no_cached_prefix(fields, reads):
    made = request(cache_salt="mine", **fields)
    assert (made.salt == salt_of("mine")) is reads
    skips = made.body.to_sampling_params(4, {}).skip_reading_prefix_cache
    assert skips is not reads, "as vLLM does"


@pytest.mark.parametrize(
    ("fields", "reads"),
    [({"logprobs": 2}, True), ({"echo": True}, True), ({"echo": True, "logprobs": 2}, False)],
)
def test_so_does_a_completion_that_is_echoed_with_logprobs(fields, reads):
    made = request(completion=True, **fields)
    assert (made.salt == 0) is reads
    assert made.body.to_sampling_params(4, {}).skip_reading_prefix_cache is not reads


def test_its_end_is_told_once():
    ends = []
    made = request()
    made.on_end = lambda *end: ends.append(end)
    made.finish("done", 200)
    made.finish("error", 500)
    assert ends == [(made, "done", 200)]
