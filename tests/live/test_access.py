"""What the running cluster gives away: nothing of prompts in any log, nothing beyond loopback."""

import ipaddress
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.live.conftest import below, listening

pytestmark = pytest.mark.live

SECRET = "swordfish-4711"
PATH = "/v1/chat/completions"


def ask(live, text=SECRET, path=PATH, headers=None, **changes):
    body = {"model": live.model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return live.http.post(path, json=body | changes, headers=headers or {})


def test_no_log_of_any_process_holds_text_of_a_prompt(live):
    statuses = [
        ask(live).status_code,
        ask(live, stream=True).status_code,
        ask(live, temperature=-5).status_code,
        ask(live, n=SECRET).status_code,
        ask(live, model=SECRET).status_code,
        ask(live, response_format={"type": SECRET}).status_code,
        ask(live, logit_bias={SECRET: 1}).status_code,
        ask(live, vllm_xargs={SECRET: SECRET}).status_code,
        ask(live, text=[{"type": "image_url", "image_url": {"url": SECRET}}]).status_code,
        ask(live, text=f"{SECRET} " * 20_000).status_code,
        ask(live, headers={"x-kappa-deadline-ms": "1"}).status_code,
        live.http.post("/v1/completions", json={"model": live.model, "prompt": SECRET}).status_code,
        live.http.post(PATH, content=f'{{"{SECRET}'.encode()).status_code,
    ]
    assert statuses[0] == statuses[1] == 200 and sum(status >= 400 for status in statuses) >= 8
    live.wait_idle()
    (session,) = Path("/tmp/ray").glob(f"session_*_{live.pid}")
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert logs
    holding = [path.name for path in logs if SECRET.encode() in path.read_bytes()]
    assert holding == []


def test_a_deadline_drops_what_waits_and_leaves_nothing_behind(live):
    answer = ask(live, text="word " * 1500, max_tokens=500, headers={"x-kappa-deadline-ms": "300"})
    assert answer.status_code in (429, 504), answer.text
    assert json.loads(answer.text)["error"]["code"] in ("deadline_exceeded", "deadline_unmeetable")
    live.wait_idle()


def test_every_port_but_the_replicas_grpc_is_on_loopback(live):
    """Ray Serve binds one gRPC server of each replica to all addresses, and lets nobody choose."""
    replicas, ports, elsewhere = set(), set(), []
    for process, name in {psutil.Process(live.pid): "kappa", **below(live.pid)}.items():
        if "ServeReplica" in name:
            replicas.add(process.pid)
        for address in listening(process):
            ports.add(address.port)
            ip = ipaddress.ip_address(address.ip)
            if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
                elsewhere.append((process.pid, name, address))
    assert int(live.url.rsplit(":", 1)[1]) in ports and len(replicas) > 1
    assert sorted(pid for pid, *_ in elsewhere) == sorted(replicas), elsewhere


def test_a_workers_port_is_for_deciders_alone(live):
    ports = {
        address.port
        for one, name in below(live.pid).items()
        if "KappaServer" in name
        for address in listening(one)
    }

    def status(port):
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code
        except httpx.HTTPError:
            return None  # Another protocol's, which says nothing until the time is up.

    with ThreadPoolExecutor(len(ports)) as pool:
        assert set(pool.map(status, ports)) - {None} == {403}


def test_rays_token_is_its_users_alone(live):
    raylet = next(one for one, name in below(live.pid).items() if "/raylet/raylet" in name)
    token = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
