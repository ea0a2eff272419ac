"""Bodies to token ids, and None where the engine's ids are not certain.

That the ids are the engine's is tested against it in tests/live/test_token_ids.py.
"""

import json
from types import SimpleNamespace as Body

import numpy as np
import pytest
from transformers import AutoTokenizer

from router.ingress.rendering import PromptRenderer
from workers.tiny_model import make_tiny_model

LISTS_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
NO_DEVELOPER = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(make_tiny_model(folder, ["the quick brown fox " * 20, '{"name": "weather"}']))


@pytest.fixture(scope="module")
def renderer(source):
    return PromptRenderer(source)


@pytest.fixture(scope="module")
def read(source):
    tokenizer = AutoTokenizer.from_pretrained(source)
    return lambda ids: tokenizer.decode(ids)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def chat(*messages, **more):
    return Body(messages=list(messages), **more)


def test_a_chat_is_rendered_with_the_models_template(renderer, read):
    ids = renderer.render(chat({"role": "system", "content": "Be brief."}, user("Hi")))
    assert ids.dtype == np.int64
    assert read(ids) == "<s><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


def test_a_longer_chat_begins_with_the_shorter_one(renderer):
    messages = [user("One"), {"role": "assistant", "content": "Two"}, user("Three")]
    short = renderer.render(chat(*messages[:1], add_generation_prompt=False)).tolist()
    long = renderer.render(chat(*messages)).tolist()
    assert long[: len(short)] == short


def test_parts_are_joined_by_lines_and_empty_ones_left_out(renderer, read):
    parts = [{"type": "text", "text": t} for t in ("", "a", "", "b", "")]
    assert "<|user|>a\nb<|end|>" in read(renderer.render(chat(user(parts))))
    assert "<|user|>a\nb<|end|>" in read(renderer.render(chat(user(["a", "b"]))))


def test_missing_content_is_empty(renderer, read):
    body = chat(user("Hi"), {"role": "assistant", "content": None}, user("Again"))
    assert "<|assistant|><|end|><|user|>Again" in read(renderer.render(body))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"q":1,  "s": "é"}', {"q": 1, "s": "é"}),
        ("", {}),
        ("{broken", {}),
        ("[1, 2]", {}),
        ("null", {}),
        ({"q": 2}, {"q": 2}),
        (None, {}),
    ],
)
def test_tool_arguments_become_objects_as_in_the_engine(renderer, read, arguments, shown):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = read(renderer.render(chat(user("Go"), {"role": "assistant", "tool_calls": [call]})))
    told = text.split('"arguments": ')[1].split("}<|end|>")[0]
    assert json.loads(told) == shown


def test_tools_are_shown(renderer, read):
    tool = Body(model_dump=lambda: {"type": "function", "function": {"name": "weather"}})
    text = read(renderer.render(chat(user("Rain?"), tools=[tool])))
    assert text.startswith("<s><|system|>Tools:\n") and "weather" in text


def test_completions_take_texts_and_ids(renderer, read):
    with_start = renderer.render(Body(prompt="the fox")).tolist()
    without = renderer.render(Body(prompt="the fox", add_special_tokens=False)).tolist()
    assert with_start[1:] == without and read(with_start[:1]) == "<s>"
    assert renderer.render(Body(prompt=[5, 6, 7])).tolist() == [5, 6, 7]
    assert renderer.render(Body(prompt=[[5, 6]])).tolist() == [5, 6]


@pytest.mark.parametrize(
    "body",
    [
        Body(prompt=["one", "two"]),
        Body(prompt=[[1], [2]]),
        Body(prompt=[]),
        chat(user([{"type": "image_url", "image_url": {"url": "http://x"}}])),
        chat(user([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}])),
        chat(user([{"type": "text", "text": None}])),
        chat(user("Cut me"), truncate_prompt_tokens=5),
    ],
)
def test_what_is_not_certain_is_not_guessed(renderer, body):
    assert renderer.render(body) is None


def test_templates_that_look_into_parts_get_no_guess_for_several(source):
    renderer = PromptRenderer(source, LISTS_TEMPLATE)
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert renderer.render(chat(user(two))) is None
    assert renderer.render(chat(user(two[:1]))) is not None


def test_developers_are_not_guessed_where_the_template_knows_none(source):
    renderer = PromptRenderer(source, NO_DEVELOPER)
    assert renderer.render(chat({"role": "developer", "content": "x"}, user("y"))) is None
    assert renderer.render(chat(user("y"))) is not None
