"""`kappa doctor --evict`: whether a server reads back what left its device."""

import json
from collections import OrderedDict
from types import SimpleNamespace

import httpx
import pytest

from kappa_deploy.checks.facts import Facts, ReadBack
from kappa_deploy.checks.table import findings
from kappa_deploy.commands import doctor
from kappa_deploy.commands.evicting import read_back

DEVICE_TOKENS = 4000


class Server:
    """An emulated server with a device that evicts the oldest prompt; time passes as it works."""

    def __init__(self, host=True, counts=True, tells=True, load_s=0.1, status=200):
        self.host, self.counts, self.tells, self.load_s = host, counts, tells, load_s
        self.status, self.now_s, self.loads = status, 0.0, 0
        self.device, self.behind = OrderedDict(), set()

    def __call__(self, request):
        if request.url.path == "/metrics":
            counter = f"vllm:kv_offload_load_size_count {self.loads}\n" if self.counts else ""
            return httpx.Response(200, text=f"{counter}vllm:num_requests_running 0\n")
        text = json.loads(request.content)["prompt"]
        tokens = 2 * len(text.split())
        cached = tokens - 16 if text in self.device or text in self.behind else 0
        if text not in self.device:
            self.now_s += self.load_s if cached else 1.0
            self.loads += bool(cached)
        self.now_s += 0.01
        self.device[text] = tokens
        if self.host:
            self.behind.add(text)
        while sum(self.device.values()) > DEVICE_TOKENS:
            self.device.popitem(last=False)
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return httpx.Response(self.status, json={"usage": usage})

    def tried(self, device_tokens=DEVICE_TOKENS):
        transport = httpx.MockTransport(self)
        with httpx.Client(transport=transport, base_url="http://a") as client:
            return read_back(client, "m", device_tokens, lambda: self.now_s)


@pytest.mark.parametrize(
    ("server", "severity", "words"),
    [
        (Server(), "pass", "of 500 tokens 484 came back once evicted, in 0.11 s (new 1.01 s"),
        (Server(counts=False), "pass", "no counter of loads"),
        (Server(host=False), "fail", "0 came back once evicted, in 1.01 s"),
        (Server(load_s=3.0), "warn", "in 3.01 s"),
        (Server(tells=False), "skip", "--enable-prompt-tokens-details"),
        (Server(status=500), "skip", "a prompt could not be sent"),
    ],
    ids=["read-back", "uncounted", "never-matched", "slow", "untold", "broken"],
)
def test_tier_of_a_server_is_judged_in_one_line(server, severity, words):
    facts = Facts(read_backs={"a": server.tried()})
    (row,) = [row for row in findings("doctor", facts) if row.where == "tier of a"]
    assert row.severity == severity
    assert words in row.what
    assert bool(row.remedy) == (severity in ("warn", "fail"))


def test_device_that_kept_the_prompt_proves_nothing():
    tried = ReadBack(500, (1.0, 0), (0.1, 480), (0.1, 480), 0)
    (*_, row) = findings("doctor", Facts(read_backs={"a": tried}))
    assert (row.severity, "not evicted" in row.what) == ("skip", True)


@pytest.mark.parametrize("tokens", [0, 1 << 30])
def test_device_of_no_known_size_is_not_filled(tokens):
    assert "is not filled" in Server().tried(tokens).fault


def test_servers_behind_kappa_route_are_tried_by_name(monkeypatch):
    server = Server()
    limits = {"device_blocks": DEVICE_TOKENS // 16, "block_tokens": 16}
    rows = {
        "nodes": [{"worker": "a", "limits": limits}],
        "backends": [
            {"worker": "a", "url": "http://a", "models": ["m"], "why": None},
            {"worker": "b", "url": "http://b", "models": [], "why": "cannot connect"},
        ],
    }
    keys, made = [], httpx.Client

    def cluster_at(url, key, timeout_s):
        answer = httpx.MockTransport(lambda request: httpx.Response(200, json=rows))
        return made(transport=answer, base_url=url)

    def client(base_url, timeout, headers=None):
        keys.append(headers)
        return made(transport=httpx.MockTransport(server), base_url=base_url)

    monkeypatch.setattr(doctor.console, "cluster_at", cluster_at)
    monkeypatch.setattr(doctor.httpx, "Client", client)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: server.now_s))
    found = doctor._read_backs("http://route", "secret")
    assert (found["a"].evicted[1], found["b"].fault, keys) == (484, "cannot connect", [None])
    del rows["backends"]
    (row,) = doctor._read_backs("http://serve", None).values()
    assert "not reached one by one" in row.fault
