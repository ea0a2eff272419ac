"""Engines of our own behind an Envoy: every API, by its client."""

import anthropic
import openai
import pytest

from tests.live.conftest import Live, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

CONFIG = """
engine: {{kind: {kind}, device_blocks: 200, max_context_tokens: 2048}}
pools: [{{name: one, profile: pcie, paced: {paced}}}]
router: {{admission: false}}
"""
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", params=["emulated", "torch"])
def own(request, tmp_path_factory):
    paced = "true" if request.param == "emulated" else "false"
    config = CONFIG.format(kind=request.param, paced=paced)
    with serving(tmp_path_factory.mktemp("own"), config) as ready:
        made = Live(ready, None)
        made.kind = request.param
        yield made


def made_up(own, text):
    """Whether it says what it is, if nothing was computed for it."""
    return own.kind != "emulated" or " em" in text


def test_openais_client_is_answered_whole_and_in_pieces(own):
    ask = {"model": own.model, "extra_body": {"ignore_eos": True}}
    chats, texts = own.openai.chat.completions, own.openai.completions
    raw = chats.with_raw_response.create(**ask, messages=SAID, max_tokens=6)
    chat = raw.parse()
    assert chat.usage.completion_tokens == 6 and made_up(own, chat.choices[0].message.content)
    emulated = "emulated" if own.kind == "emulated" else None
    assert raw.headers.get("x-kappa-engine") == emulated == chat.system_fingerprint
    *_, last = chats.create(**ask, messages=SAID, max_tokens=6, stream=True)
    assert last.choices[0].finish_reason == "length"
    text = texts.create(**ask, prompt="hello", max_tokens=6)
    assert text.usage.completion_tokens == 6 and made_up(own, text.choices[0].text)
    assert list(texts.create(**ask, prompt="hello", max_tokens=6, stream=True))
    ask.pop("extra_body")
    response = own.openai.responses.create(**ask, input="hello", max_output_tokens=6)
    assert response.usage.output_tokens <= 6 and made_up(own, response.output_text)
    with own.openai.responses.stream(**ask, input="hello", max_output_tokens=6) as stream:
        ends = [event.type for event in stream]
    assert ends[-1] in ("response.completed", "response.incomplete")


def test_anthropics_client_is_answered_whole_and_in_pieces(own):
    client = anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0)
    ask = {"model": own.model, "messages": SAID, "max_tokens": 6}
    message = client.messages.create(**ask)
    assert message.usage.output_tokens <= 6 and made_up(own, message.content[0].text)
    with client.messages.stream(**ask) as stream:
        assert stream.get_final_message().usage.output_tokens <= 6
    assert client.messages.count_tokens(model=own.model, messages=SAID).input_tokens > 0


def test_what_the_engine_cannot_do_is_refused_by_its_name(own):
    with pytest.raises(openai.BadRequestError, match="logprobs: the "):
        own.openai.chat.completions.create(
            model=own.model, messages=SAID, logprobs=True, max_tokens=4, stream=True
        )
    with pytest.raises(openai.BadRequestError, match="no planner 'best'"):
        own.openai.chat.completions.create(
            model=own.model, messages=SAID, max_tokens=4, extra_headers={"x-kappa-plan": "best"}
        )


def test_the_router_knows_what_became_of_every_request(own):
    raw = own.openai.chat.completions.with_raw_response.create(
        model=own.model, messages=SAID, max_tokens=6, extra_body={"ignore_eos": True}
    )
    prompt_tokens = raw.parse().usage.prompt_tokens
    record = own.decision(raw.headers["x-request-id"])
    for told in (record["predicted"], record["actual"]):
        sources = (told[f"{source}_tokens"] for source in ("device", "cached", "new"))
        assert sum(sources) == prompt_tokens, "worker and decider tokenize alike"
    own.wait_idle()
