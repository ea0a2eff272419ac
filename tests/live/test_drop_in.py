"""`KappaRouter` and `AnnouncingServer` in a plain Ray Serve LLM app: prompts go as their replicas'
nodes are priced, come back to the replica that has them, and are counted as long as they run.

Once behind Ray's direct streaming, where Ray tells the router of no request's end, with unlike
nodes and engines that are made up; and once as Ray comes, with real ones. That Ray is then joined,
by a second machine and by a cluster of ours, which must leave it as it was.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil
import pytest

from kappa_benchmarks.faults.cluster import first_line
from tests.live.conftest import await_ray, serving
from tests.turns import by_turns

pytestmark = [pytest.mark.live, by_turns(__file__)]

_START_S = 480.0
_STOP_S = 60.0
_HEARD_S = 30.0
_SUBJECTS = ("rivers", "engines", "poems", "harbours", "proofs", "orchards")

DIRECT_STREAMING = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # After five seconds HAProxy would choose a replica itself: a busy machine's router takes longer
    # when it compiles its prices. Such a machine is slow to start its proxy too; no request is left
    # when it drains.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "90",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}

# On a busy machine an emulated engine is late, and admission would refuse.
TWO_MACHINES = """
router: {admission: false}
engine: {kind: emulated, device_blocks: 200, max_context_tokens: 4096}
dilation: 2
pools:
  - {name: here, profile: pcie, paced: true, placement: {resources: {rack-a: 1}}}
  - {name: there, profile: pcie, paced: true, placement: {resources: {rack-b: 1}}}
"""


class PlainApp(NamedTuple):
    """Where it answers, its Ray's HOST:PORT, and the file that its routers write."""

    url: str
    address: str
    watch: Path

    def ask(self, text: str, max_tokens: int = 2) -> openai.types.chat.ChatCompletion:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120.0)
        return client.chat.completions.create(
            model="plain", messages=[{"role": "user", "content": text}], max_tokens=max_tokens
        )

    def lines(self) -> list[dict]:
        """What its routers have written so far, which one may be doing now."""
        *whole, _ = (self.watch.read_text() if self.watch.exists() else "").split("\n")
        return [json.loads(line) for line in whole]

    def heard(self) -> list[list[dict]]:
        """What each of its routers knows of the replicas."""
        return list({line["router"]: line["replicas"] for line in self.lines()}.values())

    def most_in_flight(self) -> int:
        """What any of its routers has counted at most."""
        return max(sum(each["in_flight"] for each in line["replicas"]) for line in self.lines())

    def until(self, question: Callable[[list[dict]], bool], complaint: str) -> None:
        """Wait until it is true of what each router knows."""
        deadline_s = time.monotonic() + _HEARD_S
        while not ((heard := self.heard()) and all(map(question, heard))):
            assert time.monotonic() < deadline_s, f"{complaint}: {self.heard()}"
            time.sleep(0.2)

    def until_idle(self) -> None:
        self.until(
            lambda replicas: not any(each["in_flight"] for each in replicas),
            "requests are counted that have ended",
        )


@contextmanager
def running(watch: Path, *arguments: str, **variables: str) -> Iterator[PlainApp]:
    """The app in a process of its own."""
    script = Path(__file__).with_name("plain_ray_app.py")
    app = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PLAIN_APP_WATCH": str(watch), **variables},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    family = psutil.Process(app.pid)
    try:
        line = first_line(app, "http://", _START_S)
        assert line, f"the plain app did not start (exit code {app.poll()})"
        yield PlainApp(*line.split(), watch)
    finally:
        children = family.children(recursive=True) if family.is_running() else []
        assert app.stdin is not None
        app.stdin.close()
        _end(app, children)


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    """Of the module's Ray: whoever joins by its address must have it, and say that there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def plain_app(token: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainApp]:
    with running(tmp_path_factory.mktemp("plain") / "routers.jsonl") as app:
        yield app


@pytest.fixture(scope="module")
def second_machine(plain_app: PlainApp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another Ray node, on this machine, which joins by `ray start` as one elsewhere would."""
    ray = str(Path(sys.executable).with_name("ray"))
    # Where `ray start` says which cluster a `ray.init()` of this machine is to join.
    current = Path("/tmp/ray/ray_current_cluster")
    before = current.read_bytes() if current.exists() else None
    log = tmp_path_factory.mktemp("ray") / "ray-start.log"
    with log.open("w") as output:
        node = subprocess.Popen(
            [sys.executable, ray, "start", "--block", f"--address={plain_app.address}",
             "--num-cpus=4", '--resources={"rack-b": 1}', "--object-store-memory=100000000",
             "--disable-usage-stats"],
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        await_ray(node, log)
        yield
        assert node.poll() is None, log.read_text()
    finally:
        children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        node.terminate()
        _end(node, children)
        current.unlink(missing_ok=True)
        if before is not None:
            current.write_bytes(before)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes], children: list) -> None:
    """Wait for it to end, which it has been asked to, and for what it started; then end them."""
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=20.0)
    for each in alive:
        each.kill()


def test_direct_streaming_goes_as_priced_and_counts_down(tmp_path: Path) -> None:
    with running(tmp_path / "routers.jsonl", "unlike", **DIRECT_STREAMING) as app:
        app.until(
            lambda replicas: {each["node"] for each in replicas} == {"fast", "slow"},
            "the replicas did not announce their nodes",
        )
        prompts = [f"{i} counts " * 600 for i in range(12)]

        def rank(prompt: str) -> int:
            return int(app.ask(prompt).choices[0].message.content or -1)

        # The first decision compiles what it needs; none of the twelve ends before all are there.
        rank("the first")
        app.until_idle()
        hold = Path(f"{app.watch}.hold")
        hold.touch()
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = [threads.submit(rank, prompt) for prompt in prompts]
            try:
                app.until(lambda _: app.most_in_flight() >= 12, "they do not overlap")
            finally:
                hold.unlink()
            first = [one.result() for one in asked]
        # Of each four the fast one takes three; the last in line may differ.
        assert 8 <= first.count(0) <= 11 and len(prompts) - first.count(0) == first.count(1)
        assert app.most_in_flight() == 12
        # On such nodes each should take minutes: only the replicas' counts say that it is over.
        app.until_idle()
        assert [rank(prompt) for prompt in prompts] == first
        app.until_idle()


def test_prompts_return_to_the_replica_that_holds_them(plain_app: PlainApp) -> None:
    def cached(subject: str) -> int:
        answer = plain_app.ask(f"About {subject}. " + f"{subject} " * 300)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    first = [cached(subject) for subject in _SUBJECTS]
    again = [cached(subject) for subject in _SUBJECTS]
    assert max(first) < 64, "fresh prompts share at most their template's first block"
    # Power of two would send about half of them to the replica without their blocks.
    assert min(again) > 250


def test_a_stock_engine_is_measured_and_its_requests_counted(plain_app: PlainApp) -> None:
    plain_app.until(
        lambda replicas: [each["source"] for each in replicas] == ["measured"] * 2,
        "the replicas did not announce what was measured",
    )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: plain_app.ask(f"{i} counts", 32), range(8)))
    plain_app.until_idle()


def test_pools_on_two_machines_answer_through_one_endpoint(
    plain_app: PlainApp, second_machine: None, tmp_path: Path
) -> None:
    with serving(tmp_path, TWO_MACHINES, "--address", plain_app.address) as ready:
        assert {row["node"] for row in ready["nodes"]} == {"here", "there"}

        def answer(number: int) -> str:
            body = {
                "model": ready["model"], "max_tokens": 4,
                "messages": [{"role": "user", "content": f"{number} counts " * 200}],
            }  # fmt: skip
            found = httpx.post(f"{ready['url']}/v1/chat/completions", json=body, timeout=120.0)
            assert found.status_code == 200 and found.json()["choices"][0]["message"]["content"]
            return str(found.headers["x-kappa-node"])

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(answer, range(16))) == {"here", "there"}
    # It took back what was its own, and nothing else.
    assert plain_app.ask("Still there?").choices[0].message.content is not None
