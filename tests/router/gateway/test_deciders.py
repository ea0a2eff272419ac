"""Several deciders behind one real Envoy: they share requests, and each keeps those it decided."""

import asyncio

from kappa.protocol import ENDPOINT_HEADER, TO_ID_HEADER
from kappa_router.gateway.spec import ADMIT, ADMITTER_HEADER, AGAIN, DECIDE
from tests.router.building import DRAWN
from tests.router.gateway.door import CHAT, Answer, ends_heard, in_two, never, open_door
from tests.router.patience import until

LARGE = b"x" * 150_000
CUT = Answer(cut=True)


def named(name):
    return lambda heard: Answer(body=name)


def admitting(door):
    """Every decider lets bodies come, and says who it is."""
    for slot, decider in zip(door.spec.slots, door.deciders, strict=True):
        let = Answer(headers={ADMITTER_HEADER: str(slot.decider_socket)})
        go = Answer(headers={ENDPOINT_HEADER: door.addresses(0), TO_ID_HEADER: "id-1"})
        decider.script = lambda heard, let=let, go=go: let if heard.target.startswith(ADMIT) else go


async def test_deciders_share_requests():
    async with open_door(deciders=2) as door:
        for _ in range(40):
            assert (await door.ask()).status == 200
            assert (await door.ask("/v1/nodes")).body == b"face"
        assert all(len(one.heard) >= 4 for one in (*door.deciders, *door.faces))


async def test_body_is_decided_by_the_decider_that_admitted_it():
    async with open_door(deciders=3) as door:
        admitting(door)
        asked = await asyncio.gather(*(door.ask(body=LARGE) for _ in range(30)))
        assert {one.status for one in asked} == {200}
        kinds = [[len(door.asked(kind, at)) for kind in (ADMIT, DECIDE)] for at in range(3)]
        assert all(admitted == decided > 0 for admitted, decided in kinds)
        seen = door.servers[0].heard[0].headers
        assert ADMITTER_HEADER not in seen


async def test_body_is_decided_by_another_when_its_admitter_goes():
    async with open_door(deciders=2) as door:
        admitting(door)
        let = door.deciders[0].script

        async def then_gone(heard):
            await door.deciders[0].close()
            return let(heard)

        door.deciders[0].script = then_gone
        asked = [await door.ask(body=LARGE) for _ in range(8)]
        assert {one.status for one in asked} == {200}
        assert len(door.asked(DECIDE, 1)) == 8


async def test_decider_that_dies_costs_no_request():
    ends = asyncio.Event()
    answers = iter([Answer(chunks=in_two(ends))])
    async with open_door((lambda heard: next(answers, Answer()),), deciders=2) as door:
        streamed = asyncio.create_task(door.ask())
        await until(lambda: door.servers[0].heard)
        (first,) = (at for at in (0, 1) if door.asked(DECIDE, at))

        # What it was asked and has not answered is asked again of the other.
        door.deciders[first].script = never
        asking = [asyncio.create_task(door.ask()) for _ in range(20)]
        await until(lambda: len(door.asked(DECIDE, first)) > 1)
        await door.deciders[first].close()
        await door.faces[first].close()
        got = await asyncio.gather(*asking, *(door.ask() for _ in range(50)))
        assert {one.status for one in got} == {200}
        shown = await asyncio.gather(*(door.ask("/v1/nodes") for _ in range(20)))
        assert {one.body for one in shown} == {b"face"}
        ends.set()
        assert (await streamed).body == b"begun ended"

        # One that takes its place is asked again soon.
        door.send_to(0)
        seen = len(door.asked(DECIDE, first))
        await door.reopen(first)
        await door.until(lambda got: got.status != 200 or len(door.asked(DECIDE, first)) > seen)


async def test_decider_that_hangs_gets_none_while_another_is_idle():
    async with open_door(deciders=2) as door, asyncio.timeout(30):
        door.decider.script, stuck = never, door.decider.heard
        asking = []
        for _ in range(40):
            asking.append(asyncio.create_task(door.ask()))
            seen = len(stuck)
            while not asking[-1].done() and len(stuck) == seen:
                await asyncio.sleep(0.005)
        assert len(stuck) == 1 and len(door.deciders[1].heard) == 39
        await door.decider.close()
        assert {one.status for one in await asyncio.gather(*asking)} == {200}


async def test_last_decider_that_is_left_decides_every_request():
    async with open_door(deciders=6) as door:
        for one in door.deciders[1:]:
            await one.close()
        asked = await asyncio.gather(*(door.ask() for _ in range(30)))
        assert {one.status for one in asked} == {200}
        await door.decider.close()
        assert door.refuses(await door.ask(), "decider_away")


async def test_sender_decides_where_a_request_goes_next():
    async with open_door((lambda heard: CUT, named(b"b")), deciders=2) as door:
        door.send_to(0, 1)
        for _ in range(DRAWN):
            assert (await door.ask()).body == b"b"
        counts = [[len(door.asked(kind, at)) for kind in (DECIDE, AGAIN)] for at in (0, 1)]
        assert all(decided == again > 0 for decided, again in counts)


async def test_no_other_decider_says_where_a_request_goes_next():
    async def then_gone(heard):
        (decided,) = (at for at in (0, 1) if door.asked(DECIDE, at))
        await door.deciders[decided].close()
        return CUT

    async with open_door((then_gone, named(b"b")), deciders=2) as door:
        door.send_to(0, 1)
        assert door.refuses(await door.ask(), "decider_away")
        assert not door.asked(AGAIN, 0) and not door.asked(AGAIN, 1)
        assert not door.servers[1].heard


async def test_decider_hears_the_ends_of_its_own_requests():
    ended, failed = [[], []], [[], []]
    async with open_door((lambda heard: CUT, None), deciders=2) as door:
        for at, decider in enumerate(door.deciders):
            more = {ENDPOINT_HEADER: door.addresses(0, 1), TO_ID_HEADER: f"id-{at}"}
            decider.script = lambda heard, more=more: Answer(headers=more)
        heard = [
            ends_heard(slot.events_socket, ended[at].append, failed[at].append)
            for at, slot in enumerate(door.spec.slots)
        ]
        async with heard[0], heard[1], asyncio.timeout(20):
            for _ in range(DRAWN):
                assert (await door.ask(CHAT)).status == 200
            await until(lambda: sum(map(len, (*ended, *failed))) >= 2 * DRAWN)
        for at in (0, 1):
            names = {one.request_id for one in (*ended[at], *failed[at])}
            assert names == {f"id-{at}"}
            assert len(ended[at]) == len(failed[at]) == len(door.asked(DECIDE, at))
