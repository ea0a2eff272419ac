"""What the running cluster gives away: nothing of prompts in any log, nothing beyond loopback."""

import ipaddress
import json
import os
from pathlib import Path

import psutil
import pytest

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
    session = Path(os.path.realpath("/tmp/ray/session_latest"))
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert logs
    holding = [path.name for path in logs if SECRET.encode() in path.read_bytes()]
    assert holding == []


def test_a_deadline_drops_what_waits_and_leaves_nothing_behind(live):
    answer = ask(live, text="word " * 1500, max_tokens=500, headers={"x-kappa-deadline-ms": "300"})
    assert answer.status_code in (429, 504), answer.text
    assert json.loads(answer.text)["error"]["code"] in ("deadline_exceeded", "deadline_unmeetable")
    live.wait_idle()


def test_the_endpoint_and_the_dashboard_listen_on_loopback_only(live):
    """Ray's own ports follow the machine's address; the endpoint and the dashboard do not."""
    port = int(live.url.rsplit(":", 1)[1])
    open_to = {
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in (port, 8265)
    }
    assert open_to and all(ipaddress.ip_address(ip).is_loopback for ip in open_to)
