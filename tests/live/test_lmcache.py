"""A real LMCache server behind a real vLLM engine: absent, found, loaded from, stalled, killed.

One tiny engine with our connector for the whole file, started before its server is there. Needs
`kappa lmcache setup`; without it these tests are skipped.
"""

import random
import signal
import tempfile
import time
from pathlib import Path

import pytest

from kappa.settings.cluster import home
from kappa_workers.vllm.lmcache.server import LmcacheInstall, LmcacheMissingError, LmcacheServer
from tests.live.tier_engine import BLOCK, CONTEXT, TierEngine, of_kind
from tests.turns import by_turns

TIMEOUT_S = 4.0  # of a server on a machine that stalls now and then
SERVER_BYTES = 1 << 24
PATIENCE_S = 90.0

try:
    INSTALL = LmcacheInstall.find(home())
except LmcacheMissingError as error:
    INSTALL, WHY = None, str(error)
else:
    WHY = ""

pytestmark = [
    pytest.mark.live, pytest.mark.vllm, pytest.mark.skipif(bool(WHY), reason=WHY),
    by_turns(__file__),
]  # fmt: skip


class Setting:
    """Engine and server; the server always has the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.server = None
        probe = LmcacheServer(INSTALL, BLOCK, SERVER_BYTES, folder / "probe.txt")
        self.port, self.http_port = (int(u.rsplit(":", 1)[1]) for u in (probe.url, probe.http_url))
        probe.close()
        self.engine = TierEngine(
            folder,
            INSTALL.client or "",
            kind="lmcache",
            server=f"tcp://127.0.0.1:{self.port}",
            timeout_s=TIMEOUT_S,
            heartbeat_s=0.5,
            retry_s=1.0,
        )
        self.without = self.engine.ask(prompt(1))
        self.reported = self.engine.reports(tier_failed=1)
        self.warned = sum("lmcache_failed" in line for line in self.engine.logged)

    def serve(self):
        self.server = LmcacheServer(
            INSTALL, BLOCK, SERVER_BYTES, self.folder / "server.txt", (self.port, self.http_port)
        )
        self.until_warm(prompt(99))

    def until_warm(self, tokens):
        """Ask until the server gives the whole prompt back; returns that answer."""
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self.engine.ask(tokens))["cached"] < len(tokens) // BLOCK * BLOCK:
            assert time.monotonic() < deadline, self.engine.errors.read_text()[-4000:]
            time.sleep(0.5)
        return answer

    def close(self):
        self.engine.close()
        if self.server is not None:
            self.server.process.send_signal(signal.SIGCONT)
            self.server.close()


def prompt(seed, tokens=600):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def setting():
    with tempfile.TemporaryDirectory(prefix="kappa-lmcache-") as folder:
        made = Setting(Path(folder))
        try:
            made.serve()
            yield made
        finally:
            made.close()


def test_engine_without_its_server_answers_and_counts_failures(setting):
    assert setting.without["cached"] == 0
    assert "logprob" in setting.without
    assert {m["why"] for m in of_kind(setting.reported, "tier_failed")} == {"absent"}
    assert setting.warned == 2  # one a minute, of each of its two processes


def test_evicted_prefix_comes_back_with_equal_log_probabilities(setting):
    cold = setting.engine.ask(prompt(2))
    setting.engine.reports()
    warm = setting.until_warm(prompt(2))
    assert cold["cached"] == 0
    assert warm["cached"] == 600 // BLOCK * BLOCK
    assert warm["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
    found = setting.engine.reports(admit=1, load=1)
    admitted = of_kind(found, "admit")[-1]
    assert (admitted["device_tokens"], admitted["host_tokens"]) == (0, warm["cached"])
    load = of_kind(found, "load")[-1]
    assert load["tokens"] == warm["cached"] and load["bytes"] > 0 and load["took_s"] > 0


def test_tier_announces_its_blocks_and_keeps_tenants_apart(setting):
    setting.engine.reports()
    for salt in ("alice", "bob"):
        assert setting.engine.ask(prompt(3), salt)["cached"] == 0
    blocks, events, names = 600 // BLOCK, [], []
    deadline = time.monotonic() + PATIENCE_S
    while len(names) < 2 * blocks + 1:
        assert time.monotonic() < deadline, names
        setting.engine.ask(prompt(4, 40))  # a step, with which events travel
        events += setting.engine.reports()["events"]
        stored = [e for e in events if e["type"] == "BlockStored" and e["medium"] == "CPU"]
        names = [name for event in stored for name in event["hashes"]]
    assert len(names) == len(set(names)) == 2 * blocks + 1
    device = {
        name
        for e in events
        if e["type"] == "BlockStored" and e["medium"] == "GPU"
        for name in e["hashes"]
    }
    assert set(names) <= device  # by the same names, so that each has its salt
    assert setting.engine.ask(prompt(3), "bob")["cached"] == blocks * BLOCK
    assert setting.engine.ask(prompt(3), "carol")["cached"] == 0


def test_computed_tail_is_not_loaded_and_changes_no_answer(setting):
    known = prompt(8)
    whole = setting.until_warm(known)
    setting.engine.reports()
    tail = setting.engine.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole["cached"]
    assert tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(whole["logprob"], abs=1e-5)
    load = of_kind(setting.engine.reports(load=1), "load")[-1]
    assert load["tokens"] == tail["cached"]
    assert setting.engine.ask(known)["cached"] == whole["cached"]


def test_what_the_server_evicts_is_withdrawn(setting):
    setting.engine.reports()
    setting.engine.ask(prompt(5))
    for seed in range(100, 100 + SERVER_BYTES // setting.engine.ready["prompt_bytes"] + 2):
        setting.engine.ask(prompt(seed, CONTEXT - 20))
    deadline = time.monotonic() + PATIENCE_S
    removed = 0
    while not removed and time.monotonic() < deadline:
        setting.engine.ask(prompt(4, 40))
        events = setting.engine.reports()["events"]
        removed += sum(
            len(e["hashes"]) for e in events if e["type"] == "BlockRemoved" and e["medium"] == "CPU"
        )
        time.sleep(0.2)
    assert removed


def test_stalled_server_costs_a_bounded_wait_and_no_other_answer(setting):
    known = prompt(6)
    cold = setting.engine.ask(known)
    setting.until_warm(known)
    setting.engine.reports()
    setting.server.process.send_signal(signal.SIGSTOP)
    try:
        answers = [setting.engine.ask(known) for _ in range(4)]
        setting.engine.reports(tier_failed=1)
    finally:
        setting.server.process.send_signal(signal.SIGCONT)
    assert all(answer["cached"] == 0 for answer in answers)
    for answer in answers:
        assert answer["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
    assert setting.until_warm(known)["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)


def test_killed_server_is_done_without_and_used_again_once_back(setting):
    known = prompt(7)
    cold = setting.engine.ask(known)
    setting.until_warm(known)
    # Stalled first, so that the kill meets a look-up or a load under way.
    setting.server.process.send_signal(signal.SIGSTOP)
    setting.server.process.kill()
    setting.server.process.wait()
    answers = [setting.engine.ask(known) for _ in range(3)]
    assert [answer["cached"] for answer in answers] == [0, 0, 0]
    assert {round(answer["logprob"], 4) for answer in answers} == {round(cold["logprob"], 4)}
    setting.serve()
    back = setting.until_warm(known)
    assert back["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
