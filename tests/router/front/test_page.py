"""The page of `kappa route`, over fake servers."""

import asyncio

import pytest

from tests import browser
from tests.router.front.conftest import chat, routing, until
from tests.router.front.offering import FakeServer, serving


async def test_page_is_answered_by_the_front():
    async with serving(FakeServer()) as [server], routing(server) as front:
        answer = await front.http.get("/")
        assert answer.status == 200 and "sha256-" in answer.headers["content-security-policy"]
        assert (await front.http.post("/", json={})).status == 413
        assert not server.seen


async def test_page_shows_servers_decisions_and_servers_that_are_down():
    if browser.CHROMIUM is None:
        pytest.skip(browser.WHY_NOT)

    def look(url):
        with browser.browser() as opened:
            tab = opened()
            tab.open(f"{url}/")
            tab.until("document.querySelectorAll('#nodes tbody tr').length === 3")
            assert tab.text("#f-nodes") == "2 of 3" and "breaker open" in tab.text("#nodes")
            tab.until("document.querySelectorAll('#decisions tbody tr').length === 3")
            why = "document.querySelector('#decisions tbody tr td:last-child').innerText"
            assert " here, " in tab.until(why)
            said = tab.until("!document.getElementById('lost').hidden && lost.textContent")
            assert gone in said, said
            assert tab.text("#model") == "llama-3.1-8b" and not tab.faults

    three = FakeServer(), FakeServer(), FakeServer()
    async with serving(*three) as servers, routing(*servers) as front:
        gone = servers[2].url
        await servers[2].stop()
        await until(lambda: front.front.live.choosable == 2)
        for number in range(3):
            answer = await front.http.post("/v1/chat/completions", json=chat(f"hi {number}"))
            assert answer.status == 200
        await asyncio.to_thread(look, front.url)
