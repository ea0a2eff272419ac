"""Requests for unpriced features: they end at the decider, each with its reason.

Engines are scripts; Envoy, decider and gates are real. Single fields: test_fields.
"""

from contextlib import suppress

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMValidationError

from kappa_router.api import fields
from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import Allowance
from tests.router.scripted import (
    BODY,
    BOMB,
    IMAGE,
    PATH,
    ROUTE,
    TEXT,
    TEXTS,
    code,
    nested,
    overload,
    said,
)

pytestmark = pytest.mark.ray

SCHEMAS = (ChatCompletionRequest, CompletionRequest)
SHAPES = [(PATH, BODY), (TEXTS, TEXT), (ROUTE, BODY), (ROUTE, TEXT)]


@pytest.fixture
async def here(serve):
    made = await serve()
    yield made
    await made.idle()


async def test_client_xargs_reach_no_engine(here):
    xargs = {"kv_transfer_params": "x", "ec_transfer_params": [1], "kappa_tenant": "root", "a": 1}
    for path, body in SHAPES[:2]:
        assert (await here.send(path, {**body, "vllm_xargs": xargs})).status_code == 200
    for body, schema in zip(here.engines.bodies, SCHEMAS, strict=True):
        extra = schema.model_validate(body.fields).to_sampling_params(4, {}).extra_args
        assert all(name.startswith("kappa_") for name in extra), extra
        assert extra["kappa_tenant"] == "default"


async def test_refused_fields_reach_no_engine_by_any_endpoint(here):
    for path, body in SHAPES:
        for field, value, param in (
            ("chat_template", BOMB, "chat_template"), ("use_beam_search", True, "use_beam_search"),
            ("n", 2**70, "n"), ("temperature", float("nan"), "temperature"),
            ("max_tokenz", 5, None),
        ):  # fmt: skip
            answer = await here.send(path, {**body, field: value})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
    assert here.engines.sent == []


async def test_harmless_fields_are_dropped(here):
    names = ("store", "metadata", "service_tier", "safety_identifier", "prediction", "vllm_xargs")
    dropped = {name: {"a": "b"} for name in names}
    answer = await here.send(PATH, {**BODY, **dropped, "prompt_cache_key": "k"})
    assert answer.status_code == 200
    got = here.engines.bodies[0].fields
    assert got.keys() == BODY.keys() | {"prompt_cache_key", "vllm_xargs"}
    assert all(name.startswith("kappa_") for name in got["vllm_xargs"])


async def test_completion_is_priced_by_its_prompt_never_by_messages(here):
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 60
    stray = {**TEXT, "prompt": long, "messages": BODY["messages"]}
    assert code(await here.send(TEXTS, stray), 400) == "unknown_parameter"
    for prompt in (long, [long, "a"]):
        answer = await here.send(TEXTS, {**TEXT, "prompt": prompt, "messages": None})
        assert code(answer, 400) == "context_length_exceeded"
    assert here.engines.sent == []


async def test_json_that_python_cannot_hold_is_400(here):
    headers = {"content-type": "application/json"}
    for path in (PATH, TEXTS, ROUTE):
        for text in ('{"n": ' + "1" * 5000 + "}", '{"n": ' + "[" * 100_000 + "}"):
            answer = await here.client.post(path, content=text.encode(), headers=headers)
            assert answer.status_code == 400, answer.text


LISTS = b'{"model": "m", "messages": [' + b"[]," * 100_000 + b"0]}"


async def test_body_of_many_lists_is_refused_by_every_api(here):
    headers = {"content-type": "application/json"}
    for path in (PATH, TEXTS, ROUTE, "/v1/responses", "/v1/messages"):
        answer = await here.client.post(path, content=LISTS, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "more than 100000 lists and objects: join" in error["message"]
        assert error.get("code", "body_too_complex") == "body_too_complex"


async def test_chat_of_many_parts_is_read_and_checked_on_a_thread(here):
    parts = [{"type": "text", "text": "a"}] * 1024
    chat = {"messages": [{"role": "user", "content": parts}] * 3, "max_tokens": 1}
    assert code(await here.send(PATH, chat), 400) == "context_length_exceeded"
    chat["messages"][0] = {"role": "user", "content": [*parts[:-1], {"type": "poem"}]}
    answer = await here.send(PATH, chat)
    assert answer.json()["error"]["param"] == "messages.0.content.1023.type"


# -- what cannot be routed by its tokens -----------------------------------------------------------

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 5
UNROUTED = [
    (TEXTS, {**TEXT, "prompt": ["hello " * 9, "b"]}),
    (PATH, said([IMAGE])),
    (PATH, said([IMAGE, {"type": "text", "text": "a"}])),
]


async def test_several_prompts_and_images_pay_the_most_they_can_be(serve):
    access = {"default_allowance": Allowance(tokens_per_minute=1)}
    here = await serve(access=access)

    async def wanted(path, body):
        """Tokens that a request is to pay at most, which its refusal says."""
        answer = await here.send(path, body)
        assert code(answer, 400) == "request_over_limit" and here.engines.sent == []
        return int(answer.json()["error"]["message"].split(" tokens")[0].rsplit(" ", 1)[1])

    one = await wanted(TEXTS, {**TEXT, "prompt": WORDS})
    # With each of its prompts comes another answer of up to 4 tokens.
    assert one > 100
    assert await wanted(TEXTS, {**TEXT, "prompt": [WORDS] * 3}) == 3 * one
    assert await wanted(TEXTS, {**TEXT, "prompt": [WORDS], "n": 3}) == one + 2 * 4
    # 2 + 3 token ids and 2 x 2 answers of 4.
    assert await wanted(TEXTS, {**TEXT, "prompt": [[1, 2], [3, 4, 5]], "n": 2}) == 21
    # Around the message 8, "role" and "user" 4 each, the image 16,384, and the answer 4.
    assert await wanted(PATH, said([IMAGE])) == 16_404


async def test_admission_holds_for_requests_without_tokens(serve):
    here = await serve()
    busy = overload(here.live)
    for path, body in UNROUTED:
        assert code(await here.send(path, body), 429) == "overloaded"
        assert here.engines.sent == [] and here.live.router.reservations == busy


async def test_deadlines_hold_for_requests_without_tokens(here):
    priced = here.live.priced

    def behind_a_long_queue(routed):
        explained = priced(routed)
        explained.decision.estimates.ttft_s[:] += 1e4
        return explained

    here.live.priced = behind_a_long_queue
    for path, body in UNROUTED:
        headers = {"x-kappa-deadline-ms": "60000"}
        answer = await here.client.post(path, json=body, headers=headers)
        assert code(answer, 429) == "deadline_unmeetable" and here.engines.sent == []


# -- anything --------------------------------------------------------------------------------------

HOSTILE = [
    2**63, -(2**63) - 1, 10**400, -(10**400), 1e308, float("nan"), float("inf"), 0, -1, 1.5, True,
    False, "", "x", "\ud800", "x" * 5000, [], [[]], [None], [1], ["x"], {}, {"a": {"b": [1]}},
    {"type": "x"}, {"kv_transfer_params": "x"}, [{"role": "user"}], [10**400], {"x": 10**400},
    {"url": "file:///"}, nested(100),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "schema"), [(PATH, BODY, SCHEMAS[0]), (TEXTS, TEXT, SCHEMAS[1])]
)
async def test_no_value_of_any_field_is_500_or_reaches_an_engine(here, path, body, schema):
    allowed = fields.CHAT if path == PATH else fields.COMPLETION
    names = sorted({*schema.model_fields, *allowed, *fields.REFUSED, *fields.DROPPED, "zz"})
    check = fields.checked_chat if path == PATH else fields.checked_completion
    cases = [{name: value} for name in names if name not in fields.DROPPED for value in HOSTILE]
    # Dropped fields are so with any value, and all at once.
    cases += [dict.fromkeys(sorted(fields.DROPPED), value) for value in HOSTILE]
    for case in cases:
        try:
            check(body | case)
        except ApiError:
            continue  # 400
        answer = await here.send(path, body | case)
        assert answer.status_code < 500, (repr(case)[:100], answer.text)
    assert len(here.engines.bodies) > len(names)
    for sent in here.engines.bodies:
        assert sent.fields.keys() <= {*allowed, "vllm_xargs"}
        assert all(key.startswith("kappa_") for key in sent.vllm_xargs)
        # What else is wrong an engine says itself: 400, as it does for these two.
        with suppress(ValueError, VLLMValidationError):
            schema.model_validate(sent.fields).to_sampling_params(4, {})
