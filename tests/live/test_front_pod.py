"""The pieces of a front pod as its containers run them, from a rendered manifest, on this machine:
a Ray node that offers a place for a decider, the application, and an Envoy beside it."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from kappa.host import die_with_parent, free_ports
from kappa_deploy import front_pod
from kappa_deploy.k8s import render
from tests.live.conftest import await_ray
from tests.live.front_pod_app import FOLDER_ENV
from tests.turns import by_turns

pytestmark = [
    pytest.mark.live,
    by_turns(__file__),
    pytest.mark.skipif(
        not (shutil.which("kubectl") or shutil.which("kustomize")),
        reason="rendering needs kubectl or kustomize",
    ),
]

_BIN = Path(sys.executable).parent
_STARTS_S, _ENDS_S = 240.0, 10.0


@contextmanager
def running(command, output, **more):
    """A process of ours, which ends with the block or with us."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()), **more,
        )  # fmt: skip
    try:
        yield process
    finally:
        family = []
        if process.poll() is None:
            ours = psutil.Process(process.pid)
            family = [ours, *ours.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, _ENDS_S)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(alive, _ENDS_S)
        process.wait(_ENDS_S)


class Pod:
    """What stands in the manifest of the overlay cpu-demo, on this machine."""

    def __init__(self, folder):
        self.folder, self.front = folder, folder / "front"
        text = render.render(render.OVERLAYS / "cpu-demo")
        documents = {one["kind"]: one for one in yaml.safe_load_all(text) if one}
        spec = documents["RayService"]["spec"]
        self.serve_config = spec["serveConfigV2"]
        self.group = spec["rayClusterConfig"]["workerGroupSpecs"][0]
        self.envoy = self.group["template"]["spec"]["containers"][1]
        self.mounted = folder / "mounted"
        self.mounted.mkdir()
        self.port, gcs = free_ports("127.0.0.1", 2)
        for name, content in documents["ConfigMap"]["data"].items():
            here = content.replace(str(front_pod.FOLDER), str(self.front))
            (self.mounted / name).write_text(
                here.replace('"port_value": 8000', f'"port_value": {self.port}')
            )
        self.gcs = f"127.0.0.1:{gcs}"
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PYTHONPATH": str(Path(__file__).parents[2]), FOLDER_ENV: str(self.front),
        }  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0)

    def ray(self):
        """Its head is the front pod's node and the workers', too."""
        resources = self.group["rayStartParams"]["resources"].strip('"').replace('\\"', '"')
        return running(
            [_BIN / "ray", "start", "--head", "--block", "--port", self.gcs.rpartition(":")[2],
             "--node-ip-address", "127.0.0.1", "--include-dashboard", "false",
             "--num-cpus", "8", "--resources", resources, "--temp-dir", self.folder / "ray",
             "--object-store-memory", str(256 << 20)],
            self.folder / "ray.txt", env=self.environment,
        )  # fmt: skip

    def deploy(self, **args):
        config = yaml.safe_load(self.serve_config)
        (application,) = config["applications"]
        application["import_path"] = "tests.live.front_pod_app:app"
        application["args"].update(args)
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        subprocess.run(
            [_BIN / "serve", "run", "--non-blocking", "--address", self.gcs, file],
            env=self.environment, check=True, capture_output=True, timeout=_STARTS_S,
        )  # fmt: skip

    def envoys(self):
        here = [
            part.replace(str(front_pod.FOLDER), str(self.front)) for part in self.envoy["command"]
        ]
        return running([_BIN / here[0], *here[1:]], self.folder / "envoy.txt")

    def get(self, path):
        try:
            return self.http.get(path)
        except httpx.TransportError:
            return None

    def until_ready(self):
        """Until its readiness probe passes."""
        probe = self.envoy["readinessProbe"]["httpGet"]
        until_s = time.monotonic() + _STARTS_S
        while (answer := self.get(probe["path"])) is None or answer.status_code != 200:
            assert time.monotonic() < until_s, answer
            time.sleep(0.5)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def workers(self):
        answer = self.get("/v1/nodes")
        rows = answer.json()["nodes"] if answer is not None and answer.status_code == 200 else ()
        return {row["worker"] for row in rows}

    def said_until_others(self, before):
        """The statuses of chats until as many other workers serve."""
        said, until_s = set(), time.monotonic() + _STARTS_S
        while (now := self.workers()) & before or len(now) < len(before):
            assert time.monotonic() < until_s, (said, now)
            said.add(self.chat().status_code)
            time.sleep(0.2)
        return said

    def chat(self, number=0):
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 4,
        }  # fmt: skip
        return self.http.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def pod():
    with tempfile.TemporaryDirectory(prefix="front-pod-") as folder:
        made = Pod(Path(folder))
        front_pod.prepare(made.mounted, made.front)
        with made.ray() as head:
            await_ray(head, made.folder / "ray.txt")
            made.deploy()
            yield made


def test_a_front_pod_answers_starts_anew_and_drains(pod):
    with pod.envoys() as envoy:
        pod.until_ready()
        with ThreadPoolExecutor(4) as many:
            assert {one.status_code for one in many.map(pod.chat, range(8))} == {200}
        assert "LIVE" in front_pod.ask("GET", "/ready", pod.front)
        # Its container starts again, with the files of the one before.
        envoy.kill()
        envoy.wait()
    with pod.envoys():
        pod.until_ready()
        assert pod.chat().status_code == 200
        # Deployed anew, workers of the old settings and of the new ones know the same secret.
        before = pod.workers()
        pod.deploy(router={"max_queue": 50})
        assert pod.said_until_others(before) <= {200, 503}
        assert pod.chat().status_code == 200
        assert front_pod.drain(20, pod.front, unlisted_s=0.0) == 0
