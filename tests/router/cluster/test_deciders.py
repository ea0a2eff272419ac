"""Several deciders of one cluster behind a real Envoy."""

import asyncio

import pytest

from kappa.host import Lock
from kappa.settings.routing import RouterSettings
from kappa_router.api.status import newest_decisions
from kappa_router.live.deciders import merged
from tests.conformance.conftest import MODEL
from tests.router.building import DRAWN
from tests.router.cluster.conftest import STEP_S, PortedNode
from tests.router.patience import until

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"
SAID = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TWO = {"deciders": 2, "router": RouterSettings(admission=False)}


def records(live):
    return newest_decisions(live, None, 20)


def lives(here):
    return [one._live for one in here.deciders]


async def test_decider_hears_how_its_own_requests_ended(cluster):
    async with cluster(PortedNode("a"), PortedNode("b"), **TWO) as here:
        answers = [await here.http.post(CHAT, json=SAID) for _ in range(DRAWN)]
        assert {one.status_code for one in answers} == {200}
        one, two = ([r["request_id"] for r in records(live)] for live in lives(here))
        assert one and two and not {*one} & {*two}
        assert {*one, *two} == {answer.headers["x-request-id"] for answer in answers}
        for live in lives(here):
            await until(lambda live=live: not live.router.flights)
            assert {record["end"] for record in records(live)} == {"done"}


async def test_decider_counts_what_another_sent(cluster):
    async with cluster(PortedNode("a", STEP_S), **TWO) as here:
        body = {**SAID, "stream": True, "max_tokens": 32}
        async with here.http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            own = [live.router.in_flight_on("a") for live in lives(here)]
            assert sorted(own) == [0, 1]
            other = lives(here)[own.index(0)]
            await until(lambda: other.router.remote_in_flight_on("a") == 1)
            assert [line async for line in lines]
        await until(lambda: not any(live.router.flights for live in lives(here)))


async def test_decider_that_was_asked_nothing_tells_its_metrics(cluster):
    async with cluster(PortedNode("a"), **TWO) as here:
        texts = [await one.for_deciders("metrics") for one in here.deciders]
        assert b"kappa_reservations" in merged(texts)


async def test_deciders_that_come_and_go_lose_no_request(cluster):
    async with cluster(PortedNode("a"), PortedNode("b"), **TWO) as here:

        async def many(count):
            return [await here.http.post(CHAT, json=SAID) for _ in range(count)]

        asking = [asyncio.create_task(many(8)) for _ in range(4)]
        await asyncio.sleep(0.05)
        await here.restart()
        await here.restart()
        answers = [one for made in asking for one in await made]
        assert [one.status_code for one in answers] == [200] * 32


async def test_endpoints_are_written_by_another_when_the_writer_goes(cluster):
    nodes, late = [PortedNode("a")], PortedNode("late")
    async with cluster(*nodes, **TWO) as here:
        writing = Lock(here.spec.writer_lock_file)
        assert not writing.take()
        await here.end()
        announced = dict(here.registry._published["d"])
        announced["late"] = await late.open()
        try:
            here.registry.publish("d", announced)
            await until(lambda: lives(here)[0].choosable == 2)
            await until(lambda: here.spec.endpoints_file.read_text().count("socket_address") == 2)
            assert not writing.take()
            answers = await asyncio.gather(*(here.http.post(CHAT, json=SAID) for _ in range(12)))
            assert {one.headers["x-kappa-node"] for one in answers} == {"a", "late"}
        finally:
            writing.release()
            await late.close()
