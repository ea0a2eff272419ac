"""OpenAI's Responses API: what may be sent, and the chat by which its tokens are known.

The engines, which answer, are scripts; the official client and all else are real.
"""

import openai
import pytest
from openai.types.responses import response_create_params
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from kappa_router.api import responses
from kappa_router.api.responses import FIELDS, checked
from tests.router.building import refused
from tests.router.scripted import Whole, nested

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

PATH = "/v1/responses"
ASK = {"model": "m", "input": "Hello"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
HELLO = {"role": "user", "content": "Hello"}


def to_chat(**changes):
    return responses.to_chat(checked({**ASK, **changes}))


def messages(*items, **changes):
    return to_chat(input=list(items), **changes)["messages"]


def item(kind, **fields):
    return {"type": kind, **fields}


def client_of(here):
    return openai.AsyncOpenAI(base_url=f"{here.spec.url}/v1", api_key="k", max_retries=0)


async def whole(_worker):
    yield Whole({"object": "response", "id": "resp_1", "output": []})


# -- fields ----------------------------------------------------------------------------------------


def test_fields_of_client_and_vllm_are_each_in_one_class():
    params = response_create_params.ResponseCreateParamsStreaming
    names = params.__required_keys__ | params.__optional_keys__
    for name in names | set(ResponsesRequest.model_fields):
        classes = [name in each for each in FIELDS]
        assert sum(classes) == 1, f"{name}: decide whether a client may set it"


def test_text_is_a_chat_of_one_message():
    assert to_chat() == {"model": "m", "messages": [HELLO]}
    chat = to_chat(
        max_output_tokens=5, reasoning={"effort": "low", "summary": "auto"}, stream=True, seed=7,
        user="u", store=False, include=["reasoning.encrypted_content"], truncation="disabled",
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert chat == {
        "model": "m", "messages": [HELLO], "max_completion_tokens": 5, "reasoning_effort": "low",
        "stream": True, "seed": 7, "user": "u",
    }  # fmt: skip


def test_instructions_and_first_developer_texts_are_one_system():
    made = messages(
        item("message", role="developer", content="Be brief."), HELLO,
        {"role": "developer", "content": "Be quick."}, instructions="Be kind.",
    )  # fmt: skip
    assert made == [
        {"role": "system", "content": "Be kind.\nBe brief."}, HELLO,
        {"role": "system", "content": "Be quick."},
    ]  # fmt: skip


def test_assistant_items_in_a_row_are_one_message():
    url = "data:image/png;base64,AAAA"
    picture = item("input_image", image_url=url, detail="low")
    asked, said, one, two, shown, again = messages(
        {"role": "user", "content": [item("input_text", text="Look"),
                                     item("input_text", text="twice.")]},
        item("reasoning", id="rs", summary=[], content=[item("reasoning_text", text="Hm.")]),
        item("message", role="assistant", id="m", status="completed",
             content=[item("output_text", text="So:", annotations=[])]),
        item("function_call", call_id="c1", name="look", arguments='{"at": 1}', id="fc"),
        item("function_call", call_id="c2", name="look", arguments="{"),
        item("function_call_output", call_id="c1", output="red"),
        item("function_call_output", call_id="c2",
             output=[item("input_text", text="blue"), picture]),
        item("reasoning", summary=[item("summary_text", text="Ah.")], encrypted_content="x"),
    )  # fmt: skip
    assert asked == {"role": "user", "content": "Look\ntwice."}
    assert (said["reasoning"], said["content"]) == ("Hm.", "So:")
    assert [(c["id"], c["function"]) for c in said["tool_calls"]] == [
        ("c1", {"name": "look", "arguments": '{"at": 1}'}),
        ("c2", {"name": "look", "arguments": "{"}),
    ]  # fmt: skip
    assert (one["tool_call_id"], one["content"]) == ("c1", "red")
    assert (two["tool_call_id"], two["content"]) == ("c2", "blue")
    assert shown["content"] == [item("image_url", image_url={"url": url, "detail": "low"})]
    assert again == {"role": "assistant", "content": "", "reasoning": "Ah."}


def test_tools_and_formats_have_a_chats_names():
    chat = to_chat(tools=[TOOL, {"type": "web_search", "external_web_access": False}])
    function = {"name": "look", "parameters": {"type": "object"}, "strict": False}
    assert chat["tools"] == [item("function", function=function)]
    assert chat["tool_choice"] == "auto"
    chat = to_chat(tools=[TOOL], tool_choice=item("function", name="look"))
    assert chat["tool_choice"] == item("function", function={"name": "look"})
    assert "tools" not in to_chat(tools=[{"type": "web_search"}], tool_choice="auto")
    shape = {"name": "a", "schema": nested(2), "strict": True}
    chat = to_chat(text={"format": item("json_schema", **shape), "verbosity": "low"})
    assert chat["response_format"] == item("json_schema", json_schema=shape)
    assert to_chat(text={"format": item("json_object")})["response_format"] == item("json_object")


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        (None, {"maximum": 3}), ("input", {"input": None}), ("input", {"input": []}),
        ("input", {"input": 7}), ("store", {"store": True}), ("background", {"background": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": {"id": "c"}}), ("truncation", {"truncation": "auto"}),
        ("prompt", {"prompt": {"id": "p"}}), ("top_logprobs", {"top_logprobs": 3}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("metadata", {"metadata": {str(i): "" for i in range(17)}}),
        ("metadata.*", {"metadata": {"a": 7}}),
        ("tools.0.type", {"tools": [{"type": "custom", "name": "f"}]}),
        ("tools.0.name", {"tools": [{"type": "function"}]}),
        ("tools.0.parameters", {"tools": [{**TOOL, "parameters": nested(65)}]}),
        ("tool_choice", {"tool_choice": "any"}),
        ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("reasoning", {"reasoning": "high"}),
        ("input.0.type", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("input.0.role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input.0.content", {"input": [{"role": "user", "content": [{}] * 1025}]}),
        ("input.0.content.0.type", {"input": [{"role": "user", "content": [{"type": "file"}]}]}),
        ("input.0.content.0.image_url", {"input": [
            {"role": "user", "content": [item("input_image", image_url="file:///etc/passwd")]}]}),
        ("input.0.arguments", {"input": [item("function_call", call_id="c", name="f")]}),
        ("input.0.arguments", {"input": [
            item("function_call", call_id="c", name="f", arguments="[" * 70 + "]" * 70)]}),
        ("input.0.output.0.type", {"input": [
            item("function_call_output", call_id="c", output=[item("function_call_output")])]}),
    ],
)  # fmt: skip
def test_unserved_field_is_refused_by_its_place(param, changes):
    error = refused(to_chat, **changes)
    assert (error.status, error.param) == (400, param), error.message


# -- over HTTP -------------------------------------------------------------------------------------


async def test_response_is_its_workers_and_idle_fields_are_dropped(serve):
    here = await serve(whole)
    ask = {**ASK, "tools": [TOOL], "instructions": "Look."}
    async with client_of(here) as client:
        answer = await client.responses.create(**ask, store=False, service_tier="auto")
    assert answer.id == "resp_1" and here.engines.paths == [PATH]
    (sent,) = here.engines.bodies
    assert {name: sent.fields[name] for name in ask} == ask
    assert sent.fields.keys() - ask.keys() == {"vllm_xargs"}
    await here.idle()


async def test_refusals_are_the_clients_own_exceptions(serve):
    here = await serve(whole)
    async with client_of(here) as client:
        for changes, kind, code in (
            ({"model": "x"}, openai.NotFoundError, "model_not_found"),
            ({"store": True}, openai.BadRequestError, "unsupported_parameter"),
            ({"input": "a b c d " * 1000}, openai.BadRequestError, "context_length_exceeded"),
        ):
            with pytest.raises(kind) as caught:
                await client.responses.create(**{**ASK, **changes})
            assert caught.value.code == code
    assert here.engines.sent == []
