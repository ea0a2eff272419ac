"""Bodies in, events out, for an engine that takes token ids and gives token ids."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.own_engine.openai import BodyRefused, Detokenizer, OpenAIAnswer, Stopper, read_body


def body(tokens=(5, 6, 7), **fields):
    packed = base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()
    extra = {"kappa_prompt": packed, **fields.pop("extra", {})}
    return SimpleNamespace(vllm_xargs=extra, **fields)


def test_a_body_is_read():
    read = read_body(
        body(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop="END", stream=True, priority=4,
             stream_options=SimpleNamespace(include_usage=True), cache_salt="s",
             extra={"kappa_plan": "kv"}),
        eos_tokens=[2],
    )  # fmt: skip
    request, sampling = read.request, read.request.sampling
    assert (request.tokens, request.max_tokens, request.salt) == ([5, 6, 7], 9, "s")
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert sampling.stop_tokens == {2} and (request.planner, request.priority) == ("kv", 4)
    assert (read.stop, read.stream, read.include_usage) == (("END",), True, True)


def test_defaults_are_those_of_the_api():
    read = read_body(body(), eos_tokens=[2]).request
    assert (read.sampling.temperature, read.sampling.top_p) == (1.0, 1.0)
    assert read.max_tokens > 1_000_000
    assert read_body(
        body(ignore_eos=True, stop_token_ids=[9]), [2]
    ).request.sampling.stop_tokens == {9}


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("logprobs", True), ("tools", [{}]), ("min_tokens", 3), ("top_k", 5),
     ("logit_bias", {"1": 2.0}), ("presence_penalty", 0.5), ("structured_outputs", object())],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(field, value):
    with pytest.raises(BodyRefused, match=f"{field}: .*use vllm"):
        read_body(body(**{field: value}), [])


def test_bad_numbers_are_refused_by_name():
    with pytest.raises(BodyRefused, match="temperature: "):
        read_body(body(temperature=-1.0), [])
    with pytest.raises(BodyRefused, match="top_p: "):
        read_body(body(top_p=0.0), [])


def test_a_body_without_tokens_is_refused():
    with pytest.raises(BodyRefused, match="kappa decider"):
        read_body(SimpleNamespace(vllm_xargs=None), [])


class Bytes:
    """A tokenizer whose tokens are bytes: every character beyond ASCII takes several."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.text(max_size=8))
def test_pieces_add_up_to_the_text_whatever_its_characters(text, prompt):
    detokenizer = Detokenizer(Bytes(), list(prompt.encode()))
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.rest() == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops):
    stopper = Stopper(stops)
    shown = "".join(stopper.push(char) for char in text) + stopper.push("", last=True)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    # Letter by letter, what counts is which stop string is complete first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not places:
        assert shown == text and not stopper.stopped
    else:
        first = min(ends)
        expected = min(text[:first].find(s) for s in stops if s in text[:first])
        assert shown == text[:expected] and stopper.stopped


def events(*texts):
    lines = "".join(texts).split("\n\n")
    return [json.loads(line[6:]) for line in lines if line and not line.endswith("[DONE]")]


def test_a_chat_stream_has_role_text_reason_and_usage():
    answer = OpenAIAnswer("chat", "r", "m", 12.7, prompt_tokens=3)
    usage = answer.usage(2, 1)
    told = events(answer.opening(), answer.chunk("Hel"), answer.chunk("lo", "stop"),
                  answer.closing(usage))  # fmt: skip
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [e["choices"][0]["delta"].get("content") for e in told[1:3]] == ["Hel", "lo"]
    assert told[2]["choices"][0]["finish_reason"] == "stop"
    assert told[3]["choices"] == [] and told[3]["usage"]["completion_tokens"] == 2
    assert answer.closing(None) == "data: [DONE]\n\n"


def test_a_completion_is_text_whole_or_in_pieces():
    answer = OpenAIAnswer("completions", "r", "m", 1.0, prompt_tokens=3)
    assert answer.opening() == ""
    assert events(answer.chunk("x"))[0]["choices"][0]["text"] == "x"
    whole = answer.whole("xy", "length", answer.usage(2, 0))
    assert whole["choices"] == [{"index": 0, "finish_reason": "length", "text": "xy"}]
    assert whole["usage"]["total_tokens"] == 5
