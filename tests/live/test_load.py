"""Many at once, more than allowed, and clients that walk away."""

import asyncio
import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = pytest.mark.live

_LONG = 4000
_DEMO_S = 240.0


def body(live, text, **options):
    return {
        "model": live.model,
        "messages": [{"role": "user", "content": text}],
        "ignore_eos": True,
    } | options


async def test_a_burst_of_streams_completes_on_both_nodes(idle):
    async with openai.AsyncOpenAI(**idle.client_options()) as client:

        async def one(number):
            raw = await client.chat.completions.with_raw_response.create(
                model=idle.model,
                messages=[{"role": "user", "content": f"Burst {number}. " * (5 + 10 * number)}],
                max_tokens=6,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = [chunk async for chunk in raw.parse()]
            return raw.headers["x-kappa-node"], chunks[-1].choices[0].finish_reason

        answers = await asyncio.gather(*(one(number) for number in range(30)))
    assert {reason for _, reason in answers} == {"length"}
    assert {node for node, _ in answers} == {row["node"] for row in idle.nodes()}


def test_engines_charges_reach_the_decider_without_rule_errors(idle):
    def charged(resource):
        return idle.metric("kappa_tenant_charge_seconds_total", tenant="default", resource=resource)

    vram_s, gpu_s = charged("vram"), charged("gpu")
    iterations = idle.metric("kappa_scheduler_iterations_total")
    with httpx.Client(base_url=idle.url, timeout=120.0) as client:
        for number in range(4):
            request = body(idle, f"Charge this {number}. " * 40, max_tokens=8)
            client.post("/v1/chat/completions", json=request).raise_for_status()

    def more():
        return charged("vram") > vram_s and charged("gpu") > gpu_s

    idle.until(more, "the engines' charges did not come back")
    assert idle.metric("kappa_scheduler_iterations_total") > iterations
    assert idle.metric("kappa_scheduler_rule_errors_total") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "waiting"])
def test_client_that_leaves_frees_its_reservation_and_engine(idle, stream):
    request = body(idle, f"Leaving early {stream}", max_tokens=_LONG, stream=stream)
    steps = idle.metric("kappa_engine_steps_total")
    leaving = HTTPConnection(idle.url.removeprefix("http://"), timeout=120.0)
    headers = {"content-type": "application/json"}
    leaving.request("POST", "/v1/chat/completions", json.dumps(request), headers)
    if stream:
        assert leaving.getresponse().readline().startswith(b"data: ")
    else:
        idle.until(lambda: idle.metric("kappa_reservations") > 0, "it was not routed")
    leaving.close()
    idle.wait_idle()
    record = idle.decisions(limit=1)[0]
    assert record["end"] == "client_gone"

    def quiet():
        before = idle.metric("kappa_engine_steps_total")
        time.sleep(1.0)
        return idle.metric("kappa_engine_steps_total") == before

    # The answer would have taken thousands of steps.
    idle.until(quiet, "the engine went on without its client")
    assert idle.metric("kappa_engine_steps_total") - steps < _LONG


def test_the_demo_shows_the_host_tier_and_both_nodes(idle):
    kappa = Path(sys.executable).with_name("kappa")
    done = subprocess.run(
        [sys.executable, kappa, "demo", "--url", idle.url, "--json"],
        capture_output=True,
        text=True,
        timeout=_DEMO_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["faults"] == []
    totals = shown["totals"]
    assert totals["paced"] is True
    assert totals["requests"] == len(shown["requests"]) == 48
    assert totals["failed"] == 0
    assert totals["host_tokens"] > 0
    assert set(totals["requests_per_node"]) == {row["node"] for row in idle.nodes()}
