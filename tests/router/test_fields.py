"""The allow-list of request fields: which may go on, within which bounds, and which are refused."""

import json

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.chat_utils import MM_PARSER_MAP

from kappa_router.api import fields
from kappa_router.api.fields import (
    CHAT,
    COMPLETION,
    DROPPED,
    REFUSED,
    checked_chat,
    checked_completion,
)
from tests.router import building
from tests.router.scripted import BOMB, IMAGE, TEXT, nested, said

pytestmark = pytest.mark.ray

MESSAGES = [{"role": "user", "content": "x"}]
# Of vLLM's parts: what holds embeddings or live objects, and what only other APIs send.
REFUSED_PARTS = {
    "audio_embeds", "image_embeds", "image_pil", "input_image", "prompt_embeds", "tool_reference",
    "video_embeds",
}  # fmt: skip


def refused(body, param, check=checked_chat):
    """A body is 400 that names its field."""
    error = building.refused(check, body)
    assert (error.status, error.param) == (400, param), error.message
    assert param is None or error.message.startswith(param)
    return error


# -- classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "allowed"), [(ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)]
)
def test_fields_of_vllm_are_each_in_one_class(schema, allowed):
    for name in schema.model_fields:
        classes = [name in allowed, name in REFUSED, name in DROPPED]
        assert sum(classes) == 1, f"{name} of vLLM: decide whether a client may set it"


@pytest.mark.parametrize("module", [completion_create_params, chat_create_params])
def test_parameters_of_openai_are_each_in_one_class(module):
    params = module.CompletionCreateParamsStreaming
    allowed = CHAT if module is chat_create_params else COMPLETION
    for name in params.__required_keys__ | params.__optional_keys__:
        assert (name in allowed) + (name in REFUSED) + (name in DROPPED) == 1, name


def test_classes_are_apart_and_every_refusal_has_a_remedy():
    assert set(MM_PARSER_MAP) == set(fields.PARTS) | REFUSED_PARTS
    assert set(fields.PARTS) & REFUSED_PARTS == set()
    for allowed in (CHAT, COMPLETION):
        assert not set(allowed) & (set(REFUSED) | DROPPED)
    assert not set(REFUSED) & DROPPED
    assert all(remedy for remedy, _ in REFUSED.values())


def test_checked_chat_copies_without_dropped_fields():
    body = {"messages": MESSAGES, "store": True, "best_of": 1, "n": None, "use_beam_search": False}
    assert checked_chat(body) == {"messages": MESSAGES}
    assert set(body) == {"messages", "store", "best_of", "n", "use_beam_search"}


def test_unpriced_fields_are_named_and_unknown_ones_not_quoted():
    asked = [
        ("chat_template", BOMB), ("chat_template", "{{ 'a' * 300000000 }}"),
        ("use_beam_search", True), ("best_of", 8), ("stream_interval", 100_000),
        ("kv_transfer_params", {"do_remote_prefill": True}), ("ec_transfer_params", {"a": 1}),
        ("kv_cache_report_mode", "all"), ("prompt_embeds", "AAAA"),
        ("mm_processor_kwargs", {"max_pixels": 10**9}), ("media_io_kwargs", {"video": {}}),
        ("request_id", "mine"), ("truncate_prompt_tokens", -1), ("truncation_side", "left"),
        ("guided_json", {}), ("functions", [{"name": "f"}]),
    ]  # fmt: skip
    for check, body in ((checked_chat, {"messages": MESSAGES}), (checked_completion, TEXT)):
        for field, value in asked:
            assert refused({**body, field: value}, field, check).code == "unsupported_parameter"
            # Asking for nothing is no fault.
            assert check({**body, field: None}) == body
        error = refused({**body, "x" * 5000: 5}, None, check)
        assert error.code == "unknown_parameter" and len(error.message) < 200
        assert error.message.startswith("Unrecognized request argument supplied: xxx")


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("max_tokens", 1, 2**31 - 1), ("max_completion_tokens", 1, 2**31 - 1), ("n", 1, 128),
        ("seed", -(2**63), 2**63 - 1), ("top_k", -1, 2**31 - 1), ("temperature", 0, 100),
        ("frequency_penalty", -2, 2), ("top_logprobs", 0, 20), ("min_tokens", 0, 2**31 - 1),
    ],
)  # fmt: skip
def test_numbers_pass_up_to_their_bounds(field, least, most):
    for value in (least, most):
        assert checked_chat({field: value}) == {field: value}
    for value in (least - 1, most + 1, True, str(least), float("nan")):
        refused({field: value}, field)


NUMBERS = (
    "max_tokens", "n", "seed", "temperature", "top_p", "top_k", "min_p", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "priority",
    "prompt_logprobs", "thinking_token_budget",
)  # fmt: skip
HUGE = [2**63, -(2**63) - 1, 2**70, 10**400, -(10**400), 1e308, float("nan"), float("inf")]


@pytest.mark.parametrize("value", [*HUGE, -float("inf"), True, "5", [], {}], ids=repr)
def test_number_out_of_range_is_400_naming_its_field(value):
    for field in NUMBERS:
        refused({field: value}, field)
        refused({**TEXT, field: value}, field, checked_completion)
    for field in ("max_completion_tokens", "top_logprobs"):
        refused({field: value}, field)
    refused({**TEXT, "logprobs": value}, "logprobs", checked_completion)
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        refused({field: [1, value]}, f"{field}.1")
    refused({"logit_bias": {"1": value}}, "logit_bias")
    if not isinstance(value, str | list):
        refused({**TEXT, "prompt": [1, value]}, "prompt", checked_completion)


def test_zero_by_any_sign_and_whole_floats_are_numbers():
    for value in (-0, -0.0, 0, 5.0):
        seed = checked_chat({"seed": value, "temperature": value})["seed"]
        assert seed == int(value) and isinstance(seed, int)


def test_answers_are_n_for_every_prompt_and_bounded():
    assert fields.choices_in({}) == fields.choices_in({"prompt": "ab"}) == 1
    assert fields.choices_in({"prompt": [1, 2]}) == 1
    assert fields.choices_in({"prompt": ["a", "b"], "n": 3}) == 6
    assert fields.choices_in({"prompt": [[1]] * 2, "n": 3}) == 6
    # 43 x 3 = 129 answers.
    refused({**TEXT, "prompt": ["a"] * 43, "n": 3}, "n", checked_completion)
    refused({**TEXT, "prompt": [[1]] * 129}, "prompt", checked_completion)
    refused({"n": 129}, "n")
    assert checked_completion({"prompt": ["a"] * 64, "n": 2})["n"] == 2


def test_half_a_surrogate_pair_is_no_text():
    for body in (
        {"bad_words": ["\ud800"]}, {"stop": "\udfff"}, {"user": "a\ud800b"}, said("\ud800"),
        {"messages": [{"role": "\udbff"}]},
    ):  # fmt: skip
        assert "half a surrogate pair" in str(building.refused(checked_chat, body))
    for prompt in ("\ud800", ["a", "\ud800"]):
        error = building.refused(checked_completion, {"prompt": prompt})
        assert "half a surrogate pair" in str(error)


# -- lists, schemas, messages ----------------------------------------------------------------------


def formatted(schema):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def tools(schema, **more):
    return [{"type": "function", "function": {"name": "f", "parameters": schema, **more}}]


def called(arguments, **more):
    function = {"name": "f", "arguments": arguments, **more}
    return [{"id": "1", "type": "function", "function": function}]


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", MESSAGES * 4097), ("messages", []), ("stop", ["a"] * 5), ("stop", "a" * 1025),
        ("stop_token_ids", [1] * 129), ("bad_words", ["a"] * 129),
        ("allowed_token_ids", [1] * 4097), ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", {"x": 1}), ("tools", [NAMED] * 129),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"chat_template": BOMB}), ("cache_salt", "x" * 1025),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_lists_and_texts_are_bounded(field, value):
    refused({field: value}, field)


def test_documents_are_objects_of_texts():
    fine = {"documents": [{"title": "a", "text": "b"}, {}]}
    assert checked_chat(fine) == fine
    for value in ("a", [1], {"a": 1}, {"a": None}, {"\ud800": "a"}):
        refused({"documents": [{}, value]}, "documents.1")


def test_message_without_a_role_is_refused():
    for role in ({}, {"role": None}):
        refused({"messages": [*MESSAGES, {"content": "x", **role}]}, "messages.1.role")


def test_template_options_are_named_small_values():
    fine = {"enable_thinking": False, "thinking_budget": 100, "date_string": None}
    assert checked_chat({"chat_template_kwargs": fine}) == {"chat_template_kwargs": fine}
    for value in ([1], {"a": 1}, "x" * 257, float("nan"), 10**400):
        body = {"chat_template_kwargs": {"enable_thinking": value}}
        refused(body, "chat_template_kwargs.enable_thinking")


FAT = {"enum": ["x" * 9] * 6000}  # 12 bytes each with quotes and comma: 72 kB
HALF = {"enum": ["x" * 9] * 3000}


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
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "a" * 65_537}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a" * 4097}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"tools": tools(FAT), "tool_choice": "required"}, "tools"),
        ({"tools": tools(FAT), "tool_choice": NAMED}, "tools"),
        ({"tools": tools(FAT, strict=True)}, "tools"),
        ({"tools": tools(nested(65))}, "tools"),
        ({"tools": tools({"enum": ["x" * 9] * 30_000})}, "tools"),
        ({"tools": tools(HALF), "tool_choice": "required", **formatted(HALF)}, "tools"),
        ({"messages": [{"role": "user", "tools": tools(nested(65))}]}, "messages.0.tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_for_engines_are_bounded_in_bytes_and_depth(asked, param):
    refused(asked, param)


def test_call_arguments_are_bounded_in_depth_and_may_be_no_json():
    for depth in (65, 100_000):
        body = said("x", tool_calls=called("[" * depth + "]" * depth))
        refused(body, "messages.0.tool_calls.0.function.arguments")
    for arguments in ("[" * 64 + "]" * 64, "{" * 65):
        checked_chat(said("x", tool_calls=called(arguments)))


def test_parts_of_all_messages_are_bounded_together():
    most = [{"role": "user", "content": ["a"] * 1024}] * 4
    checked_chat({"messages": [*most, {"role": "user", "content": "b"}]})
    refused({"messages": [*most, {"role": "user", "content": ["b"]}]}, "messages")


def test_arguments_of_all_calls_are_bounded_together():
    def calls(count):
        texts = [json.dumps([[]] * 9_999), '"' + "[" * 90_000 + '"', "no {JSON", ""]
        return said("x", tool_calls=[called(text)[0] for text in [texts[0]] * count + texts[1:]])

    checked_chat(calls(10))
    refused(calls(11), "messages.*.tool_calls.*.function.arguments")
    refused(
        said("x", tool_calls=called(json.dumps([[]] * 100_000))),
        "messages.0.tool_calls.0.function.arguments",
    )


def test_ordinary_schemas_pass_as_they_are():
    schema = {"type": "object", "properties": {"a": {"type": "string", "x-own": [1, 2.5, None]}}}
    body = {**formatted(schema), "tools": tools(schema), "tool_choice": "auto"}
    assert checked_chat(body) == body
    # Tools that are only shown may be longer than compiled ones.
    assert checked_chat({"tools": tools(FAT)}) == {"tools": tools(FAT)}


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
def test_parts_are_text_or_inline_media(part, param):
    refused(said([part]), f"messages.0.content.0.{param}")
    assert checked_chat(said([IMAGE, "a"])) == said([IMAGE, "a"])


def test_odd_keys_of_messages_parts_and_calls_are_dropped():
    (call,) = called("{}", odd=BOMB)
    messages = [
        {"role": "user", "odd": 1, "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "provider_specific_fields": {"a": 1},
         "tool_calls": [{**call, "index": 0}]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]  # fmt: skip
    assert checked_chat({"messages": messages})["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": called("{}")},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
