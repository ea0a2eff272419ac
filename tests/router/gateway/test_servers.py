"""Where requests go, against a real Envoy: the decider's list, retries, keys, draining, TLS."""

import asyncio
import contextlib
import json
import ssl
from dataclasses import replace

import msgspec
import pytest

from kappa.protocol import (
    ENDPOINT_HEADER,
    RETRY_HEADER,
    TO_BODY_HEADER,
    TO_ID_HEADER,
    TO_SECRET_HEADER,
)
from kappa_router.gateway.spec import (
    AGAIN,
    DECIDE,
    FIRST,
    REQUESTS,
    SLOT_HEADER,
    TOLD_HEADER,
    Bounds,
    ServerEndpoint,
)
from tests.router.gateway.certificates import pair
from tests.router.gateway.door import CHAT, Answer, ends_heard, in_two, never, open_door
from tests.router.patience import until

ELSEWHERE = Answer(503, {RETRY_HEADER: "elsewhere"}, b'{"error": "draining"}')
CUT = Answer(cut=True)
# What every server sees of ours.
OURS = {TO_ID_HEADER, SLOT_HEADER}


def named(name):
    return lambda heard: Answer(body=name)


async def test_request_goes_to_the_first_of_the_list():
    async with open_door((named(b"a"), named(b"b"))) as door:
        door.send_to(1, 0)
        assert (await door.ask()).body == b"b"


async def test_request_goes_on_when_a_server_is_not_there():
    async with open_door((named(b"a"), named(b"b"))) as door:
        await door.servers[0].close()
        door.send_to(0, 1)
        assert (await door.ask()).body == b"b"


async def test_request_goes_on_when_a_worker_says_so():
    async with open_door((lambda heard: ELSEWHERE, named(b"b"))) as door:
        door.send_to(0, 1)
        got = await door.ask(body=b"{}" * 100_000)
        assert (got.status, got.body) == (200, b"b")
        assert len(door.servers[1].heard[0].body) == 200_000
        assert len(door.asked(AGAIN)) == 1


async def test_worker_that_answers_garbage_is_left_for_the_next():
    async def garbage(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00\xffno HTTP\r\n\r\n")
        await writer.drain()
        writer.close()

    async with open_door((named(b"a"), named(b"b"))) as door:
        await door.servers[0].close()
        async with await asyncio.start_server(garbage, "127.0.0.1", door.servers[0].port):
            door.send_to(0, 1)
            assert (await door.ask()).body == b"b"
            door.send_to(0)
            assert door.refuses(await door.ask(), "no_worker")


async def test_refusal_passes_when_a_worker_does_not_say_so():
    async with open_door((lambda heard: Answer(503, body=b"busy"), named(b"b"))) as door:
        door.send_to(0, 1)
        got = await door.ask()
        assert (got.status, got.body, door.servers[1].heard) == (503, b"busy", [])


async def test_workers_refusal_passes_when_retries_are_off():
    async with open_door((lambda heard: ELSEWHERE,)) as door:
        door.send_to(0, x_envoy_max_retries="0")
        got = await door.ask()
    assert (got.status, got.body) == (503, ELSEWHERE.body)
    assert RETRY_HEADER not in got.headers


async def test_silent_foreign_server_is_given_up_for_the_next():
    async with open_door((never, named(b"b")), foreign=True) as door:
        # The next one has as long, on a busy machine, too.
        door.send_to(0, 1, x_envoy_upstream_rq_per_try_timeout_ms="1500")
        got = await door.ask()
        assert (got.status, got.body, len(door.asked(AGAIN))) == (200, b"b", 1)


class Late:
    """A door whose first worker does `then` once `fails` is set, and nothing before. Envoy
    asks about a late request, and the decider answers `says` once `decides` is set."""

    def __init__(self, door, then=never, says=None):
        self.door, self.fails, self.decides = door, asyncio.Event(), asyncio.Event()
        door.send_to(0, 1, x_envoy_upstream_rq_per_try_timeout_ms="100")
        self._decided, self._then, self._says = door.decider.script, then, says
        door.servers[0].script = self._first
        door.decider.script = self._decide
        self.asking = asyncio.create_task(door.ask())

    async def _first(self, heard):
        await self.fails.wait()
        made = self._then(heard)
        return made if isinstance(made, Answer) else await made

    def _decide(self, heard):
        return self._about(heard) if heard.target.startswith(AGAIN) else self._decided(heard)

    async def _about(self, heard):
        await self.decides.wait()
        return self._says or self._decided(heard)

    async def asked(self):
        await until(lambda: self.door.asked(AGAIN))


async def test_late_request_goes_on_once_the_decider_says_so():
    async with open_door((None, named(b"b"))) as door:
        late = Late(door)
        await late.asked()
        assert not door.servers[0].cancelled.is_set() and not door.servers[1].heard
        late.decides.set()
        assert (await late.asking).body == b"b"
        await until(door.servers[0].cancelled.is_set)


async def test_late_request_is_answered_by_its_first_server_after_all():
    async with open_door((None, named(b"b"))) as door:
        late = Late(door, then=named(b"a"))
        await late.asked()
        late.fails.set()
        assert (await late.asking).body == b"a"
        await until(door.decider.cancelled.is_set)
        assert not door.servers[1].heard


async def test_late_request_goes_on_when_its_server_fails():
    async with open_door((None, named(b"b"))) as door:
        for failure in (CUT, ELSEWHERE):
            door.decider.heard.clear()
            door.servers[0].heard.clear()
            late = Late(door, then=lambda heard, failure=failure: failure)
            await late.asked()
            late.fails.set()
            await until(lambda: door.servers[0].heard)
            assert not late.asking.done()
            late.decides.set()
            assert (await late.asking).body == b"b"


async def test_late_request_is_answered_as_the_decider_says():
    says = Answer(504, {"content-type": "application/json"}, b'{"error": "deadline"}')
    async with open_door((None, named(b"b"))) as door:
        late = Late(door, says=says)
        late.decides.set()
        got = await late.asking
        assert (got.status, got.body, door.servers[1].heard) == (504, says.body, [])


async def test_late_request_goes_on_at_both_when_the_decider_goes():
    async with open_door((None, never)) as door:
        late = Late(door, then=named(b"a"))
        await late.asked()
        await door.decider.close()
        await until(lambda: door.servers[1].heard)
        late.fails.set()
        assert (await late.asking).body == b"a"


async def test_next_server_is_sent_what_the_decider_says_then():
    async with open_door((lambda heard: ELSEWHERE, None)) as door:
        door.send_to(0, 1, x_kappa_to_body="first")
        first = door.decider.script
        second = Answer(headers={TO_BODY_HEADER: "second"})

        async def about(heard):
            await asyncio.sleep(0.05)
            return second

        door.decider.script = lambda heard: (
            about(heard) if heard.target.startswith(AGAIN) else first(heard)
        )
        assert (await door.ask()).status == 200
        bodies = [server.heard[0].headers[TO_BODY_HEADER] for server in door.servers]
        assert bodies == ["first", "second"]


async def test_begun_answer_may_take_longer_than_its_head():
    async def slow():
        yield b"begun "
        await asyncio.sleep(1.7)
        yield b"ended"

    async with open_door((lambda heard: Answer(chunks=slow()),)) as door:
        door.send_to(0, x_envoy_upstream_rq_per_try_timeout_ms="1500")
        assert (await door.ask()).body == b"begun ended"


async def test_status_codes_to_retry_come_from_the_decider():
    async with open_door((lambda heard: Answer(500), named(b"b"))) as door:
        door.send_to(0, 1)
        assert (await door.ask()).status == 500
        door.send_to(0, 1, x_envoy_retriable_status_codes="429,500")
        assert (await door.ask()).body == b"b"


async def test_cut_request_goes_on_only_if_the_decider_says_so():
    async with open_door((lambda heard: CUT, named(b"b"))) as door:
        door.send_to(0, 1)
        decided = door.decider.script
        poison = Answer(422, {"content-type": "application/json"}, b'{"error": "poison"}')
        door.decider.script = lambda heard: (
            poison if heard.target.startswith(AGAIN) else decided(heard)
        )
        got = await door.ask()
        assert (got.status, got.body, door.servers[1].heard) == (422, poison.body, [])
        (again,) = door.asked(AGAIN)
        assert again.target == AGAIN + "id-1"
        assert again.headers["x-envoy-attempt-count"] == "2"

        door.decider.script = decided
        assert (await door.ask()).body == b"b"


async def begun(then):
    """An answer that begins, and goes on when `then` does."""
    yield b"data: 1\n\n"
    await then


@pytest.mark.parametrize("cut", [True, False])
async def test_begun_answer_that_breaks_or_falls_silent_is_cut(cut):
    then = asyncio.sleep(0) if cut else never(None)
    answer, bounds = Answer(chunks=begun(then), cut=cut), None if cut else Bounds(silent_s=1.5)
    async with open_door((lambda heard: answer, named(b"b")), bounds=bounds) as door:
        door.send_to(0, 1)
        got = await door.ask()
        assert (got.status, got.cut, door.servers[1].heard) == (200, True, [])


async def test_request_goes_nowhere_but_where_the_list_says():
    async with open_door((named(b"a"), named(b"b"))) as door:
        await door.servers[0].close()
        door.send_to(0)
        assert door.refuses(await door.ask(), "no_worker")
        door.decider.script = lambda heard: Answer(headers={ENDPOINT_HEADER: "127.0.0.1:9"})
        assert door.refuses(await door.ask(), "no_worker")
        door.decider.script = lambda heard: Answer(headers={TO_ID_HEADER: "id-1"})
        assert door.refuses(await door.ask(), "no_worker")
        assert door.servers[1].heard == []


async def test_worker_gets_its_own_secret_and_no_keys():
    def with_secret(at: int, made: ServerEndpoint) -> ServerEndpoint:
        return replace(made, secret=f"s{at}" if at < 2 else "")

    async with open_door((lambda heard: ELSEWHERE, None, None), with_secret) as door:
        keys = {"authorization": "Bearer mine", "x_api_key": "mine", "cookie": "mine"}
        door.send_to(0, 1)
        await door.ask(**keys)
        door.send_to(0, 2)
        await door.ask(**keys)
        secrets = [[one.headers.get(TO_SECRET_HEADER) for one in s.heard] for s in door.servers]
        assert secrets == [["s0", "s0"], ["s1"], [None]]
        heard = [one.headers for server in door.servers for one in server.heard]
        assert not any("mine" in value for headers in heard for value in headers.values())
        # The decider sees what the client sent.
        assert door.decider.heard[0].headers["authorization"] == "Bearer mine"


async def test_retry_never_carries_another_servers_key_or_prefix():
    def foreign(at: int, made: ServerEndpoint) -> ServerEndpoint:
        return [
            replace(made, key="k0", prefix="/p0"),
            replace(made, key="k1", prefix="/p1", name="b.example:81"),
            made,
        ][at]

    def seen(server):
        names = ("host", "authorization", "x-api-key")
        return [(h.target, *(h.headers.get(n) for n in names)) for h in server.heard]

    async with open_door((lambda heard: ELSEWHERE, None, None), foreign, foreign=True) as door:
        keys = {"authorization": "Bearer mine", "x_api_key": "mine"}
        for order in ((0, 1), (0, 2)):
            door.send_to(*order)
            assert (await door.ask("/v1/chat/completions?a=%2f", **keys)).status == 200
        path = "/v1/chat/completions?a=%2f"
        first = ("/p0" + path, door.endpoints[0].address, "Bearer k0", None)
        assert seen(door.servers[0]) == [first, first]
        assert seen(door.servers[1]) == [("/p1" + path, "b.example:81", "Bearer k1", None)]
        # Where nothing is configured the client's own keys reach it.
        mine = (path, door.endpoints[2].address, "Bearer mine", "mine")
        assert seen(door.servers[2]) == [mine]
        heard = [name for server in door.servers for one in server.heard for name in one.headers]
        assert not {name for name in heard if name.startswith("x-kappa-to-")} - OURS


async def test_keys_of_ours_reach_no_foreign_server():
    async with open_door((lambda heard: ELSEWHERE, None), foreign=True) as door:
        door.send_to(0, 1, x_envoy_auth_headers_to_remove="authorization,x-api-key")
        got = await door.ask(authorization="Bearer mine", x_api_key="mine", x_other="theirs")
        assert got.status == 200
        for server in door.servers:
            (heard,) = server.heard
            assert heard.headers["x-other"] == "theirs"
            assert not {"authorization", "x-api-key"} & heard.headers.keys()


@contextlib.asynccontextmanager
async def foreign_door(*servers, **given):
    """A door before foreign servers, and the ends that its Envoy logs."""
    ended = asyncio.Queue()
    async with (
        open_door(servers or (None,), foreign=True, own=True, **given) as door,
        ends_heard(door.spec.slots[0].events_socket, ended.put_nowait),
        asyncio.timeout(20),
    ):
        yield door, ended


async def test_foreign_streams_first_token_and_tail_are_told():
    seen = asyncio.Event()

    async def chunks():
        yield b": a comment\n\n"
        yield b'data: {"type": "response.created"}\n\n'
        await asyncio.sleep(0.05)
        assert not door.asked(FIRST)
        for at in range(20):
            yield b'data: {"choices": [%d' % at + b" " * 1000 + b"]}\n\n"
            await seen.wait()
        yield b'data: {"usage": 7}\n\n'

    stream = {"content-type": "text/event-stream", "x-backend": "b:1"}
    answer = lambda heard: Answer(200, stream, chunks=chunks())  # noqa: E731
    async with foreign_door(answer, from_header="X-Backend") as (door, ended):
        asking = asyncio.create_task(door.ask(accept_encoding="gzip"))
        await until(lambda: door.asked(FIRST))
        seen.set()
        got = await asking
        (first,), end = door.asked(FIRST), await ended.get()
        assert (first.target, end.request_id) == ("/first/id-1", "id-1")
        assert first.headers[TOLD_HEADER] == end.told == "b:1"
        assert (end.events, end.tail) == (22, got.body[-4096:]) and len(got.body) > 20_000
        assert "accept-encoding" not in door.servers[0].heard[0].headers


async def test_foreign_stream_is_told_alike_however_it_is_cut():
    events = (b'data: {"choices": [%d]}%s\n\n' % (at, b" " * (at % 50)) for at in range(160))
    whole, kind = b"".join(events), {"content-type": "text/event-stream"}

    async def chunks(stream, step):
        for at in range(0, len(stream), step):
            yield stream[at : at + step]

    async with foreign_door() as (door, ended):
        for step in (1, 3, 7, 1000, 9000):
            stream = whole[: 300 * step]
            answer = Answer(200, kind, chunks=chunks(stream, step))
            door.servers[0].script = lambda heard, answer=answer: answer
            assert (await door.ask()).body == stream
            end = await ended.get()
            assert (end.events, end.tail) == (stream.count(b"data: {"), stream[-4096:])


async def test_foreign_answer_in_one_has_a_tail_and_no_first_token():
    body = b'{"choices": ["' + b"x" * 9000 + b'"], "usage": {"completion_tokens": 3}}'
    async with foreign_door(named(body)) as (door, ended):
        got = await door.ask()
        assert ((await ended.get()).tail, got.body) == (body[-4096:], body)
        assert not door.asked(FIRST)


async def test_foreign_tail_cannot_pass_for_another_entry():
    forged = msgspec.msgpack.encode([REQUESTS, [[1, {"id": "forged", "status": 200}]]])
    body = b'{"x": "\xe4' + forged + b'\xff\x00", "usage": {"completion_tokens": 3}}'
    async with foreign_door(named(body)) as (door, ended):
        assert (await door.ask()).body == body
        end = await ended.get()
        assert (end.request_id, ended.empty()) == ("id-1", True)
        assert end.tail.endswith(b'"usage": {"completion_tokens": 3}}') and end.tail.isascii()


async def test_answers_of_our_own_workers_are_not_reported():
    async with open_door() as door:
        await door.ask()
        assert [one.target for one in door.decider.heard] == [DECIDE + CHAT]


async def test_decision_is_cancelled_when_its_client_leaves():
    async with open_door() as door:
        door.decider.script = never
        asking = asyncio.create_task(door.ask())
        await until(lambda: door.decider.heard)
        asking.cancel()
        await until(door.decider.cancelled.is_set)


async def test_servers_change_while_envoy_runs():
    async with open_door((named(b"a"), named(b"b"))) as door:
        door.file.write(door.endpoints[:1])
        door.send_to(1)
        await door.until(lambda got: got.status != 200)
        door.file.write(door.endpoints)
        await door.until(lambda got: got.status == 200)


async def test_draining_server_ends_its_answers_and_gets_no_more():
    going_on = asyncio.Event()
    async with open_door((lambda heard: Answer(chunks=in_two(going_on)), named(b"b"))) as door:
        begun = asyncio.create_task(door.ask())
        await until(lambda: door.servers[0].heard)
        door.servers[0].script = named(b"a")
        door.file.write([door.endpoints[1]])
        door.send_to(0, 1)
        await door.until(lambda got: got.body == b"b")
        going_on.set()
        got = await begun
        assert (got.body, got.cut) == (b"begun ended", False)


@pytest.mark.parametrize("lost_s", [0.01, 10.0, 1e9])
async def test_lost_s_bounds_how_long_a_dead_connection_stays(lost_s):
    async with open_door(bounds=Bounds(lost_s=lost_s)) as door:
        assert (await door.ask()).status == 200
        told = json.loads(door.spec.bootstrap_file.read_text())["static_resources"]["clusters"][0]
    probes = told["upstream_connection_options"]["tcp_keepalive"]
    (option,) = told["upstream_bind_config"]["socket_options"]
    bound_s = min(max(lost_s, 5.0), 3600.0)
    sum_s = probes["keepalive_time"] + probes["keepalive_probes"] * probes["keepalive_interval"]
    assert sum_s == pytest.approx(bound_s, abs=2.0) and option["int_value"] == 1000 * bound_s


async def test_ipv6_server_is_reached():
    async with open_door((None,)) as door:
        server = door.servers[0]
        await server.close()
        server.port = 0
        try:
            await server.listen(host="::1")
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        door.endpoints[0] = ServerEndpoint("w", "::1", server.port)
        door.file.write(door.endpoints)
        door.send_to(0)
        await door.until(lambda got: got.status == 200)
        assert server.heard[0].headers["host"] == f"[::1]:{server.port}"


async def test_server_with_tls_must_have_its_names_certificate(tmp_path):
    tls = pair(tmp_path, "a.example")
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(tls.cert, tls.key)
    async with open_door((named(b"a"), named(b"plain")), ca=tls.cert) as door:
        server = door.servers[0]
        await server.close()
        await server.listen(ssl=server_side)
        for name, status in (("a.example", 200), ("b.example", 503)):
            door.endpoints[0] = replace(door.endpoints[0], tls=True, name=name)
            door.file.write(door.endpoints)
            await door.until(lambda got, status=status: got.status == status)
        assert server.heard[0].headers["host"] == "a.example"
        # One without goes on as before.
        door.send_to(0, 1)
        assert (await door.ask()).body == b"plain"
