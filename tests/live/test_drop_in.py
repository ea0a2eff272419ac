"""`KappaRouter` in a plain Ray Serve LLM app: prompts come back to the replica that has them.

Its Ray is then joined, by a second machine and by a cluster of ours, which must leave it as it was.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil
import pytest

from benchmarks.faults.cluster import first_line
from tests.live.conftest import serving

pytestmark = pytest.mark.live

_START_S = 480.0
_STOP_S = _JOIN_S = 60.0
_SUBJECTS = ("rivers", "engines", "poems", "harbours", "proofs", "orchards")

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
    """Where it answers, and its Ray's HOST:PORT."""

    url: str
    address: str

    def ask(self, text: str) -> openai.types.chat.ChatCompletion:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120.0)
        return client.chat.completions.create(
            model="plain", messages=[{"role": "user", "content": text}], max_tokens=2
        )


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    """Of the module's Ray: whoever joins by its address must have it, and say that there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def plain_app(token: None) -> Iterator[PlainApp]:
    script = Path(__file__).with_name("plain_ray_app.py")
    app = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    family = psutil.Process(app.pid)
    try:
        line = first_line(app, "http://", _START_S)
        assert line, f"the plain app did not start (exit code {app.poll()})"
        yield PlainApp(*line.split())
    finally:
        children = family.children(recursive=True) if family.is_running() else []
        assert app.stdin is not None
        app.stdin.close()
        _end(app, children)


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
        until_s = time.monotonic() + _JOIN_S
        while "Ray runtime started" not in log.read_text() and time.monotonic() < until_s:
            assert node.poll() is None, log.read_text()
            time.sleep(0.2)
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
