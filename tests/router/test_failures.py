"""What the many ways in which a delivery fails mean: who is to blame, and should another try."""

import json
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from kappa.protocol import EngineDiedError
from router.api.deliver import WorkerFailed, error_in, raise_error_item, worker_failed
from router.api.errors import ApiError
from router.live.replica_registry import PinGoneError
from router.live.waiting import WorkerLostError
from tests.router.scripted import code, post

pytestmark = pytest.mark.ray


class EngineDeadError(Exception):
    """As vLLM names it; its class need not exist here."""


class GenerationError(Exception):
    """Likewise."""


def as_ray_tells(error):
    return RayTaskError("chat", "traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (ActorDiedError(), "worker_died", "died"),
        (ActorUnavailableError("gone", b"a" * 16), "worker_died", "died"),
        (WorkerLostError("silent"), "worker_died", "silent"),
        (as_ray_tells(EngineDiedError("w")), "worker_died", "engine_died"),
        (as_ray_tells(EngineDeadError("x")), "worker_died", "engine_died"),
        (PinGoneError("w"), "worker_full", "left"),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), "worker_full", "full"),
    ],
)
def test_a_worker_that_is_gone_or_full_is_no_fault_of_the_engine(error, end, why):
    failure = worker_failed(error)
    assert (failure.end, failure.why, failure.error) == (end, why, None)


def test_anything_else_is_the_engines_failure_and_tells_no_details():
    failure = worker_failed(RuntimeError("secret"))
    assert (failure.end, failure.error.status, failure.error.code) == ("error", 500, "engine")
    assert "secret" not in json.dumps(failure.error.body())
    assert worker_failed(failure) is failure


def event(code, message="m"):
    told = {"error": {"message": message, "type": "t", "param": None, "code": code}}
    return f"data: {json.dumps(told)}\n\n"


@pytest.mark.parametrize("shape", ["event", "object"])
def test_an_engines_refusal_is_the_clients_and_its_failure_is_not(shape):
    def item(code):
        info = SimpleNamespace(code=code, message="secret")
        return event(code, "secret") if shape == "event" else SimpleNamespace(error=info)

    with pytest.raises(ApiError, match="secret") as refused:
        raise_error_item(item(400))
    assert refused.value.status == 400
    with pytest.raises(WorkerFailed) as failed:
        raise_error_item(item(500))
    assert "secret" not in json.dumps(failed.value.error.body())


@pytest.mark.parametrize("shape", ["event", "object"])
def test_a_grammar_that_does_not_compile_is_the_clients_fault_and_no_workers(shape):
    def item(message):
        info = SimpleNamespace(code=500, message=message)
        return event(500, message) if shape == "event" else SimpleNamespace(error=info)

    body = SimpleNamespace(response_format={"type": "json_schema"})
    with pytest.raises(ApiError) as refused:
        raise_error_item(item("Internal server error"), body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    # Another failure, and that of a request without a grammar, are the engine's.
    for failed, of in (("CUDA error", body), ("Internal server error", SimpleNamespace())):
        with pytest.raises(WorkerFailed):
            raise_error_item(item(failed), of)


async def test_a_grammar_that_does_not_compile_is_not_tried_on_another_worker(serve):
    async def script(_worker):
        raise as_ray_tells(GenerationError("Internal server error"))
        yield

    ingress, live, app = await serve(script)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    for _ in range(6):  # more than what opens a breaker
        answer = await post(app, response_format=form)
        assert (answer.status_code, code(answer)) == (400, "invalid_grammar")
    assert len(ingress.sent) == 6 and live.router.reservations == 0
    assert code(await post(app)) == "engine"
    assert len(ingress.sent) == 8  # nobody is spared what is no grammar's fault


def test_what_is_no_error_passes():
    talks_of_one = {"choices": [{"delta": {"content": 'data: {"error": 1}'}}]}
    for item in (f"data: {json.dumps(talks_of_one)}\n\n", "data: [DONE]\n\n", SimpleNamespace()):
        raise_error_item(item)
    assert error_in(f"data: {json.dumps(talks_of_one)}\n\n") is None


@pytest.mark.parametrize(
    "broken", ['data: {"error": ', 'data: {"error": 7}\n\n', 'data: {"error": {"code": "x"}}\n\n']
)
def test_an_error_event_that_cannot_be_read_is_a_failure(broken):
    assert error_in(broken).status == 500


def test_an_error_is_found_behind_what_came_with_it():
    assert error_in('data: {"choices": []}\n\n' + event(404)).status == 404
