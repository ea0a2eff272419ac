"""The page of a real cluster of two emulated engines, in a real browser."""

import time

import pytest

from tests import browser
from tests.conformance.conftest import MODEL

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

REQUESTS = 24


def chat(stack, words, number):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello world " * words}],
            "max_tokens": 2}  # fmt: skip
    headers = {"x-request-id": f"page-{number}"}
    assert stack.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def came(stack):
    """Prompt tokens that the feed says came from anywhere."""
    nodes = stack.http.get("/v1/nodes").json()["nodes"]
    return sum(sum(node["prompt_tokens"].values()) for node in nodes)


def test_the_page_shows_what_the_decider_decides(stack):
    if browser.CHROMIUM is None:
        pytest.skip(browser.WHY_NOT)
    with browser.browser() as opened:
        tab = opened()
        tab.open(f"{stack.url}/")
        tab.until("document.querySelectorAll('#nodes tbody tr').length === 2")
        assert "2 of 2 engines are emulated" in tab.text("#emulation")
        before = came(stack)
        for number in range(REQUESTS):
            chat(stack, 3 * (number % 5), number)
        last = "document.querySelector('#decisions tbody tr')"
        tab.until(f"{last} && {last}.innerText.includes('page-{REQUESTS - 1}')")
        tab.until("/^[1-9]/.test(document.getElementById('f-actual').textContent)")
        tab.until("nodes.some(node => node.held_blocks.device)")
        deadline_s = time.monotonic() + 20.0
        while came(stack) <= before:  # reports come behind the answers
            assert time.monotonic() < deadline_s
        # The page's figures are the feeds', and what a worker holds is some of what it has room
        # for.
        tab.until("document.getElementById('tenants').innerText.includes('default')")
        held = tab.run("nodes.map(node => node.held_blocks)")
        room = tab.run("nodes.map(node => node.limits.device_blocks)")
        assert all(one["device"] <= most for one, most in zip(held, room, strict=True))
        assert "compute-bound: κ" in tab.text("#decisions") and " here, " in tab.text("#decisions")
        assert tab.text("#model") == MODEL and tab.text("#state") == "live"
        assert not tab.faults
        asked = {request["url"].removeprefix(stack.url) for request in tab.requests}
        assert asked - {"data:,"} == {
            "/", "/v1/nodes", "/v1/decisions?limit=60", "/v1/tenants", "/v1/models",
        }  # fmt: skip
