"""Clients that others wrote: `openai`, `anthropic`, and litellm in an environment of its own.

`./dev litellm` makes that environment; without it its test is skipped.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import anthropic
import openai
import pytest

from kappa_workers.paced.emulated_engine import WORD
from tests.conformance.conftest import MODEL

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
LITELLM = Path(os.environ.get("KAPPA_LITELLM_PYTHON", ROOT / ".venv/litellm/bin/python"))
MESSAGES = [{"role": "user", "content": "Hello hello"}]


@pytest.fixture(scope="module")
def client(face):
    with openai.OpenAI(base_url=f"{face.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-x")


def test_chats_and_completions_whole_and_streamed(client):
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert chat.choices[0].message.content == WORD * 3 and chat.usage.completion_tokens == 3
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == WORD * 3 and chunks[-1].usage.completion_tokens == 3
    for prompt in ("Hello", [3, 4, 5]):
        whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert whole.choices[0].text == WORD * 2
    with client.completions.create(model=MODEL, prompt="x", max_tokens=2, stream=True) as stream:
        assert "".join(c.choices[0].text for c in stream if c.choices) == WORD * 2


def test_responses_and_messages_whole_and_streamed(client, face):
    ask = {"model": MODEL, "input": "Hello hello", "max_output_tokens": 3}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        *_, last = list(stream)
    for made in (whole, last.response):
        assert made.output_text == WORD * 3 and made.usage.output_tokens == 3
        assert made.incomplete_details.reason == "max_output_tokens"
    with anthropic.Anthropic(base_url=face.url, api_key="none", max_retries=0) as other:
        say = {"model": MODEL, "messages": MESSAGES}
        counted = other.messages.count_tokens(**say).input_tokens
        whole = other.messages.create(**say, max_tokens=3)
        with other.messages.stream(**say, max_tokens=3) as stream:
            assert "".join(stream.text_stream) == WORD * 3
            live = stream.get_final_message()
        for made in (whole, live):
            usage = made.usage
            assert made.content[0].text == WORD * 3 and made.stop_reason == "max_tokens"
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
            assert usage.output_tokens == 3
        with pytest.raises(anthropic.BadRequestError) as caught:
            other.messages.create(**say, max_tokens=600)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    deadline_s = time.monotonic() + 20.0
    while face.reserved():  # a stream's end may be read before its reservation is given back
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model": "gpt-x"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
    ],
)
def test_faults_become_the_clients_own_exceptions(client, changes, kind):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 2} | changes
        )
    assert caught.value.body["message"]


ASK = """
import json, sys, litellm
url, model = sys.argv[1:]
ask = dict(model=f"openai/{model}", api_base=url + "/v1", api_key="none", max_tokens=3,
           num_retries=0, messages=[{"role": "user", "content": "Hello hello"}])
whole = litellm.completion(**ask)
pieces = [c.choices[0].delta.content or "" for c in litellm.completion(**ask, stream=True)]
text = litellm.text_completion(**{k: v for k, v in ask.items() if k != "messages"}, prompt="x")
try:
    litellm.completion(**{**ask, "model": "openai/gpt-x"})
    refused = ""
except litellm.NotFoundError as error:
    refused = type(error).__name__
print(json.dumps({"whole": whole.choices[0].message.content, "streamed": "".join(pieces),
                  "tokens": whole.usage.completion_tokens, "text": text.choices[0].text,
                  "refused": refused}))
"""


@pytest.mark.skipif(not LITELLM.exists(), reason="no litellm here: ./dev litellm installs it")
def test_litellm_gets_the_same_answers(face):
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(
        [LITELLM, "-c", ASK, face.url, MODEL], capture_output=True, text=True, timeout=120,
        env=environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "whole": WORD * 3, "streamed": WORD * 3, "tokens": 3, "text": WORD * 3,
        "refused": "NotFoundError",
    }  # fmt: skip
