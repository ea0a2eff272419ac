"""One real cluster for all live tests: `kappa serve` in a process of its own, stopped politely.

Its settings are small where a test must reach a limit (device cache, body), and its paced
nodes fast, so that the tests are. The numbers here are the ones that the tests use.
"""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kappa_benchmarks.faults.cluster import launch, ready_line

_STOP_S = _RAY_S = 60.0
_POLL_S = 0.2
_IDLE_S = 60.0
_HURTS = Path(__file__).with_name("test_failover.py")

CONFIG = """
dilation: 10
pools:
  - {{name: pcie, profile: pcie, paced: true, drain_s: 5}}
  - {{name: c2c, profile: c2c, paced: true, drain_s: 5}}
engine:
  device_blocks: 200
  metrics: true
  max_context_tokens: 6144
  tool_call_parser: hermes
router:
  admission: false  # bursts are more than it lets in
  max_body_bytes: 131072
  record: {record}
"""


class Live:
    """A running cluster, and questions to ask it; model: its own, without adapters and others."""

    max_body_bytes = 131072
    max_context_tokens = 6144

    def __init__(self, ready, router_log):
        self.router_log = router_log
        self.url, self.model, self.nodes_at_start = ready["url"], ready["model"], ready["nodes"]
        self.pid = ready["pid"]
        self.http = httpx.Client(base_url=self.url, timeout=120.0)
        self.openai = openai.OpenAI(**self.client_options())
        self.decisions_at_start = self.decisions()

    def client_options(self):
        return {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 120.0,
        }

    def nodes(self):
        return [row for row in self.all_nodes() if row["model"] == self.model]

    def all_nodes(self):
        return self.http.get("/v1/nodes").json()["nodes"]

    def decisions(self, limit=4096):
        return self.http.get("/v1/decisions", params={"limit": limit}).json()["decisions"]

    def decision(self, request_id):
        """The record of a request, once its engine has reported its admission."""

        def found():
            records = [r for r in self.decisions() if r["request_id"] == request_id]
            return records and records[0]["actual"]["new_tokens"] is not None and records[0]

        return self.until(found, f"no admission of {request_id} was reported")

    def metric(self, name, **labels):
        """Sum of a metric's samples that carry `labels`."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def until(self, question, complaint, patience_s=_IDLE_S):
        """Ask until the answer is true; return it."""
        deadline = time.monotonic() + patience_s
        while not (answer := question()):
            assert time.monotonic() < deadline, complaint
            time.sleep(_POLL_S)
        return answer

    def until_known(self, tokens, **asked):
        """Return once the router knows where so many tokens of a prompt are: a worker's events
        come behind its answer."""

        def known():
            told = self.http.post("/v1/route", json={"model": self.model, **asked}).json()
            found = [c["device_tokens"] + c["cached_tokens"] for c in told["candidates"]]
            return max(found) >= tokens

        self.until(known, f"the router does not know of {tokens} tokens")

    def wait_idle(self):
        """Return when no request is reserved any more."""
        self.until(lambda: self.metric("kappa_reservations") == 0, "a reservation leaked")


def pytest_collection_modifyitems(items):
    """Tests that use the cluster are live ones, and last: others start clusters of their own.

    Those that hurt it (`test_failover.py`) are the very last.
    """

    def uses_it(item):
        return "live" in getattr(item, "fixturenames", ())

    for item in filter(uses_it, items):
        item.add_marker(pytest.mark.live)
    items.sort(key=lambda item: (uses_it(item), item.path == _HURTS))


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    record = folder / "router.jsonl"
    with serving(folder, CONFIG.format(record=record)) as ready:
        yield Live(ready, record)


def below(pid):
    """The processes that one has started, by title; those that end meanwhile are left out."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = " ".join(process.cmdline())
    return found


def listening(process):
    """Where it listens, by TCP; nowhere if it has ended."""
    with suppress(psutil.NoSuchProcess):
        found = process.net_connections("tcp")
        return [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
    return []


@contextmanager
def serving(folder, settings, *options):
    """`kappa serve` with these settings and options, in a process of its own; gives what it says
    when ready."""
    config, errors = folder / "cluster.yaml", folder / "stderr.txt"
    config.write_text(settings)
    # Ray's agents report every ten seconds, for which tests of the metrics would wait.
    process = launch(config, errors, {"RAY_metrics_report_interval_ms": "3000"}, *options)
    survivors = []
    try:
        yield {**ready_line(process, errors), "pid": process.pid}
    finally:
        survivors = _stop(process)
    assert not survivors, f"these outlived the cluster: {survivors}\n{errors.read_text()[-4000:]}"
    assert process.returncode == 0, errors.read_text()[-4000:]


def await_ray(process, log):
    """Return once `ray start --block`, whose output is in `log`, says that its node runs."""
    deadline = time.monotonic() + _RAY_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(_POLL_S)


@pytest.fixture
def fresh_environment():
    """What an engine of this process sets in the environment goes with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def idle(live):
    """The cluster, with nothing in flight before and nothing left reserved after the test."""
    live.wait_idle()
    yield live
    live.wait_idle()


def _stop(process):
    """Stop politely, then surely; return what had to be killed."""
    family = []
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(family, timeout=10.0)
    survivors = []
    for child in alive:
        try:
            survivors.append(f"{child.pid} {' '.join(child.cmdline())[:120]}")
            child.kill()
        except psutil.NoSuchProcess:
            continue
    return survivors
