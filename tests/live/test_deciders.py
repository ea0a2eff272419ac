"""Two deciders behind one Envoy: they answer for each other, and one that is killed costs no
request. Engines are emulated."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.live.conftest import Live, below, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

CONFIG = """
dilation: 10
pools:
  - {name: pcie, profile: pcie, paced: true, drain_s: 5}
  - {name: c2c, profile: c2c, paced: true, drain_s: 5}
engine: {kind: emulated, device_blocks: 400, max_context_tokens: 4096}
router: {admission: false}
http: {replicas: 2}
"""
CHAT = "/v1/chat/completions"
REQUESTS, AT_ONCE = 200, 10


class Shared(Live):
    """Without a router log; `post` sends a chat."""

    def __init__(self, ready):
        self.url, self.model, self.pid = ready["url"], ready["model"], ready["pid"]
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    def body(self, **changes):
        said = [{"role": "user", "content": "hello"}]
        return {"model": self.model, "messages": said, "max_tokens": 4, **changes}

    def post(self):
        return self.http.post(CHAT, json=self.body())

    def deciders(self):
        return [one for one, name in below(self.pid).items() if "KappaDecider" in name]

    def answering(self):
        """Deciders that have opened their sockets."""
        heard = 0
        for one in self.deciders():
            with suppress(psutil.NoSuchProcess):
                heard += any("/decider-" in str(e.laddr) for e in one.net_connections("unix"))
        return heard


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("deciders"), CONFIG) as ready:
        yield Shared(ready)


def test_each_decider_answers_for_both(shared):
    before = shared.metric("kappa_decisions_total")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: shared.post(), range(16)))
    names = [one.headers["x-request-id"] for one in answers]
    assert {one.headers["x-kappa-engine"] for one in answers} == {"emulated"}
    for _ in range(3):
        assert shared.metric("kappa_decisions_total") == before + 16
        assert {*names} <= {one["request_id"] for one in shared.decisions()}
    for name in names:
        assert shared.http.get(f"/v1/decisions/{name}").json()["end"] == "done"
    assert shared.http.get("/v1/tenants").json()["tenants"]
    assert len(shared.http.post("/v1/nodes/profile").json()["nodes"]) == 2
    shared.wait_idle()


def test_a_decider_that_is_killed_costs_no_request(shared):
    first, other = shared.deciders()
    streamed = shared.body(max_tokens=200, ignore_eos=True, stream=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for killed in (first, other):
            # Begun answers, of both most likely.
            streams = [shared.http.send(
                shared.http.build_request("POST", CHAT, json=streamed), stream=True
            ) for _ in range(4)]  # fmt: skip
            lines = [one.iter_lines() for one in streams]
            for one in lines:
                next(one)
            asked = [pool.submit(shared.post) for _ in range(REQUESTS)]
            while sum(one.done() for one in asked) < REQUESTS // 4:
                time.sleep(0.01)
            killed.send_signal(signal.SIGKILL)
            answers = [one.result() for one in asked]
            wrong = [one.text for one in answers if one.status_code != 200]
            assert (len(answers), wrong) == (REQUESTS, [])
            for one in lines:
                rest = [line for line in one if line]
                assert rest[-1] == "data: [DONE]"
                assert not any("error" in json.loads(line[6:]) for line in rest[:-1])
            # The second is killed once the first is replaced, by who has known least.
            shared.until(lambda: shared.answering() == 2, "no other took its place", 120.0)
    shared.wait_idle()
