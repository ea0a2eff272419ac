"""Requests that kill engines: whom they are kept from, and what the others in there get.

Engines are scripts that die; Envoy, gates and decider are real.
"""

import asyncio

import pytest

from kappa.keys import digest_of
from kappa.protocol import EngineDiedError
from kappa_router.api.tenants import Tenants
from tests.router.patience import until
from tests.router.scripted import code, crowd, event

pytestmark = pytest.mark.ray


class Mortal:
    """Engines that die of one text, from any client, and of no other."""

    def __init__(self, here, cut):
        self.died, self.gate, self.cut = [], asyncio.Event(), cut
        self.here, self.closing = here, []
        self.gate.set()

    async def answer(self, worker, text):
        await self.gate.wait()
        if text == "kill":
            self.died.append(worker)
        if worker in self.died:
            if not self.cut:
                raise EngineDiedError(worker)
            port = self.here.workers[worker].port
            self.closing.append(asyncio.ensure_future(port.close(0.0)))
            await asyncio.Event().wait()
        yield [event(worker)]


@pytest.fixture
async def killing(serve):
    """Its `text(...)` sends a chat of that text to engines that die of `kill`; cut: with their
    process."""
    made = []

    async def make(cut=False, workers=("a", "b", "c", "d"), **changes):
        def script(worker):
            return here.mortal.answer(worker, here.engines.bodies[-1].messages[0]["content"])

        here = await serve(script, workers, (100,) * len(workers), **changes)
        here.mortal = Mortal(here, cut)
        made.append(here.mortal)

        here.text = lambda text, **more: here.ask(
            messages=[{"role": "user", "content": text}], **more
        )
        return here

    yield make
    for mortal in made:
        await asyncio.gather(*mortal.closing)


@pytest.mark.parametrize("cut", [False, True])
async def test_request_alone_in_a_dead_engine_gets_no_other(killing, capsys, cut):
    here = await killing(cut)
    answer = await here.text("kill")
    assert code(answer, 503) == "engine_died"
    (request_id,) = here.live.records
    assert request_id in answer.json()["error"]["message"]
    assert len(here.engines.sent) == 1
    await here.idle()
    assert here.live.records[request_id].end == "worker_died"
    printed = "".join(capsys.readouterr())
    assert "request_not_passed_on" in printed and request_id in printed and "kill " not in printed


async def test_content_of_two_dead_engines_is_refused_at_once(killing):
    here, answers = await killing(), []
    for _ in range(5):
        answers.append(await here.text("kill"))
        await here.idle()
    assert [a.status_code for a in answers] == [503, 422, 422, 422, 422]
    assert {code(a) for a in answers[1:]} == {"killed_an_engine"}
    assert len(here.mortal.died) == len(here.engines.sent) == 2, "two engines of four, not all"
    assert (await here.text("hello")).status_code == 200, "another content goes on"
    await here.idle()
    here.live._epoch_s += 601.0
    assert len(here.engines.sent) == 3 and code(await here.text("kill")) == "engine_died"


async def test_neighbours_are_answered_and_a_killer_stops_after_two(killing):
    here = await killing(max_queue=20)
    crowd(here.live)
    here.mortal.gate.clear()
    texts = ["kill"] + [f"innocent {i}" for i in range(11)]
    asking = [asyncio.create_task(here.text(text)) for text in texts]
    await until(lambda: here.live.router.reservations == 12 == len(here.engines.sent))
    here.mortal.gate.set()
    killer, *innocent = [await task for task in asking]
    await here.idle()
    # It was tried twice; of the second engine's death its client gets that worker's word.
    assert killer.status_code == 503
    assert len(set(here.mortal.died)) == 2
    assert code(await here.text("kill"), 422) == "killed_an_engine"
    assert len(set(here.mortal.died)) == 2
    lost = [a for a in innocent if a.status_code != 200]
    assert len(innocent) - len(lost) >= 5, "only those in both engines"


async def test_killed_worker_with_several_requests_loses_none(killing):
    here = await killing(cut=True, workers=("a", "b"))
    before = [asyncio.create_task(here.text(f"before {i}")) for i in range(4)]
    assert [(await task).status_code for task in before] == [200] * 4
    await here.idle()
    here.engines.sent.clear()
    here.mortal.gate.clear()
    asking = [asyncio.create_task(here.text(f"hello {i}")) for i in range(4)]
    await until(lambda: here.live.router.reservations == 4 == len(here.engines.sent))
    here.mortal.died.append("a")  # kill -9 of its process
    here.mortal.gate.set()
    assert [(await task).status_code for task in asking] == [200] * 4
    await here.idle()
    assert len(here.live.suspects) == 0, "their second engines acquitted them"


async def test_same_content_of_another_tenant_is_not_refused(killing):
    digests = {digest_of(f"sk-{name}"): name for name in ("alice", "bob")}
    here = await killing(tenants=Tenants(operators=frozenset()).with_digests(digests))
    for _ in range(3):
        await here.text("kill", tenant="alice")
        await here.idle()
    assert len(here.engines.sent) == 2
    assert code(await here.text("kill", tenant="bob")) == "engine_died"
