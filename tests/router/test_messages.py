"""Anthropic's Messages API: what may be sent, and the chat by which its tokens are known.

The engines, which answer, are scripts; the official client and all else are real.
"""

import asyncio
import json

import anthropic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from kappa_router.api import messages
from kappa_router.api.messages import FIELDS
from tests.router import building
from tests.router.building import tenants_of
from tests.router.scripted import Whole, nested

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

PATH = "/v1/messages"
ASK = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def text(said):
    return {"type": "text", "text": said}


def to_chat(body):
    return messages.to_chat(messages.checked(body))


def chat_of(content, role="user", **more):
    return to_chat({**ASK, "messages": [{"role": role, "content": content}], **more})


def refused(param, **changes):
    error = building.refused(to_chat, ASK | changes)
    assert (error.status, error.param) == (400, param), error.message
    return error.message


def client_of(here, **options):
    url = str(here.client.base_url)
    return anthropic.AsyncAnthropic(base_url=url, max_retries=0, **{"api_key": "k"} | options)


async def whole(_worker):
    yield Whole({"type": "message", "content": [{"type": "text", "text": "Hi"}]})


# -- fields ----------------------------------------------------------------------------------------


def test_fields_of_client_and_vllm_are_each_in_one_class():
    names = set(AnthropicMessagesRequest.model_fields)
    for module, kind in (
        (message_create_params, "MessageCreateParamsStreaming"),
        (message_count_tokens_params, "MessageCountTokensParams"),
    ):
        params = getattr(module, kind)
        names |= params.__required_keys__ | params.__optional_keys__
    for name in names:
        classes = [name in each for each in FIELDS]
        assert sum(classes) == 1, f"{name}: decide whether a client may set it"


def test_plain_message_is_a_plain_chat():
    assert to_chat(ASK | {"cache_control": {"type": "ephemeral"}, "stop_sequences": None}) == ASK
    assert to_chat({**ASK, "stop_sequences": ["END"], "metadata": {"user_id": "u"}, "top_k": 3}) \
        == {**ASK, "stop": ["END"], "user": "u", "top_k": 3}  # fmt: skip


def test_system_texts_go_first_without_what_changes():
    billing = text("x-anthropic-billing-header: cc_version=1; cch=7f")
    chat = to_chat({
        **ASK, "system": [billing, text("Be kind."), {**text("Be brief."), "cache_control": {}}],
        "messages": [*ASK["messages"], {"role": "system", "content": "Be quick."}],
    })  # fmt: skip
    assert chat["messages"] == [
        {"role": "system", "content": "Be kind.\nBe brief.\nBe quick."}, *ASK["messages"],
    ]  # fmt: skip


def test_turn_with_tools_becomes_calls_and_tool_messages():
    turn = [
        {"role": "user", "content": [text("Look"), text("twice.")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"}, text("So:"),
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": ["é", 1]}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "red", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c2",
             "content": [text("blue"), {"type": "image", "source": PNG}, text("green")]},
            text("And?"),
        ]},
    ]  # fmt: skip
    chat = to_chat({**ASK, "messages": turn, "tools": [TOOL | {"type": "custom"}]})
    asked, called, *results, last = chat["messages"]
    assert asked == {"role": "user", "content": "Look\ntwice."}
    assert (called["content"], called["reasoning"]) == ("So:", "Hm.")
    assert [(c["id"], json.loads(c["function"]["arguments"])) for c in called["tool_calls"]] == [
        ("c1", {"at": ["é", 1]}), ("c2", {}),
    ]  # fmt: skip
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "red"},
        {"role": "tool", "tool_call_id": "c2", "content": "blue\ngreen"},
    ]  # fmt: skip
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert last == {"role": "user", "content": [url, text("And?")]}
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == "auto" and "continue_final_message" not in chat


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)  # fmt: skip
def test_choice_of_tools_has_a_chats_names(given, chosen):
    chat = to_chat({**ASK, "tools": [TOOL], "tool_choice": given})
    assert chat["tool_choice"] == chosen and "parallel_tool_calls" not in chat
    single = {**given, "disable_parallel_tool_use": True}
    assert to_chat({**ASK, "tools": [TOOL], "tool_choice": single})["parallel_tool_calls"] is False


def test_answer_that_has_begun_is_continued():
    begun = {"role": "assistant", "content": "The answer is"}
    chat = to_chat({**ASK, "messages": [*ASK["messages"], begun]})
    assert chat["continue_final_message"] is True and chat["add_generation_prompt"] is False


def test_thinking_effort_and_schema_reach_their_places():
    enabled = to_chat({**ASK, "thinking": {"type": "enabled", "budget_tokens": 2048}})
    assert enabled["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    disabled = to_chat({**ASK, "thinking": {"type": "disabled"},
                        "chat_template_kwargs": {"thinking": True}})  # fmt: skip
    assert disabled["chat_template_kwargs"] == {"enable_thinking": False, "thinking": True}
    shaped = {"effort": "low", "format": {"type": "json_schema", "schema": nested(2)}}
    chat = to_chat({**ASK, "output_config": shaped})
    assert chat["reasoning_effort"] == "low"
    assert chat["response_format"]["json_schema"]["schema"] == nested(2)


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        (None, {"maximum": 3}), ("max_tokens", {"max_tokens": None}),
        ("messages", {"messages": []}), ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": 1.5}),
        ("container", {"container": "c"}), ("mcp_servers", {"mcp_servers": [{}]}),
        ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": nested(65)}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": {"\ud800": 1}}]}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("thinking.type", {"thinking": {"type": "always"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
        ("stop_sequences", {"stop_sequences": ["a"] * 5}),
        ("system.0.type", {"system": [{"type": "image", "source": PNG}]}),
    ],
)  # fmt: skip
def test_unserved_field_is_refused_by_its_place(param, changes):
    assert refused(param, **changes).startswith(param or "Unrecognized")


@pytest.mark.parametrize(
    ("place", "role", "content"),
    [
        (".role", "tool", "x"), (".content", "user", None), (".content", "user", 7),
        (".content", "user", [text("x")] * 1025), (".content.0.type", "user", [7]),
        (".content.0.type", "user", [USE]), (".content.0.text", "user", [{"type": "text"}]),
        (".content.0.type", "user", [{"type": "document", "source": PNG}]),
        (".content.0.type", "assistant", [{"type": "image", "source": PNG}]),
        (".content.0.input", "assistant", [{**USE, "input": "{}"}]),
        (".content.0.input", "assistant", [{**USE, "input": {"a": float("nan")}}]),
        (".content.0.source.media_type", "user",
         [{"type": "image", "source": {**PNG, "media_type": "text/html"}}]),
        (".content.0.source.url", "user",
         [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]),
        (".content.0.tool_use_id", "user", [{"type": "tool_result"}]),
        (".content.0.content.0.type", "user",
         [{"type": "tool_result", "tool_use_id": "c", "content": [
             {"type": "tool_result", "tool_use_id": "c", "content": "nested"}]}]),
    ],
)  # fmt: skip
def test_unserved_message_is_refused_by_its_place(place, role, content):
    refused(f"messages.0{place}", messages=[{"role": role, "content": content}])


# -- over HTTP -------------------------------------------------------------------------------------


async def test_message_reaches_its_worker_as_sent_and_is_answered(serve):
    here = await serve(whole)
    ask = {**ASK, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}
    async with client_of(here) as client:
        answer = await client.messages.create(**ask)
    assert answer.content[0].text == "Hi" and here.engines.paths == [PATH]
    (sent,) = here.engines.bodies
    assert {name: sent.fields[name] for name in ask} == ask
    assert sent.fields.keys() - ask.keys() == {"vllm_xargs"}
    await here.idle()


async def test_refusals_have_anthropics_shape_and_exceptions(serve):
    here = await serve(whole, tenants=tenants_of({"sk-alice": "alice"}, refuse=True))
    async with client_of(here, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASK)
    async with client_of(here, api_key="sk-alice") as client:
        for changes, kind, name in (
            ({"model": "x"}, anthropic.NotFoundError, "not_found_error"),
            ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
            ({"max_tokens": 8000}, anthropic.BadRequestError, "invalid_request_error"),
            ({"tool_choice": {"type": "x"}}, anthropic.BadRequestError, "invalid_request_error"),
        ):
            for call in (client.messages.create, client.messages.stream):
                with pytest.raises(kind) as caught:
                    made = call(**{**ASK, **changes})
                    await (made if asyncio.iscoroutine(made) else made.__aenter__())
                body = caught.value.body
                assert set(body) == {"type", "error"} and body["error"]["type"] == name
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="x", messages=ASK["messages"])
    answer = await here.client.post(PATH, content=b"{", headers={"x-api-key": "sk-alice"})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert here.engines.sent == []


async def test_tokens_are_counted_as_predicted_without_sending(serve):
    here = await serve(whole)
    asked = {k: v for k, v in ASK.items() if k != "max_tokens"} | {"tools": [TOOL], "system": "S"}
    async with client_of(here) as client:
        counted = await client.messages.count_tokens(**asked)
        assert here.engines.sent == []
        await client.messages.create(**asked, max_tokens=8)
    await here.idle()
    (record,) = here.live.records.values()
    assert counted.input_tokens == record.to_dict()["predicted"]["new_tokens"] > 20
    image = [{"role": "user", "content": [{"type": "image", "source": PNG}]}]
    answer = await here.client.post(f"{PATH}/count_tokens", json={**asked, "messages": image})
    assert answer.status_code == 400 and answer.json()["type"] == "error"
