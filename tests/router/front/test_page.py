"""The page of `kappa route`, over fake servers."""

import asyncio

import pytest

from tests import browser
from tests.router.front.conftest import chat, fronted
from tests.router.front.offering import FakeServer
from tests.router.patience import until


async def test_page_is_answered_by_the_front():
    async with fronted(FakeServer()) as (front, (server,)):
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
    async with fronted(*three) as (front, servers):
        gone = servers[2].url
        await servers[2].stop()
        await until(lambda: front.live.choosable == 2)
        for number in range(3):
            answer = await front.http.post("/v1/chat/completions", json=chat(f"hi {number}"))
            assert answer.status == 200
        await asyncio.to_thread(look, front.url)
