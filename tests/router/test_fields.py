"""The allow-list of request fields: every field that vLLM or OpenAI knows is in one class of it."""

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.chat_utils import MM_PARSER_MAP

from router.api import fields
from router.api.errors import ApiError
from router.api.fields import (
    CHAT,
    COMPLETION,
    DROPPED,
    REFUSED,
    checked_chat,
    checked_completion,
    choices_in,
)

pytestmark = pytest.mark.ray

MESSAGES = [{"role": "user", "content": "x"}]
# Of vLLM's parts: what holds embeddings or live objects, and what only other APIs send.
REFUSED_PARTS = {
    "audio_embeds", "image_embeds", "image_pil", "input_image", "prompt_embeds", "tool_reference",
    "video_embeds",
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "allowed"), [(ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)]
)
def test_every_field_of_vllms_requests_is_in_one_class(schema, allowed):
    for name in schema.model_fields:
        classes = [name in allowed, name in REFUSED, name in DROPPED]
        assert sum(classes) == 1, f"{name} of vLLM: decide whether a client may set it"


@pytest.mark.parametrize("module", [completion_create_params, chat_create_params])
def test_every_parameter_of_openais_client_is_in_one_class(module):
    params = module.CompletionCreateParamsStreaming
    allowed = CHAT if module is chat_create_params else COMPLETION
    for name in params.__required_keys__ | params.__optional_keys__:
        assert (name in allowed) + (name in REFUSED) + (name in DROPPED) == 1, name


def test_every_part_of_vllms_messages_is_taken_or_known_to_be_refused():
    assert set(fields.PARTS) & REFUSED_PARTS == set()
    assert set(MM_PARSER_MAP) == set(fields.PARTS) | REFUSED_PARTS


def test_the_classes_are_apart_and_every_refusal_has_a_remedy():
    for allowed in (CHAT, COMPLETION):
        assert not set(allowed) & (set(REFUSED) | DROPPED)
    assert not set(REFUSED) & DROPPED
    assert all(remedy for remedy, _ in REFUSED.values())


def test_what_goes_on_is_a_copy_without_what_is_dropped():
    body = {"messages": MESSAGES, "store": True, "best_of": 1, "n": None, "use_beam_search": False}
    assert checked_chat(body) == {"messages": MESSAGES, "n": None}
    assert set(body) == {"messages", "store", "best_of", "n", "use_beam_search"}


def test_what_is_no_object_is_left_to_the_schema():
    assert checked_chat([1]) == [1] and checked_chat(None) is None


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
        with pytest.raises(ApiError) as caught:
            checked_chat({field: value})
        assert (caught.value.status, caught.value.param) == (400, field)
        assert field in caught.value.message


def test_answers_are_n_for_every_prompt():
    assert choices_in({}) == choices_in({"prompt": "ab"}) == choices_in({"prompt": [1, 2]}) == 1
    assert choices_in({"prompt": ["a", "b"], "n": 3}) == choices_in({"prompt": [[1]] * 2, "n": 3})
    assert choices_in({"prompt": ["a", "b"], "n": 3}) == 6


def test_the_client_reads_a_long_unknown_name_shortened():
    with pytest.raises(ApiError) as caught:
        checked_chat({"x" * 5000: 1})
    assert len(caught.value.message) < 200 and caught.value.param is None


def test_half_a_surrogate_pair_is_no_text():
    for name, value in (("bad_words", ["\ud800"]), ("stop", "\udfff"), ("user", "a\ud800b")):
        with pytest.raises(ApiError, match="half a surrogate pair"):
            checked_chat({"messages": MESSAGES, name: value})
    for messages in ([{"role": "user", "content": "\ud800"}], [{"role": "\udbff"}]):
        with pytest.raises(ApiError, match="half a surrogate pair"):
            checked_chat({"messages": messages})
    for prompt in ("\ud800", ["a", "\ud800"]):
        with pytest.raises(ApiError, match="half a surrogate pair"):
            checked_completion({"prompt": prompt})
