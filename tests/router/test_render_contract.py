"""A chat comes to a template as vLLM's schema and parser would hand it there, without them."""

import json
import random
from types import SimpleNamespace

import pytest
from vllm.entrypoints.chat_utils import parse_chat_messages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)

from kappa_router.api.fields import checked_chat
from kappa_router.api.render import shown_tools
from kappa_router.api.request_body import RequestBody
from tests.live.test_token_ids import chat_body

pytestmark = pytest.mark.vllm

TEXT_ONLY = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)


def call(**more):
    # Not in the order of vLLM's schema.
    function = {"name": "f", "arguments": '{"b": 1, "a": {"z": 1, "c": [2]}}', **more}
    return {"type": "function", "function": function, "id": "1"}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CASES = [
    [said("user", "x", name="n")],
    [said("user", [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}], name="n")],
    [{"role": "user"}, {"role": "assistant", "tool_calls": [call()]}],
    [said("assistant", None, tool_calls=[call(), call(arguments="[1]")], reasoning="r", name="n")],
    [said("assistant", "c", tool_calls=[call(arguments="{broken")], reasoning_content="r")],
    [said("assistant", "c", tool_calls=[call(arguments="")], reasoning=None, reasoning_content="")],
    [said("assistant", "c", reasoning="r", reasoning_content="other", task="t")],
    [said("assistant", None, tool_calls=[])],
    [said("assistant", "c", tool_calls=None, reasoning=None)],
    [said("tool", [{"type": "text", "text": "a"}], tool_call_id="1")],
    [said("system", [{"type": "text", "text": "a"}]), said("critic", "c")],
]


def ours_and_theirs(renderer, body):
    made = RequestBody.chat(checked_chat({"model": "m", **body}))
    (plain,) = renderer.plain(made)
    theirs = ChatCompletionRequest.model_validate_json(made.json())
    conversation, _, _ = parse_chat_messages(theirs.messages, TEXT_ONLY, "string")
    return plain["chat"], conversation, theirs


@pytest.mark.parametrize("messages", CASES, ids=range(len(CASES)))
def test_messages_are_those_that_vllm_shows_to_a_template(renderer, messages):
    ours, theirs, _ = ours_and_theirs(renderer, {"messages": messages})
    assert ours["conversation"] == theirs
    for mine, other in zip(ours["conversation"], theirs, strict=True):
        assert json.dumps(mine.get("tool_calls")) == json.dumps(other.get("tool_calls"))


def test_random_chats_are_shown_as_vllm_does(renderer):
    rng = random.Random(11)
    for _ in range(300):
        body = chat_body(rng)
        ours, theirs, schema = ours_and_theirs(renderer, body)
        for mine in theirs:
            mine.pop("tools", None)
        assert ours["conversation"] == theirs, body
        tools = [tool.model_dump() for tool in schema.tools or ()]
        assert json.dumps(ours["tools"] or []) == json.dumps(tools)


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"strict": True, "parameters": {"z": 1, "a": 2}, "name": "f"},
        {"strict": None, "description": "d", "name": "f", "parameters": None},
    ],
)
def test_tools_are_shown_with_what_the_schema_adds(function):
    tool = {"function": function, "type": "function"}
    theirs = ChatCompletionToolsParam.model_validate(tool).model_dump()
    assert json.dumps(shown_tools([tool])) == json.dumps([theirs])
