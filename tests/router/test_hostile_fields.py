"""Requests that ask engines for what nobody priced: they end at the ingress, each with its reason.

Ray's delivery is replaced by a script; everything else is real.
"""

import json
from contextlib import suppress

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMValidationError

from router.api import fields
from router.api.tenants import Allowance
from tests.router.scripted import BODY as CHAT
from tests.router.scripted import PATH, ROUTE, TEXTS, code, overload

pytestmark = pytest.mark.ray

TEXT = {"model": "m", "prompt": "hello", "max_tokens": 4}
SHAPES = [(PATH, CHAT), (TEXTS, TEXT), (ROUTE, CHAT), (ROUTE, TEXT)]
# Three loops of 99,999 never end.
BOMB = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
async def here(serve):
    made = await serve()
    yield made
    assert made.live.router.reservations == 0


async def refused(here, path, body, param):
    """A body is 400 that names its field, and reaches no engine."""
    answer = await here.send(path, body)
    assert answer.status_code == 400, answer.text
    error, sent = answer.json()["error"], here.ingress.sent
    assert error["param"] == param and (param is None or error["message"].startswith(param)), error
    assert sent == []
    return error


async def test_nothing_of_a_clients_xargs_reaches_an_engine(here):
    xargs = {"kv_transfer_params": "x", "ec_transfer_params": [1], "kappa_tenant": "root", "a": 1}
    for path, body in SHAPES[:2]:
        assert (await here.send(path, {**body, "vllm_xargs": xargs})).status_code == 200
    for body in here.ingress.bodies:
        extra = body.to_sampling_params(4, {}).extra_args
        assert all(name.startswith("kappa_") for name in extra), extra
        assert extra["kappa_tenant"] == "default"


async def test_what_is_not_priced_is_refused_by_name_and_what_is_unknown_is_not_quoted(here):
    asked = [
        ("chat_template", BOMB), ("chat_template", "{{ 'a' * 300000000 }}"),
        ("use_beam_search", True), ("best_of", 8), ("stream_interval", 100_000),
        ("kv_transfer_params", {"do_remote_prefill": True}), ("ec_transfer_params", {"a": 1}),
        ("kv_cache_report_mode", "all"), ("prompt_embeds", "AAAA"),
        ("mm_processor_kwargs", {"max_pixels": 10**9}), ("media_io_kwargs", {"video": {}}),
        ("request_id", "mine"), ("truncate_prompt_tokens", -1), ("truncation_side", "left"),
        ("guided_json", {}), ("functions", [{"name": "f"}]),
    ]  # fmt: skip
    for path, body in SHAPES:
        for field, value in asked:
            await refused(here, path, {**body, field: value}, field)
        error = await refused(here, path, {**body, "max_tokenz": 5}, None)
        assert error["message"].startswith("Unrecognized request argument supplied: max_tokenz")
        assert error["code"] == "unknown_parameter"
    for path, body in SHAPES:
        # Asking for nothing is no fault.
        nothing = dict.fromkeys(field for field, _ in asked)
        assert (await here.send(path, {**body, **nothing})).status_code == 200


async def test_what_clients_send_innocently_is_dropped(here):
    names = ("store", "metadata", "service_tier", "safety_identifier", "prediction", "vllm_xargs")
    dropped = {name: {"a": "b"} for name in names}
    answer = await here.send(PATH, {**CHAT, **dropped, "prompt_cache_key": "k"})
    assert answer.status_code == 200
    assert set(here.ingress.bodies[0].model_extra) == {"prompt_cache_key"}


async def test_a_completion_with_messages_is_refused_and_priced_by_its_prompt(here):
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 60
    stray = {**TEXT, "prompt": long, "messages": CHAT["messages"]}
    await refused(here, TEXTS, stray, None)
    for prompt in (long, [long, "a"]):
        answer = await here.send(TEXTS, {**TEXT, "prompt": prompt, "messages": None})
        assert code(answer, 400) == "context_length_exceeded" and here.ingress.sent == []


NUMBERS = {
    "max_tokens", "n", "seed", "temperature", "top_p", "top_k", "min_p", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "priority",
    "prompt_logprobs", "thinking_token_budget",
}  # fmt: skip
HUGE = [2**63, -(2**63) - 1, 2**70, 10**400, -(10**400), 1e308, float("nan"), float("inf")]


async def test_a_number_out_of_range_is_400_naming_its_field(here):
    for value in [*HUGE, -float("inf"), True, "5", [], {}]:
        for path, body in SHAPES[:3]:
            for field in sorted(NUMBERS):
                await refused(here, path, {**body, field: value}, field)
        for field in ("max_completion_tokens", "top_logprobs"):
            await refused(here, PATH, {**CHAT, field: value}, field)
        two = {**TEXT, "prompt": ["a", "b"]}
        await refused(here, TEXTS, {**two, "max_tokens": value}, "max_tokens")
        await refused(here, TEXTS, {**TEXT, "logprobs": value}, "logprobs")
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            await refused(here, PATH, {**CHAT, field: [1, value]}, f"{field}.1")
        await refused(here, PATH, {**CHAT, "logit_bias": {"1": value}}, "logit_bias")
        if not isinstance(value, str | list):
            await refused(here, TEXTS, {**TEXT, "prompt": [1, value]}, "prompt")


async def test_json_that_python_cannot_hold_is_400(here):
    headers = {"content-type": "application/json"}
    for path in (PATH, TEXTS, ROUTE):
        for text in ('{"n": ' + "1" * 5000 + "}", '{"n": ' + "[" * 100_000 + "}"):
            answer = await here.client.post(path, content=text.encode(), headers=headers)
            assert answer.status_code == 400, answer.text


async def test_zero_by_any_sign_and_whole_floats_are_numbers(here):
    for value in (-0, -0.0, 0, 5.0):
        answer = await here.send(PATH, {**CHAT, "seed": value, "temperature": value})
        assert answer.status_code == 200, answer.text
        seed = here.ingress.bodies[-1].seed
        assert seed == int(value) and isinstance(seed, int)


async def test_prompts_times_n_are_bounded_and_so_is_their_number(here):
    # 43 x 3 = 129 answers.
    await refused(here, TEXTS, {**TEXT, "prompt": ["a"] * 43, "n": 3}, "n")
    await refused(here, TEXTS, {**TEXT, "prompt": [[1]] * 129}, "prompt")
    await refused(here, PATH, {**CHAT, "n": 129}, "n")
    assert (await here.send(TEXTS, {**TEXT, "prompt": ["a"] * 64, "n": 2})).is_success


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


def said(content=None, **more):
    return {**CHAT, "messages": [{"role": "user", "content": content, **more}]}


def called(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}


NAMED = {"type": "function", "function": {"name": "f"}}


async def test_lists_and_texts_are_bounded(here):
    for field, value in (
        ("messages", [{"role": "user", "content": "x"}] * 4097), ("messages", []),
        ("stop", ["a"] * 5), ("stop", "a" * 1025), ("stop_token_ids", [1] * 129),
        ("bad_words", ["a"] * 129), ("allowed_token_ids", [1] * 4097),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", {"x": 1}),
        ("tools", [NAMED] * 129), ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"chat_template": BOMB}), ("cache_salt", "x" * 1025),
    ):  # fmt: skip
        await refused(here, PATH, {**CHAT, field: value}, field)


async def test_template_options_are_named_small_values(here):
    for value in ([1], {"a": 1}, "x" * 257, float("nan"), 10**400):
        body = {**CHAT, "chat_template_kwargs": {"enable_thinking": value}}
        await refused(here, PATH, body, "chat_template_kwargs.enable_thinking")
    fine = {"enable_thinking": False, "thinking_budget": 100, "date_string": None}
    assert (await here.send(PATH, {**CHAT, "chat_template_kwargs": fine})).is_success
    assert here.ingress.bodies[0].chat_template_kwargs == fine


FAT = {"enum": ["x" * 9] * 6000}  # 12 bytes each with quotes and comma: 72 kB
HALF = {"enum": ["x" * 9] * 3000}


async def test_what_engines_compile_is_bounded_in_bytes_and_depth(here):
    for asked, param in (
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
        ({"tools": tools(FAT), "tool_choice": NAMED}, "tools"),
        ({"tools": tools(FAT, strict=True)}, "tools"),
        ({"tools": tools(nested(65))}, "tools"),
        ({"tools": tools({"enum": ["x" * 9] * 30_000})}, "tools"),
        ({"tools": tools(HALF), "tool_choice": "required", **formatted(HALF)}, "tools"),
    ):
        await refused(here, PATH, {**CHAT, **asked}, param)
    for depth in (65, 100_000):
        body = said("x", **called("[" * depth + "]" * depth))
        await refused(here, PATH, body, "messages.0.tool_calls.0.function.arguments")


async def test_ordinary_schemas_pass_as_they_are(here):
    schema = {"type": "object", "properties": {"a": {"type": "string", "x-own": [1, 2.5, None]}}}
    asked = {**CHAT, **formatted(schema), "tools": tools(schema), "tool_choice": "auto"}
    assert (await here.send(PATH, asked)).is_success
    (body,) = here.ingress.bodies
    assert body.response_format.json_schema.json_schema == schema
    assert body.tools[0].function.parameters == schema


async def test_parts_are_text_or_inline_media(here):
    for part, param in (
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
    ):
        await refused(here, PATH, said([part]), f"messages.0.content.0.{param}")


async def test_odd_keys_of_messages_parts_and_calls_are_dropped(here):
    ((call,),) = called("{}").values()
    call = {**call, "index": 0, "function": {**call["function"], "odd": BOMB}}
    messages = [
        {"role": "user", "odd": 1, "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "provider_specific_fields": {"a": 1}, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]  # fmt: skip
    assert (await here.send(PATH, {**CHAT, "messages": messages})).is_success
    user, assistant, _ = here.ingress.bodies[0].messages
    assert user == {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert set(assistant) == {"role", "content", "tool_calls"}
    (kept,) = assistant["tool_calls"]
    assert set(kept) == {"id", "type", "function"}
    assert set(kept["function"]) == {"name", "arguments"}


# -- what cannot be routed by its tokens -----------------------------------------------------------

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 5


async def test_several_prompts_pay_for_each_and_an_image_for_the_most_that_it_can_be(serve):
    access = {"default_allowance": Allowance(tokens_per_minute=1)}
    here = await serve(access=access)

    async def wanted(path, body):
        """Tokens that a request is to pay at most, which its refusal says."""
        answer = await here.send(path, body)
        assert code(answer, 400) == "request_over_limit" and here.ingress.sent == []
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


UNROUTED = [
    (TEXTS, {**TEXT, "prompt": ["hello " * 9, "b"]}),
    (PATH, said([IMAGE])),
    (PATH, said([IMAGE, {"type": "text", "text": "a"}])),
]


async def test_admission_control_refuses_what_cannot_be_routed_by_its_tokens(serve):
    here = await serve()
    busy = overload(here.live)
    for path, body in UNROUTED:
        assert code(await here.send(path, body), 429) == "overloaded"
        assert here.ingress.sent == [] and here.live.router.reservations == busy


async def test_deadlines_hold_for_what_cannot_be_routed_by_its_tokens(here):
    explain = here.live.explain

    def behind_a_long_queue(routed):
        decision = explain(routed)
        decision.estimates.ttft_s[:] += 1e4
        return decision

    here.live.explain = behind_a_long_queue
    for path, body in UNROUTED:
        headers = {"x-kappa-deadline-ms": "60000"}
        answer = await here.client.post(path, json=body, headers=headers)
        assert code(answer, 429) == "deadline_unmeetable" and here.ingress.sent == []


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
    here, path, body, schema
):
    allowed = fields.CHAT if path == PATH else fields.COMPLETION
    names = sorted({*schema.model_fields, *allowed, *fields.REFUSED, *fields.DROPPED, "zz"})
    for name in names:
        for value in HOSTILE:
            answer = await here.send(path, {**body, name: value})
            assert answer.status_code < 500, (name, repr(value)[:60], answer.text)
    assert len(here.ingress.bodies) > len(names)
    for sent in here.ingress.bodies:
        assert sent.model_fields_set <= {*allowed, "vllm_xargs"}
        assert all(key.startswith("kappa_") for key in sent.vllm_xargs)
        # What else is wrong an engine says itself: 400, as it does for these two.
        with suppress(ValueError, VLLMValidationError):
            sent.to_sampling_params(4, {})
