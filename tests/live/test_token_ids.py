"""The decider computes the very token ids that the engine computes, whatever the chat holds.

One wrong id and a prompt's hashes match nothing: routing would be blind without a word.
"""

import asyncio
import json
import random

import openai
import pytest

from kappa.settings.cluster import load_settings
from kappa_deploy.app.model import prepare_model
from kappa_router.api.render import PromptRenderer
from kappa_router.api.request_body import RequestBody
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

CHATS = 200
AT_ONCE = 16

TEXTS = (
    "Hello",
    "",
    "  leading and trailing  ",
    "line one\nline two\n\n\tindented",
    "naïve café, Ελληνικά, русский, 日本語, 한국어, العربية",
    "🙂🚀👩‍👩‍👧 emoji, combining: e\u0301, zero\u200bwidth",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": None}\n",
    "<s></s> <|user|> markers <|end|> in the text",
    "{{ not_a_template }} {% raw %} &amp; \\n \\\\",
    "A longer paragraph about links and caches. " * 40,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name} — überall.",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}, "n": {"type": "integer", "default": 3}},
                "required": ["q"],
            },
        },
    }
    for name in ("weather", "search")
]


def content(rng):
    text = rng.choice(TEXTS)
    if rng.random() < 0.25:
        return [{"type": "text", "text": text}, {"type": "text", "text": rng.choice(TEXTS)}]
    return text


def call(rng, number):
    if rng.random() < 0.1:
        arguments = rng.choice(("", "{broken", "[1, 2]", "null"))
    else:
        arguments = json.dumps(
            {"q": rng.choice(TEXTS), "n": number}, ensure_ascii=rng.random() < 0.5
        )
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": rng.choice(("weather", "search")), "arguments": arguments},
    }


def chat_body(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "developer")), "content": content(rng)})
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content(rng)})
        if rng.random() < 0.3:
            calls = [call(rng, 10 * turn + i) for i in range(rng.randint(1, 2))]
            said = {"content": rng.choice(TEXTS)} if rng.random() < 0.5 else {}
            messages.append({"role": "assistant", **said, "tool_calls": calls})
            for made in calls:
                messages.append(
                    {"role": "tool", "tool_call_id": made["id"], "content": content(rng)}
                )
        messages.append({"role": "assistant", "content": content(rng)})
    if rng.random() < 0.9:
        messages.append({"role": "user", "content": content(rng), "name": "Grace"})
    body = {"messages": messages}
    if rng.random() < 0.4:
        # vLLM would parse calls in the answer only if told how; the prompt shows the tools anyway.
        body |= {"tools": TOOLS[: rng.randint(1, 2)], "tool_choice": "none"}
    if messages[-1]["role"] == "assistant" and rng.random() < 0.7:
        body["add_generation_prompt"] = False
    if rng.random() < 0.1:
        body["add_special_tokens"] = True
    return body


def completion_body(rng, vocabulary=3000):
    prompts = (
        "".join(rng.choices([t for t in TEXTS if t], k=2)),
        [rng.randrange(vocabulary) for _ in range(rng.randint(1, 80))],
        [[rng.randrange(vocabulary) for _ in range(8)]],
    )
    body = {"prompt": rng.choice(prompts)}
    if rng.random() < 0.3:
        body["add_special_tokens"] = False
    return body


@pytest.fixture(scope="module")
def renderer():
    return PromptRenderer(prepare_model(load_settings()).source)


async def engine_ids(live, bodies, path):
    gate = asyncio.Semaphore(AT_ONCE)
    more = {"model": live.model, "max_tokens": 1, "return_token_ids": True}
    async with openai.AsyncOpenAI(**live.client_options()) as client:

        async def one(body):
            async with gate:
                answer = await client.post(path, cast_to=object, body=body | more)
            first = answer["choices"][0]
            return answer.get("prompt_token_ids") or first.get("prompt_token_ids")

        return await asyncio.gather(*(one(body) for body in bodies))


@pytest.mark.parametrize(
    ("path", "kind", "make", "count"),
    [
        ("/chat/completions", RequestBody.chat, chat_body, CHATS),
        ("/completions", RequestBody.completion, completion_body, 30),
    ],
    ids=["chat", "completions"],
)
async def test_rendered_ids_are_the_engines(idle, renderer, path, kind, make, count):
    rng = random.Random(7)
    bodies = [make(rng) for _ in range(count)]
    theirs = await engine_ids(idle, bodies, path)
    ours = [renderer.render(kind(body)).token_ids for body in bodies]
    wrong = [
        body
        for body, mine, engine in zip(bodies, ours, theirs, strict=True)
        if mine is None or mine.tolist() != engine
    ]
    assert not wrong, f"{len(wrong)} of {count} differ; the first: {json.dumps(wrong[0])}"
    records = idle.decisions(limit=count)
    assert all(record["reason"] != "uninformed_least_backlog" for record in records)
