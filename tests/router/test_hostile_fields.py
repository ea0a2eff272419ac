"""Requests that ask engines for what nobody priced: they end at the ingress, each with its reason.

Ray's delivery is replaced by a script, as in test_ingress; everything else is real.
"""

import json
import pickle
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMValidationError

from router.api import fields
from router.api.app import Access, make_app
from router.api.limits import Allowance
from tests.router.scripted import BODY, PATH, code, event, overload

pytestmark = pytest.mark.ray

TEXTS = "/v1/completions"
ROUTE = "/v1/route"
CHAT = BODY
TEXT = {"model": "m", "prompt": "hello", "max_tokens": 4}
SHAPES = [(PATH, CHAT), (TEXTS, TEXT), (ROUTE, CHAT), (ROUTE, TEXT)]
# Three loops of 99,999 never end.
BOMB = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@asynccontextmanager
async def cluster(serve, tokens_per_minute=None, **changes):
    """(bodies as engines get them, live router, client)."""
    ingress, live, _ = await serve(None, **changes)
    app = make_app(Access(default_allowance=Allowance(tokens_per_minute=tokens_per_minute)))
    app.post(PATH)(ingress.chat)
    app.post(TEXTS)(ingress.completions)
    app.post(ROUTE)(ingress.route)
    bodies = []

    async def call(body, method, headers):
        # Ray pickles a body on its way.
        bodies.append(pickle.loads(pickle.dumps(body)))
        yield [event("one")]

    ingress._path._delivery._call = call
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield bodies, live, client
        assert live.router.reservations == 0


async def send(client, path, body):
    """Like a client whose JSON writer knows NaN and Infinity."""
    headers = {"content-type": "application/json"}
    return await client.post(path, content=json.dumps(body).encode(), headers=headers)


def refused(answer, param, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert param is None or error["message"].startswith(param)


async def test_nothing_of_a_clients_xargs_reaches_an_engine(serve):
    xargs = {"kv_transfer_params": "x", "ec_transfer_params": [1], "kappa_tenant": "root", "a": 1}
    async with cluster(serve) as (bodies, _, client):
        for path, body in SHAPES[:2]:
            answer = await send(client, path, {**body, "vllm_xargs": xargs})
            assert answer.status_code == 200, answer.text
        for body in bodies:
            extra = body.to_sampling_params(4, {}).extra_args
            assert all(name.startswith("kappa_") for name in extra), extra
            assert extra["kappa_tenant"] == "default"


@pytest.mark.parametrize(("path", "body"), SHAPES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", BOMB), ("chat_template", "{{ 'a' * 300000000 }}"),
        ("use_beam_search", True), ("best_of", 8), ("stream_interval", 100_000),
        ("kv_transfer_params", {"do_remote_prefill": True}), ("ec_transfer_params", {"a": 1}),
        ("kv_cache_report_mode", "all"), ("prompt_embeds", "AAAA"),
        ("mm_processor_kwargs", {"max_pixels": 10**9}), ("media_io_kwargs", {"video": {}}),
        ("request_id", "mine"), ("truncate_prompt_tokens", -1), ("truncation_side", "left"),
        ("guided_json", {}), ("functions", [{"name": "f"}]),
    ],
)  # fmt: skip
async def test_what_is_not_priced_is_refused_by_name(serve, path, body, field, value):
    async with cluster(serve) as (bodies, _, client):
        refused(await send(client, path, {**body, field: value}), field)
        assert bodies == []
        # Asking for nothing is no fault.
        assert (await send(client, path, {**body, field: None})).status_code == 200


@pytest.mark.parametrize(("path", "body"), SHAPES)
async def test_unknown_fields_are_refused_without_quoting_them_as_a_parameter(serve, path, body):
    async with cluster(serve) as (bodies, _, client):
        answer = await send(client, path, {**body, "max_tokenz": 5})
        refused(answer, None)
        message = answer.json()["error"]["message"]
        assert message.startswith("Unrecognized request argument supplied: max_tokenz")
        assert code(answer) == "unknown_parameter" and bodies == []


@pytest.mark.parametrize(
    "field", ["store", "metadata", "service_tier", "safety_identifier", "prediction", "vllm_xargs"]
)
async def test_what_clients_send_innocently_is_dropped(serve, field):
    async with cluster(serve) as (bodies, _, client):
        answer = await send(client, PATH, {**CHAT, field: {"a": "b"}, "prompt_cache_key": "k"})
        assert answer.status_code == 200
        assert set(bodies[0].model_extra) == {"prompt_cache_key"}


async def test_a_completion_with_messages_is_refused_and_priced_by_its_prompt(serve):
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 60
    async with cluster(serve, tokens_per_minute=5000) as (bodies, _, client):
        stray = {**TEXT, "prompt": long, "messages": CHAT["messages"]}
        refused(await send(client, TEXTS, stray), None)
        for prompt in (long, [long, "a"]):
            answer = await send(client, TEXTS, {**TEXT, "prompt": prompt, "messages": None})
            assert (answer.status_code, code(answer)) == (400, "context_length_exceeded")
        assert bodies == []


NUMBERS = {
    "max_tokens", "n", "seed", "temperature", "top_p", "top_k", "min_p", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "priority",
    "prompt_logprobs", "thinking_token_budget",
}  # fmt: skip
HUGE = [2**63, -(2**63) - 1, 2**70, 10**400, -(10**400), 1e308, float("nan"), float("inf")]


@pytest.mark.parametrize("value", [*HUGE, -float("inf"), True, "5", [], {}], ids=repr)
async def test_a_number_out_of_range_is_400_naming_its_field(serve, value):
    async with cluster(serve, tokens_per_minute=10**6) as (bodies, _, client):
        for path, body in SHAPES[:3]:
            for field in sorted(NUMBERS):
                refused(await send(client, path, {**body, field: value}), field)
        for field in ("max_completion_tokens", "top_logprobs"):
            refused(await send(client, PATH, {**CHAT, field: value}), field)
        two = {**TEXT, "prompt": ["a", "b"]}
        refused(await send(client, TEXTS, {**two, "max_tokens": value}), "max_tokens")
        refused(await send(client, TEXTS, {**TEXT, "logprobs": value}), "logprobs")
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            refused(await send(client, PATH, {**CHAT, field: [1, value]}), f"{field}.1")
        refused(await send(client, PATH, {**CHAT, "logit_bias": {"1": value}}), "logit_bias")
        if not isinstance(value, str | list):
            answer = await send(client, TEXTS, {**TEXT, "prompt": [1, value]})
            refused(answer, "prompt")
        assert bodies == []


@pytest.mark.parametrize("path", [PATH, TEXTS, ROUTE])
@pytest.mark.parametrize("text", ['{"n": ' + "1" * 5000 + "}", '{"n": ' + "[" * 100_000 + "}"])
async def test_json_that_python_cannot_hold_is_400(serve, path, text):
    async with cluster(serve) as (_, _, client):
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=text.encode(), headers=headers)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("value", [-0, -0.0, 0, 5.0])
async def test_zero_by_any_sign_and_whole_floats_are_numbers(serve, value):
    async with cluster(serve) as (bodies, _, client):
        answer = await send(client, PATH, {**CHAT, "seed": value, "temperature": value})
        assert answer.status_code == 200, answer.text
        assert bodies[0].seed == int(value) and isinstance(bodies[0].seed, int)


async def test_prompts_times_n_are_bounded_and_so_is_their_number(serve):
    async with cluster(serve) as (bodies, _, client):
        # 43 x 3 = 129 answers.
        refused(await send(client, TEXTS, {**TEXT, "prompt": ["a"] * 43, "n": 3}), "n")
        refused(await send(client, TEXTS, {**TEXT, "prompt": [[1]] * 129}), "prompt")
        refused(await send(client, PATH, {**CHAT, "n": 129}), "n")
        assert bodies == []
        assert (await send(client, TEXTS, {**TEXT, "prompt": ["a"] * 64, "n": 2})).is_success


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": "x"}] * 4097), ("messages", []),
        ("stop", ["a"] * 5), ("stop", "a" * 1025), ("stop_token_ids", [1] * 129),
        ("bad_words", ["a"] * 129), ("allowed_token_ids", [1] * 4097),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", {"x": 1}),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"chat_template": BOMB}),
        ("cache_salt", "x" * 1025),
    ],
)  # fmt: skip
async def test_lists_and_texts_are_bounded(serve, field, value):
    async with cluster(serve) as (bodies, _, client):
        refused(await send(client, PATH, {**CHAT, field: value}), field)
        assert bodies == []


async def test_template_options_are_named_small_values(serve):
    async with cluster(serve) as (bodies, _, client):
        fine = {"enable_thinking": False, "thinking_budget": 100, "date_string": None}
        assert (await send(client, PATH, {**CHAT, "chat_template_kwargs": fine})).is_success
        assert bodies[0].chat_template_kwargs == fine
        for value in ([1], {"a": 1}, "x" * 257, float("nan"), 10**400):
            options = {"enable_thinking": value}
            answer = await send(client, PATH, {**CHAT, "chat_template_kwargs": options})
            refused(answer, "chat_template_kwargs.enable_thinking")


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def formatted(schema):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def tools(schema, **more):
    return [{"type": "function", "function": {"name": "f", "parameters": schema, **more}}]


FAT = {"enum": ["x" * 9] * 6000}  # 12 bytes each with quotes and comma: 72 kB
AT_ONCE = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (formatted(FAT), "response_format"),
        (formatted(nested(65)), "response_format"),
        (formatted(nested(900)), "response_format"),
        (formatted({"minimum": 10**400}), "response_format"),
        (formatted({"minimum": float("nan")}), "response_format"),
        ({"structured_outputs": {"json": FAT}}, "structured_outputs"),
        ({"structured_outputs": {"json": json.dumps(nested(65))}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "a" * 65_537}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a" * 4097}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"tools": tools(FAT), "tool_choice": "required"}, "tools"),
        ({"tools": tools(FAT), "tool_choice": AT_ONCE}, "tools"),
        ({"tools": tools(FAT, strict=True)}, "tools"),
        ({"tools": tools(nested(65))}, "tools"),
        ({"tools": tools({"enum": ["x" * 9] * 30_000})}, "tools"),
        ({"tools": tools({"enum": ["x" * 9] * 3000}), "tool_choice": "required",
          **formatted({"enum": ["x" * 9] * 3000})}, "tools"),
    ],
)  # fmt: skip
async def test_what_engines_compile_is_bounded_in_bytes_and_depth(serve, asked, param):
    async with cluster(serve) as (bodies, _, client):
        refused(await send(client, PATH, {**CHAT, **asked}), param)
        assert bodies == []


async def test_ordinary_schemas_pass_as_they_are(serve):
    schema = {"type": "object", "properties": {"a": {"type": "string", "x-own": [1, 2.5, None]}}}
    async with cluster(serve) as (bodies, _, client):
        asked = {**CHAT, **formatted(schema), "tools": tools(schema), "tool_choice": "auto"}
        assert (await send(client, PATH, asked)).is_success
        assert bodies[0].response_format.json_schema.json_schema == schema
        assert bodies[0].tools[0].function.parameters == schema


def said(content=None, **more):
    return {**CHAT, "messages": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
        ({"type": "image_url", "image_url": "gopher://127.0.0.1/"}, "image_url"),
        ({"type": "audio_url", "audio_url": {"url": "ftp://a/"}}, "audio_url.url"),
        ({"type": "image_url", "image_url": None, "uuid": "another's"}, "image_url"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "type"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "type"),
        ({"type": "file", "file": {"file_id": "x"}}, "type"),
        ({"image_url": "http://169.254.169.254/"}, "type"),
        ({"type": "text", "text": None}, "text"),
        (7, "type"),
    ],
)
async def test_parts_are_text_or_inline_media(serve, part, param):
    async with cluster(serve) as (bodies, _, client):
        refused(await send(client, PATH, said([part])), f"messages.0.content.0.{param}")
        assert bodies == []


async def test_odd_keys_of_messages_parts_and_calls_are_dropped(serve):
    call = {
        "id": "1", "type": "function", "index": 0,
        "function": {"name": "f", "arguments": "{}", "odd": BOMB},
    }  # fmt: skip
    messages = [
        {"role": "user", "odd": 1, "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "provider_specific_fields": {"a": 1}, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]  # fmt: skip
    async with cluster(serve) as (bodies, _, client):
        assert (await send(client, PATH, {**CHAT, "messages": messages})).is_success
        user, assistant, _ = bodies[0].messages
        assert user == {"role": "user", "content": [{"type": "text", "text": "a"}]}
        assert set(assistant) == {"role", "content", "tool_calls"}
        (kept,) = assistant["tool_calls"]
        assert set(kept) == {"id", "type", "function"}
        assert set(kept["function"]) == {"name", "arguments"}


@pytest.mark.parametrize("depth", [65, 100_000])
async def test_arguments_of_calls_are_bounded_in_depth(serve, depth):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * depth}}
    closed = {**call["function"], "arguments": "[" * depth + "]" * depth}
    async with cluster(serve) as (bodies, _, client):
        answer = await send(client, PATH, said("x", tool_calls=[{**call, "function": closed}]))
        refused(answer, "messages.0.tool_calls.0.function.arguments")
        assert bodies == []


async def wanted(serve, path, body):
    """Tokens that a request is to pay at most, which its refusal says."""
    async with cluster(serve, tokens_per_minute=1) as (bodies, _, client):
        answer = await send(client, path, body)
        assert (answer.status_code, code(answer)) == (400, "request_over_limit")
        assert bodies == []
    return int(answer.json()["error"]["message"].split(" tokens")[0].rsplit(" ", 1)[1])


async def test_several_prompts_pay_for_each(serve):
    text = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 5
    one = await wanted(serve, TEXTS, {**TEXT, "prompt": text})
    # With each of its prompts comes another answer of up to 4 tokens.
    assert one > 100
    assert await wanted(serve, TEXTS, {**TEXT, "prompt": [text, text, text]}) == 3 * one
    assert await wanted(serve, TEXTS, {**TEXT, "prompt": [text], "n": 3}) == one + 2 * 4
    # 2 + 3 token ids and 2 x 2 answers of 4.
    assert await wanted(serve, TEXTS, {**TEXT, "prompt": [[1, 2], [3, 4, 5]], "n": 2}) == 21


async def test_an_image_pays_for_the_most_that_it_can_be(serve):
    # Around the message 8, "role" and "user" 4 each, the image 16,384, and the answer 4.
    assert await wanted(serve, PATH, said([IMAGE])) == 16_404


UNROUTED = [
    (TEXTS, {**TEXT, "prompt": ["hello " * 9, "b"]}),
    (PATH, said([IMAGE])),
    (
        PATH,
        {**CHAT, "messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}]}]},
    ),
]


@pytest.mark.parametrize(("path", "body"), UNROUTED)
async def test_admission_control_refuses_what_cannot_be_routed_by_its_tokens(serve, path, body):
    async with cluster(serve) as (bodies, live, client):
        busy = overload(live)
        answer = await send(client, path, body)
        assert (answer.status_code, code(answer)) == (429, "overloaded")
        assert bodies == [] and live.router.reservations == busy
        for worker in tuple(live.router.workers):
            live.router.release(f"on-{worker}", live.now_s())


@pytest.mark.parametrize(("path", "body"), UNROUTED)
async def test_deadlines_hold_for_what_cannot_be_routed_by_its_tokens(serve, path, body):
    async with cluster(serve) as (bodies, live, client):
        explain = live.explain

        def behind_a_long_queue(routed):
            decision = explain(routed)
            decision.estimates.ttft_s[:] += 1e4
            return decision

        live.explain = behind_a_long_queue
        answer = await client.post(path, json=body, headers={"x-kappa-deadline-ms": "60000"})
        assert (answer.status_code, code(answer)) == (429, "deadline_unmeetable")
        assert bodies == []


HOSTILE = [
    *HUGE, 0, -1, 1.5, True, False, "", "x", "\ud800", "x" * 5000, [], [[]], [None], [1], ["x"], {},
    {"a": {"b": [1]}}, {"type": "x"}, {"kv_transfer_params": "x"}, [{"role": "user"}], [10**400],
    {"x": 10**400}, {"url": "file:///"}, nested(100),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [(PATH, CHAT, ChatCompletionRequest), (TEXTS, TEXT, CompletionRequest)],
)
async def test_no_value_of_any_field_is_500_or_brings_an_engine_what_is_not_allowed(
    serve, path, body, schema
):
    allowed = fields.CHAT if path == PATH else fields.COMPLETION
    ours = {"vllm_xargs"}
    names = sorted({*schema.model_fields, *allowed, *fields.REFUSED, *fields.DROPPED, "zz"})
    async with cluster(serve) as (bodies, _, client):
        for name in names:
            for value in HOSTILE:
                answer = await send(client, path, {**body, name: value})
                assert answer.status_code < 500, (name, repr(value)[:60], answer.text)
        assert len(bodies) > len(names)
        for sent in bodies:
            assert sent.model_fields_set <= set(allowed) | ours
            assert all(key.startswith("kappa_") for key in sent.vllm_xargs)
            # What else is wrong an engine says itself: 400, as it does for these two.
            with suppress(ValueError, VLLMValidationError):
                sent.to_sampling_params(4, {})
