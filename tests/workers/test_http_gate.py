"""The middleware before a worker's engine, over ASGI messages."""

import asyncio
import json

import pytest

from kappa.protocol import (
    GIVE_UP_PATH,
    REQUEST_ID_KEY,
    RETRY_DIED,
    RETRY_HEADER,
    TO_BODY_HEADER,
    TO_DROP_HEADER,
    TO_SECRET_HEADER,
    TO_SHOW_HEADER,
    EngineDiedError,
)
from kappa_workers import generated, http_gate
from kappa_workers.http_gate import WorkerGate
from kappa_workers.in_flight import InFlight

SECRET = "s3cret"


class Engine:
    """An application that keeps what it got and answers as it is scripted."""

    def __init__(self, status=200, kind=b"application/json", parts=(b"{}",), fails_after=None):
        self.status, self.kind, self.parts = status, kind, parts
        self.fails_after, self.headers, self.body = fails_after, {}, b""
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.calls = self.tokens = 0

    async def __call__(self, scope, receive, send):
        self.calls += 1
        self.headers = dict(scope["headers"])
        self.body = (await receive())["body"]
        await self.may_end.wait()
        if (tally := generated.current()) is not None:
            tally.tokens += self.tokens
        if self.fails_after == 0:
            raise RuntimeError("the prompt said: swordfish")
        head = [(b"content-type", self.kind)]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        for number, part in enumerate(self.parts, start=1):
            more = number < len(self.parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            if number == self.fails_after:
                raise RuntimeError("swordfish")


class Health:
    dead = False

    async def __call__(self):
        if self.dead:
            raise EngineDiedError("dead")


class Answer:
    def __init__(self):
        self.status, self.headers, self.body, self.ended = 0, {}, b"", False

    async def __call__(self, message):
        assert not self.ended
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)


def gate_of(engine, health=None):
    return WorkerGate(engine, SECRET, InFlight(0.0), health or Health())


async def ask(gate, body=b"{}", secret=SECRET, parts=None, path="/v1/completions", **headers):
    given = [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()]
    if secret is not None:
        given.append((TO_SECRET_HEADER.encode(), secret.encode()))
    parts = list(parts or [body])

    async def receive():
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    answer = Answer()
    scope = {"type": "http", "method": "POST", "path": path, "headers": given}
    await gate(scope, receive, answer)
    return answer


async def begun(gate, engine, *asked, **headers):
    """A request that its engine answers once it may end."""
    engine.may_end.clear()
    task = asyncio.create_task(ask(gate, *asked, **headers))
    while not engine.calls:
        await asyncio.sleep(0)
    return task


def sets(**fields):
    return {TO_BODY_HEADER: json.dumps(fields)}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        *(({"secret": secret}, 403) for secret in (None, "", "wrong", "s3cret2")),
        *(({"body": body, TO_BODY_HEADER: order}, 400) for body, order in (
            (b"[1]", "{}{"), (b"[1]", '{"a": 1}'), (b"{", '{"a": 1}'), (b"{}", "[1]"),
        )),
        ({"parts": [b"123", b"45"]}, 413),
    ],
)  # fmt: skip
async def test_gate_refuses_without_asking_its_engine(monkeypatch, asked, status):
    monkeypatch.setattr(http_gate, "MAX_BODY_BYTES", 4)
    engine = Engine()
    answer = await ask(gate_of(engine), **asked)
    assert (answer.status, engine.calls) == (status, 0)
    assert RETRY_HEADER not in answer.headers


def test_gate_needs_a_secret():
    with pytest.raises(ValueError, match="secret"):
        WorkerGate(Engine(), "", InFlight(0.0), Health())


async def test_gate_sets_and_drops_fields_of_the_body():
    engine = Engine()
    body = b'{"model":"m","vllm_xargs":{"kappa_tenant":"me"},"user":"x","max_tokens":7}'
    given = sets(vllm_xargs={"kappa_tenant": "alice"}, priority=3)
    answer = await ask(gate_of(engine), body, **given, **{TO_DROP_HEADER: "user,absent"})
    assert answer.status == 200
    assert json.loads(engine.body) == {
        "model": "m", "vllm_xargs": {"kappa_tenant": "alice"}, "max_tokens": 7, "priority": 3,
    }  # fmt: skip
    assert engine.headers[b"content-length"] == str(len(engine.body)).encode()
    assert not {TO_BODY_HEADER, TO_DROP_HEADER, TO_SECRET_HEADER} & {
        name.decode() for name in engine.headers
    }


async def test_gate_adds_its_engines_marks_and_the_fronts_headers():
    gate = WorkerGate(Engine(), SECRET, InFlight(0.0), Health(), marks={"x-engine": "emulated"})
    shown = {TO_SHOW_HEADER: json.dumps({"x-kappa-node": "a"})}
    answer = await ask(gate, **sets(vllm_xargs={}), **shown)
    assert (answer.headers["x-kappa-node"], answer.headers["x-engine"]) == ("a", "emulated")
    assert TO_SHOW_HEADER not in answer.headers


async def test_gate_passes_a_body_unchanged_without_orders():
    engine = Engine()
    await ask(gate_of(engine), parts=[b'{"a" : ', b"1}"])
    assert engine.body == b'{"a" : 1}'
    await ask(gate_of(engine), b"no json")
    assert engine.body == b"no json"


async def test_gate_counts_a_request_until_its_end():
    engine = Engine()
    gate = gate_of(engine)
    given = sets(vllm_xargs={REQUEST_ID_KEY: "r1"})
    task = await begun(gate, engine, b'{"max_tokens": 5}', **given)
    news = gate._in_flight.news()
    assert [(one.request_id, one.max_tokens) for one in news.arrived] == [("r1", 5)]
    assert gate.open == 1
    engine.tokens = 3
    engine.may_end.set()
    assert (await task).status == 200
    news = gate._in_flight.news()
    assert (news.finished, news.generated) == (("r1",), {"r1": 3})
    assert gate.open == 0


async def test_gate_counts_the_end_of_a_cancelled_request():
    engine = Engine()
    gate = gate_of(engine)
    task = await begun(gate, engine, **sets(vllm_xargs={REQUEST_ID_KEY: "r1"}))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate._in_flight.news().finished == ("r1",)
    assert gate.open == 0


async def test_gate_sends_new_requests_elsewhere_while_it_drains():
    engine = Engine()
    gate = gate_of(engine)
    assert await gate.drained(5.0) == 0
    answer = await ask(gate)
    assert (answer.status, answer.headers[RETRY_HEADER]) == (503, "elsewhere")
    assert engine.calls == 0


async def test_drained_counts_what_does_not_end_in_time():
    engine = Engine()
    gate = gate_of(engine)
    task = await begun(gate, engine)
    assert await gate.drained(0.0) == 1
    engine.may_end.set()
    assert (await task).status == 200


async def test_gate_lets_a_failed_answer_be_tried_elsewhere():
    answer = await ask(gate_of(Engine(status=500, parts=(b'{"error":{}}',))))
    assert (answer.status, answer.headers[RETRY_HEADER]) == (500, "elsewhere")
    assert answer.body == b'{"error":{}}'


@pytest.mark.parametrize("engine", [Engine(status=500), Engine(fails_after=0)])
async def test_gate_says_that_its_engine_died(engine):
    health = Health()
    health.dead = True
    answer = await ask(gate_of(engine, health))
    assert (answer.status, answer.headers[RETRY_HEADER]) == (503, RETRY_DIED)
    assert b"swordfish" not in answer.body


def told(code, message="secret"):
    return (f'data: {{"error": {{"message": "{message}", "code": {code}}}}}\n\n'.encode(), b"x")


async def test_gate_answers_503_with_retry_when_a_stream_begins_failed():
    health, engine = Health(), Engine(kind=b"text/event-stream", parts=told(500))
    for dead, retry in ((False, "elsewhere"), (True, RETRY_DIED)):
        health.dead = dead
        answer = await ask(gate_of(engine, health))
        assert (answer.status, answer.headers[RETRY_HEADER]) == (503, retry)
        assert b"secret" not in answer.body
    engine.parts = (b'data: {"error": 7}\n\n', b"x")
    assert (await ask(gate_of(engine))).status == 503


async def test_gate_answers_by_status_when_a_stream_begins_refused():
    engine = Engine(kind=b"text/event-stream", parts=told(404, "no such voice"))
    answer = await ask(gate_of(engine))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (404, "no such voice")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_gate_blames_no_engine_for_a_grammar(kind):
    streamed = kind == "text/event-stream"
    parts = told(500, "Internal server error")
    engine = Engine(200 if streamed else 500, kind.encode(), parts)
    answer = await ask(gate_of(engine), b'{"response_format": {"type": "json_schema"}}')
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_grammar")
    assert RETRY_HEADER not in answer.headers
    # Without one, and of another failure, the engine's.
    answer = await ask(gate_of(engine), b'{"response_format": null}')
    assert (answer.status, answer.headers[RETRY_HEADER]) == (503 if streamed else 500, "elsewhere")
    engine.parts = told(500, "CUDA error")
    answer = await ask(gate_of(engine), b'{"tools": []}')
    assert answer.headers[RETRY_HEADER] == "elsewhere"


async def test_gate_ends_a_begun_stream_with_an_error_event():
    engine = Engine(kind=b"text/event-stream", parts=(b"data: {}\n\n", b"", b""), fails_after=1)
    answer = await ask(gate_of(engine))
    assert answer.status == 200
    assert answer.ended
    assert answer.body.startswith(b"data: {}\n\n")
    assert b'data: {"error": {"message"' in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    event = answer.body.split(b"data: ")[2].split(b"\n")[0]
    assert json.loads(event)["error"]["code"] == 500


async def test_gate_words_its_errors_for_anthropics_clients():
    broken = Engine(kind=b"text/event-stream", parts=(b"data: {}\n\n", b"", b""), fails_after=1)
    for engine, status in ((broken, 200), (Engine(fails_after=0), 503)):
        answer = await ask(gate_of(engine), path="/v1/messages")
        text = answer.body.decode().strip().rpartition("event: error\ndata: ")[2]
        assert (answer.status, answer.ended) == (status, True)
        error = {"type": "api_error", "message": "the engine failed while it answered"}
        assert json.loads(text) == {"type": "error", "error": error}


@pytest.mark.parametrize("number", [2**63, 2**70, 10**400])
async def test_gate_counts_a_request_of_absurd_numbers_and_forgets_it(number):
    gate = gate_of(Engine())
    told = {REQUEST_ID_KEY: "r", "kappa_prompt_tokens": number, "kappa_gpu_s": number}
    body = json.dumps({"max_tokens": number}).encode()
    answer = await ask(gate, body, **sets(vllm_xargs=told))
    assert answer.status == 200
    assert len(gate._in_flight) == 0 and gate._in_flight.backlog_s() == (0.0, 0.0)


async def test_gate_leaves_a_broken_plain_answer_incomplete():
    answer = await ask(gate_of(Engine(parts=(b'{"a":', b"1}"), fails_after=1)))
    assert (answer.status, answer.ended) == (200, False)


async def test_gate_closes_websockets():
    sent = []

    async def send(message):
        sent.append(message["type"])

    await gate_of(Engine())({"type": "websocket", "headers": []}, None, send)
    assert sent == ["websocket.close"]


async def test_gate_holds_the_head_until_the_first_byte():
    seen = []

    async def engine(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not seen
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        assert not seen
        raise RuntimeError("before the first token")

    async def send(message):
        seen.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    given = [(TO_SECRET_HEADER.encode(), SECRET.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": given}
    await gate_of(engine)(scope, receive, send)
    assert [one.get("status") for one in seen] == [503, None]
    assert (RETRY_HEADER.encode(), b"elsewhere") in seen[0]["headers"]


async def test_gate_shows_an_engine_few_of_a_clients_headers():
    engine = Engine()
    given = {"origin": "http://evil", "x-data-parallel-rank": "7", "cookie": "c"}
    await ask(gate_of(engine), **given, accept="*/*", **{"x-request-id": "r"})
    assert engine.headers == {b"accept": b"*/*", b"x-request-id": b"r", b"content-length": b"2"}


async def test_gate_gives_up_what_its_engine_does_not_answer():
    begun = asyncio.Event()

    async def engine(scope, receive, send):
        if (await receive())["body"] == b"[]":
            await asyncio.Event().wait()
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    gate = gate_of(engine)
    tasks = [asyncio.create_task(ask(gate, body)) for body in (b"[]", b"{}")]
    await begun.wait()
    assert (await ask(gate, path=GIVE_UP_PATH, secret="wrong")).status == 403
    assert gate.open == 2
    assert (await ask(gate, path=GIVE_UP_PATH)).status == 200
    other, stream = [await task for task in tasks]
    assert (other.status, other.headers[RETRY_HEADER]) == (503, "elsewhere")
    assert stream.status == 200 and b'data: {"error"' in stream.body and stream.ended
    assert gate.open == 0
