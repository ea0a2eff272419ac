"""Bodies to token ids, and a bound of their number where the engine's ids are not certain.

That the ids are the engine's is tested against it in tests/live/test_token_ids.py.
"""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from kappa_router.api.render import PromptRenderer, bounded
from kappa_router.api.request_body import RequestBody
from kappa_workers.tiny_model import make_tiny_model

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


def with_template(source, folder, template):
    """A renderer of the same model under another chat template."""
    shutil.copytree(source, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    return PromptRenderer(str(folder / "model"))


def user(content, **more):
    return {"role": "user", "content": content, **more}


def chat(*messages, **more):
    return RequestBody.chat({"messages": list(messages), **more})


def completion(prompt, **more):
    return RequestBody.completion({"prompt": prompt, **more})


def ids_of(renderer, body):
    return renderer.render(body).token_ids


def test_chat_is_rendered_with_the_models_template(renderer, read):
    ids = ids_of(renderer, chat({"role": "system", "content": "Be brief."}, user("Hi")))
    assert ids.dtype == np.int64
    assert read(ids) == "<s><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


def test_longer_chat_begins_with_the_shorter_one(renderer):
    messages = [user("One"), {"role": "assistant", "content": "Two"}, user("Three")]
    short = ids_of(renderer, chat(*messages[:1], add_generation_prompt=False)).tolist()
    long = ids_of(renderer, chat(*messages)).tolist()
    assert long[: len(short)] == short


def test_parts_are_joined_by_lines_and_empty_ones_left_out(renderer, read):
    parts = [{"type": "text", "text": t} for t in ("", "a", "", "b", "")]
    assert "<|user|>a\nb<|end|>" in read(ids_of(renderer, chat(user(parts))))
    assert "<|user|>a\nb<|end|>" in read(ids_of(renderer, chat(user(["a", "b"]))))


def test_missing_content_is_empty(renderer, read):
    body = chat(user("Hi"), {"role": "assistant", "content": None}, user("Again"))
    assert "<|assistant|><|end|><|user|>Again" in read(ids_of(renderer, body))


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
    text = read(ids_of(renderer, chat(user("Go"), {"role": "assistant", "tool_calls": [call]})))
    told = text.split('"arguments": ')[1].split("}<|end|>")[0]
    assert json.loads(told) == shown


def test_tools_are_shown(renderer, read):
    tool = {"type": "function", "function": {"name": "weather"}}
    text = read(ids_of(renderer, chat(user("Rain?"), tools=[tool])))
    assert text.startswith("<s><|system|>Tools:\n") and "weather" in text


def test_completions_take_texts_and_ids(renderer, read):
    with_start = ids_of(renderer, completion("the fox")).tolist()
    without = ids_of(renderer, completion("the fox", add_special_tokens=False)).tolist()
    assert with_start[1:] == without and read(with_start[:1]) == "<s>"
    assert ids_of(renderer, completion([5, 6, 7])).tolist() == [5, 6, 7]
    assert ids_of(renderer, completion([[5, 6]])).tolist() == [5, 6]


@pytest.mark.parametrize(
    "body",
    [
        completion(["one", "two"]),
        completion([[1], [2]]),
        completion([]),
        chat(user([{"type": "image_url", "image_url": {"url": "http://x"}}])),
        chat(user([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}])),
        chat(user([{"type": "text", "text": None}])),
    ],
)
def test_uncertain_prompts_are_not_guessed(renderer, body):
    assert ids_of(renderer, body) is None


def test_prompts_count_together_and_the_longest_alone(renderer):
    several = renderer.render(completion([[1, 2], [3, 4, 5]]))
    assert (several.token_ids, several.tokens, several.longest_tokens) == (None, 5, 3)
    one, other = (renderer.render(completion(t)).tokens for t in ("the fox", "the quick brown fox"))
    both = renderer.render(completion(["the fox", "the quick brown fox"]))
    assert (both.tokens, both.longest_tokens) == (one + other, other) and other > one > 1


def test_unrendered_prompt_is_bounded_by_bytes_and_media():
    # 8 around a message; "role" and "user", 4 bytes each; "é" is 2 bytes.
    assert bounded(chat(user("é" * 10))).tokens == 8 + 8 + 20
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 99_999}}
    text = {"type": "text", "text": "abc"}
    # Beside the image, "type", "text", "text" and "abc".
    assert bounded(chat(user([image, text]))).tokens == 8 + 8 + 16_384 + 15
    assert bounded(completion(["abc", "é"])).tokens == 5
    assert bounded(completion([[70_000, 3], [5]])).tokens == 3
    assert bounded(chat(user("x"))).longest_tokens == 0
    # Of a tool's numbers each digit may be a token; "n" is their key, and its names are shown:
    # "type", "function", "name", "f", "description", "parameters", and the type again.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"n": [70_000, 123]}}}
    names = 4 + 8 + 4 + 1 + 11 + 10 + 8
    assert bounded(chat(user("x"), tools=[tool])).tokens == 8 + 8 + 1 + names + 1 + 5 + 3


def test_templates_that_look_into_parts_get_no_guess_for_several(source, tmp_path):
    renderer = with_template(source, tmp_path, LISTS_TEMPLATE)
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ids_of(renderer, chat(user(two))) is None
    assert ids_of(renderer, chat(user(two[:1]))) is not None


def test_developer_role_is_not_guessed_where_templates_lack_it(source, tmp_path):
    renderer = with_template(source, tmp_path, NO_DEVELOPER)
    assert ids_of(renderer, chat({"role": "developer", "content": "x"}, user("y"))) is None
    assert ids_of(renderer, chat(user("y"))) is not None
