"""A cluster behind an Envoy: every API by its client, refusals, and what survives a kill."""

import contextlib
import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import psutil
import pytest

from tests.live.conftest import Live, below, listening, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-01234567890", "ops": "sk-ops-01234567890"}
CONFIG = f"""
dilation: 10
pools:
  - {{name: pcie, profile: pcie, paced: true, drain_s: 5}}
  - {{name: c2c, profile: c2c, paced: true, drain_s: 5}}
engine: {{device_blocks: 400, max_context_tokens: 6144}}
router: {{admission: false}}
tenants:
  by_key: {{{", ".join(f"{key}: {name}" for name, key in KEYS.items())}}}
  unknown: refuse
  operators: [ops]
  limits: {{bob: {{requests_per_minute: 2}}}}
"""
CHAT = "/v1/chat/completions"


class Door(Live):
    """As its operator asks it; `post` as any tenant."""

    def __init__(self, ready):
        self.url, self.model, self.pid = ready["url"], ready["model"], ready["pid"]
        headers = {"authorization": f"Bearer {KEYS['ops']}"}
        self.http = httpx.Client(base_url=self.url, timeout=120.0, headers=headers)
        self.openai = openai.OpenAI(**self.client_options())

    def client_options(self):
        return {**super().client_options(), "api_key": KEYS["ops"]}

    def post(self, tenant="alice", path=CHAT, **changes):
        said = [{"role": "user", "content": "hello"}]
        body = {"model": self.model, "messages": said, "max_tokens": 4, **changes}
        key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {"authorization": ""}
        return self.http.post(path, json=body, headers=key)

    def both_serve(self):
        """Whether both workers may be chosen; one that died is listed for a while longer."""
        return [row["breaker"]["state"] for row in self.nodes()] == ["closed", "closed"]

    def process(self, title):
        """The first of the cluster's processes with that in its title."""
        return next(one for one, name in below(self.pid).items() if title in name)


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("door"), CONFIG) as ready:
        yield Door(ready)


def test_openais_client_is_served(door):
    said = [{"role": "user", "content": "hello"}]
    raw = door.openai.chat.completions.with_raw_response.create(
        model=door.model, messages=said, max_tokens=4
    )
    assert raw.parse().usage.completion_tokens <= 4
    record = door.decision(raw.headers["x-request-id"])
    assert record["tenant"] == "ops" and record["node"] == raw.headers["x-kappa-node"]
    events = list(
        door.openai.chat.completions.create(
            model=door.model, messages=said, max_tokens=4, stream=True
        )
    )
    assert events[-1].choices[0].finish_reason
    text = door.openai.completions.create(model=door.model, prompt="hello", max_tokens=4)
    assert text.choices[0].text
    response = door.openai.responses.create(model=door.model, input="hello", max_output_tokens=4)
    assert response.usage.output_tokens <= 4


def test_anthropics_client_is_served(door):
    client = anthropic.Anthropic(base_url=door.url, api_key=KEYS["alice"], max_retries=0)
    said = [{"role": "user", "content": "hello"}]
    message = client.messages.create(model=door.model, messages=said, max_tokens=4)
    assert message.usage.output_tokens <= 4
    counted = client.messages.count_tokens(model=door.model, messages=said)
    assert counted.input_tokens == message.usage.input_tokens


def test_refusals_are_the_deciders(door):
    assert door.post(tenant=None).status_code == 401
    assert door.post(path="/v1/embeddings").status_code == 404
    assert door.post(model="none").status_code == 404
    assert door.post(kv_transfer_params={"a": 1}).status_code == 400
    answers = [door.post("bob") for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert int(answers[-1].headers["retry-after"]) > 0


def test_a_workers_port_is_for_fronts_alone(door):
    ports = {
        address.port
        for one, name in below(door.pid).items()
        if "KappaServer" in name
        for address in listening(one)
    }
    statuses = set()
    for port in ports:
        try:
            statuses.add(httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code)
        except httpx.HTTPError:
            continue  # Another protocol's.
    assert statuses == {403}


def test_a_killed_worker_loses_nothing_that_had_not_begun(door):
    long = [{"role": "user", "content": "counts the river " * 300}]
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(door.post, messages=long, max_tokens=16) for _ in range(12)]
        time.sleep(0.5)
        door.process("KappaServer:c2c").send_signal(signal.SIGKILL)
        assert [one.result().status_code for one in asked] == [200] * 12
    door.wait_idle()


def test_a_stopped_worker_loses_nothing_that_had_not_begun(door):
    """What had not begun goes elsewhere; what had is cut. Nothing waits for the time-out."""
    # One that an earlier test killed may not be back.
    door.until(door.both_serve, "a worker is missing", 240.0)
    said = [{"role": "user", "content": "hello"}]
    stopped = door.process("KappaServer:pcie")
    begun = {"model": door.model, "messages": said, "max_tokens": 400, "ignore_eos": True}
    long = [{"role": "user", "content": "counts the river " * 300}]
    cut = Counter()

    def stream(_):
        body = {**begun, "stream": True}
        try:
            with door.http.stream("POST", CHAT, json=body) as answer:
                node, last = answer.headers["x-kappa-node"], ""
                for line in answer.iter_lines():
                    last = line or last
            cut[node, last == "data: [DONE]"] += 1
        except httpx.HTTPError:
            cut[node, False] += 1

    with ThreadPoolExecutor(24) as pool:
        streams = pool.map(stream, range(6))
        time.sleep(3.0)
        asked = [pool.submit(door.post, messages=long, max_tokens=16) for _ in range(12)]
        time.sleep(0.5)
        stopped.send_signal(signal.SIGSTOP)
        try:
            assert [one.result().status_code for one in asked] == [200] * 12
            list(streams)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped.send_signal(signal.SIGCONT)
    # All streams of the other went on.
    assert sum(cut.values()) == 6 and not cut["c2c", False], cut
    door.until(door.both_serve, "the stopped worker did not come back", 240.0)
    door.wait_idle()


def test_a_killed_decider_cuts_no_stream(door):
    said = [{"role": "user", "content": "hello"}]
    body = {
        "model": door.model, "messages": said, "max_tokens": 200, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with door.http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        door.process("KappaDecider").send_signal(signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    # Its last event; an engine that is ahead has several tokens in one.
    assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 200
    away = door.post()
    assert away.status_code in (200, 503)
    if away.status_code == 503:
        assert json.loads(away.text)["error"]["code"] == "decider_away"
    door.until(lambda: door.post().status_code == 200, "the decider did not come back", 120.0)


def test_an_unknown_key_is_refused(door):
    with pytest.raises(openai.AuthenticationError):
        options = {**door.client_options(), "api_key": "sk-nobody"}
        openai.OpenAI(**options).models.list()
