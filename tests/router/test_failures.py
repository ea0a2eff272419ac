"""What the many ways in which a delivery fails mean: who is to blame, and should another try."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from kappa.keys import digest_of
from kappa.protocol import EngineDiedError, Streamed
from router.api.deliver import WorkerFailed, error_in, raise_error_item, worker_failed
from router.api.errors import ApiError
from router.api.tenants import Tenants
from router.live.replica_registry import PinGoneError
from router.live.waiting import WorkerLostError
from tests.router.scripted import code, event, until

pytestmark = pytest.mark.ray


class EngineDeadError(Exception):
    """As vLLM names it; its class need not exist here."""


class GenerationError(Exception):
    """Likewise."""


def by_ray(error):
    return RayTaskError("chat", "traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (ActorDiedError(), "worker_died", "died"),
        (ActorUnavailableError("gone", b"a" * 16), "worker_died", "died"),
        (WorkerLostError("silent"), "worker_died", "silent"),
        (by_ray(EngineDiedError("w")), "worker_died", "engine_died"),
        (by_ray(EngineDeadError("x")), "worker_died", "engine_died"),
        (PinGoneError("w"), "worker_full", "left"),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), "worker_full", "full"),
    ],
)
def test_a_worker_that_is_gone_or_full_is_no_fault_of_the_engine(error, end, why):
    failure = worker_failed(error)
    assert (failure.end, failure.why) == (end, why)


def test_anything_else_is_the_engines_failure_and_shows_no_details():
    failure = worker_failed(RuntimeError("secret"))
    assert (failure.end, failure.why, str(failure)) == ("error", "error", "error")
    assert worker_failed(failure) is failure


def error_event(code, message="m"):
    error = {"error": {"message": message, "type": "t", "param": None, "code": code}}
    return f"data: {json.dumps(error)}\n\n"


def as_stream(code, message="m"):
    return Streamed(error_event(code, message), 0)


def as_object(code, message="m"):
    return SimpleNamespace(error=SimpleNamespace(code=code, message=message))


@pytest.mark.parametrize("item", [as_stream, as_object])
def test_an_engines_refusal_is_the_clients_and_its_failure_is_not(item):
    with pytest.raises(ApiError, match="secret") as refused:
        raise_error_item(item(400, "secret"))
    assert refused.value.status == 400
    with pytest.raises(WorkerFailed, match=r"^error$"):
        raise_error_item(item(500, "secret"))
    body = SimpleNamespace(response_format={"type": "json_schema"})
    with pytest.raises(ApiError) as refused:
        raise_error_item(item(500, "Internal server error"), body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    # Another failure, and that of a request without a grammar, are the engine's.
    for message, of in (("CUDA error", body), ("Internal server error", SimpleNamespace())):
        with pytest.raises(WorkerFailed):
            raise_error_item(item(500, message), of)


def test_what_is_no_error_passes_and_one_is_found_behind_what_came_with_it():
    quoted = json.dumps({"choices": [{"delta": {"content": 'data: {"error": 1}'}}]})
    texts = (f"data: {quoted}\n\n", "data: [DONE]\n\n")
    for item in (*(Streamed(text, 1) for text in texts), SimpleNamespace()):
        raise_error_item(item)
    assert error_in(f"data: {quoted}\n\n") is None
    assert error_in('data: {"choices": []}\n\n' + error_event(404)).status == 404
    for torn in (
        'data: {"error": ',
        'data: {"error": 7}\n\n',
        'data: {"error": {"code": "x"}}\n\n',
    ):
        assert error_in(torn).status == 500


async def test_a_grammar_that_does_not_compile_is_not_tried_on_another_worker(serve):
    async def script(_worker):
        raise by_ray(GenerationError("Internal server error"))
        yield

    here = await serve(script)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    for _ in range(6):  # more than what opens a breaker
        assert code(await here.ask(response_format=form), 400) == "invalid_grammar"
    assert len(here.ingress.sent) == 6 and here.live.router.reservations == 0
    assert code(await here.ask()) == "engine"
    assert len(here.ingress.sent) == 8  # nobody is spared what is no grammar's fault


# -- requests that kill engines ------------------------------------------------------------------


class Engines:
    """Engines that die of one text, whoever sends it, and of nothing else."""

    def __init__(self, error):
        self.died, self.error, self.gate = [], error, asyncio.Event()
        self.gate.set()

    async def answer(self, worker, text):
        await self.gate.wait()
        if text == "kill":
            self.died.append(worker)
        if worker in self.died:
            raise self.error(worker) if self.error is EngineDiedError else self.error()
        yield [event(worker)]


@pytest.fixture
def killing(serve):
    """Its `text(...)` sends a chat of that text to engines that die of `kill`."""

    async def make(error=EngineDiedError, workers=("a", "b", "c", "d"), **changes):
        engines = Engines(error)

        def script(worker):
            return engines.answer(worker, here.ingress.bodies[-1].messages[0]["content"])

        here = await serve(script, workers, (100,) * len(workers), **changes)
        here.engines = engines
        here.text = lambda text, **more: here.ask(
            messages=[{"role": "user", "content": text}], **more
        )
        return here

    return make


@pytest.mark.parametrize("error", [EngineDiedError, ActorDiedError])
async def test_a_request_alone_in_an_engine_that_died_is_not_given_another(killing, capsys, error):
    here = await killing(error)
    answer = await here.text("kill")
    assert code(answer, 503) == "engine_died"
    (request_id,) = here.live.records
    assert request_id in answer.json()["error"]["message"]
    assert len(here.ingress.sent) == 1 and here.live.router.reservations == 0
    printed = "".join(capsys.readouterr())
    assert "request_killed_engine" in printed and request_id in printed and "kill " not in printed


async def test_content_that_was_in_two_engines_that_died_is_refused_at_once(killing):
    here = await killing()
    answers = [await here.text("kill", user=f"{turn}") for turn in range(5)]
    assert [a.status_code for a in answers] == [503, 422, 422, 422, 422]
    assert {code(a) for a in answers[1:]} == {"killed_an_engine"}
    assert len(here.engines.died) == len(here.ingress.sent) == 2, "two engines of four, not all"
    assert (await here.text("hello")).status_code == 200, "another content goes on"
    here.live._epoch_s += 601.0
    assert len(here.ingress.sent) == 3 and code(await here.text("kill")) == "engine_died"


async def test_those_that_were_beside_it_are_answered_and_it_stops_after_two_engines(killing):
    here = await killing(max_queue=20)
    for worker in "abcd":  # wherever it goes, it was not alone there
        here.live.suspects.ended(worker, here.live.now_s())
    here.engines.gate.clear()
    texts = ["kill"] + [f"innocent {i}" for i in range(11)]
    asking = [asyncio.create_task(here.text(text)) for text in texts]
    await until(lambda: here.live.router.reservations == 12 == len(here.ingress.sent))
    here.engines.gate.set()
    killer, *innocent = [await task for task in asking]
    assert code(killer, 422) == "killed_an_engine"
    assert len(set(here.engines.died)) == 2
    lost = [a for a in innocent if a.status_code != 200]
    assert all(code(a) == "killed_an_engine" for a in lost), "only those in both engines"
    assert len(innocent) - len(lost) >= 5
    assert here.live.router.reservations == 0 and len(here.live.members.waits) == 0


async def test_a_killed_worker_with_several_requests_loses_none_of_them(killing):
    here = await killing(ActorDiedError, workers=("a", "b"))
    before = [asyncio.create_task(here.text(f"before {i}")) for i in range(4)]
    assert [(await task).status_code for task in before] == [200] * 4
    here.ingress.sent.clear()
    here.engines.gate.clear()
    asking = [asyncio.create_task(here.text(f"hello {i}")) for i in range(4)]
    await until(lambda: here.live.router.reservations == 4 == len(here.ingress.sent))
    here.engines.died.append("a")  # kill -9 of its process
    here.engines.gate.set()
    assert [(await task).status_code for task in asking] == [200] * 4
    assert len(here.live.suspects) == 0, "their second engines acquitted them"


async def test_another_tenants_same_content_is_not_refused(killing):
    digests = {digest_of(f"sk-{name}"): name for name in ("alice", "bob")}
    here = await killing(tenants=Tenants(operators=frozenset()).with_digests(digests))
    for _ in range(3):
        await here.text("kill", tenant="alice")
    assert len(here.ingress.sent) == 2
    assert code(await here.text("kill", tenant="bob")) == "engine_died"
