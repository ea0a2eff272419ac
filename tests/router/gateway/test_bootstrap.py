"""What a client can do to a front door, against a real Envoy."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kappa.protocol import ENDPOINT_HEADER, TO_ID_HEADER
from kappa_router.gateway.bootstrap import bootstrap, certificate
from kappa_router.gateway.endpoints import EndpointsFile, write_private
from kappa_router.gateway.process import find_envoy
from kappa_router.gateway.spec import ADMIT, DECIDE, Bounds, GatewaySpec, veiled
from tests.router.gateway.certificates import pair
from tests.router.gateway.door import CHAT, Answer, ends_heard, never, open_door
from tests.router.gateway.http2 import post
from tests.router.patience import until

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode()
TINY = Bounds(
    headers=20, header_bytes=4096, body_bytes=200_000, header_s=0.5, body_s=0.5, idle_s=0.5
)


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("away", ["refuse", "least_request"])
def test_envoy_takes_every_kind_of_configuration(tmp_path, away, foreign):
    tls = pair(tmp_path)
    spec = GatewaySpec(
        tmp_path, "127.0.0.1", 1, (CHAT,), ("/", "/v1/decisions/"), tls, foreign, away, tls.cert
    )
    EndpointsFile(spec.endpoints_file)
    write_private(spec.certificate_file, certificate(tls))
    write_private(spec.bootstrap_file, bootstrap(spec))
    run = subprocess.run(
        [find_envoy(), "--mode", "validate", "-l", "warning", "-c", spec.bootstrap_file],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr.strip()) == (0, "")


async def test_client_cannot_set_headers_of_ours():
    names = ("x-kappa-to-id", "X-Kappa-To-Anything", "x-gateway-destination-endpoint",
             "x-envoy-max-retries", "X-Envoy-Original-Path")  # fmt: skip
    async with open_door() as door:
        door.decider.script = lambda heard: Answer(
            headers={ENDPOINT_HEADER: door.addresses(0), TO_ID_HEADER: "ours"}
        )
        got = await door.ask(**{name: "spoofed" for name in names}, x_kappa_plan="kept")
        assert got.status == 200
        for heard in (door.decider.heard[0], door.servers[0].heard[0]):
            assert "spoofed" not in heard.headers.values()
            assert heard.headers["x-kappa-plan"] == "kept"
        assert door.servers[0].heard[0].headers[TO_ID_HEADER] == "ours"


async def test_client_cannot_name_a_server():
    async with open_door((None, None)) as door:
        door.decider.script = lambda heard: Answer()
        for spoofed in (door.addresses(1), f"{door.addresses(1)}\r\nconnection: {ENDPOINT_HEADER}"):
            got = await door.ask(**{ENDPOINT_HEADER: spoofed})
            assert (got.status, door.servers[1].heard) == (503, [])


PATHS = {
    CHAT: "server",
    CHAT + "?a=/../b": "server",
    "/v1/messages": "server",
    "/": "face",
    "/?a=b": "face",
    "/v1/nodes": "face",
    "/v1/decisions/a.b:c-d": "face",
    "/v1/decisions/..": "face",  # as it is, which is an id
    CHAT + "/": "",
    "/v1/chat//completions": "",
    "//v1/nodes": "",
    "/v1/nodes/": "",
    "/v1/nodes/../chat/completions": "",
    "/v1/decisions/": "",
    "/v1/decisions/a/../../nodes": "",
    "/v1/chat%2fcompletions": "",
    "/v1/chat/completion%73": "",
    "/v1/chat\\completions": "",
    "/V1/chat/completions": "",
    "/v1/chat/completions;a=b": "",
    "/metrics": "",
    "/admit" + CHAT: "",
}


async def test_paths_that_are_listed_are_the_only_ones():
    async with open_door() as door:
        places = {"server": door.servers[0].heard, "face": door.faces[0].heard}
        for path, who in PATHS.items():
            for heard in (*places.values(), door.decider.heard):
                heard.clear()
            got = await door.ask(path)
            reached = {name: [one.target for one in heard] for name, heard in places.items()}
            assert reached == {name: [path] * (name == who) for name in places}, path
            if who:
                assert got.status == 200
            else:
                assert (got.status, got.error["code"], path) == (404, "not_found", path)
                assert got.error["type"] == "invalid_request_error"
                assert got.headers["content-type"] == "application/json"
                assert door.decider.heard == []


NO_REQUESTS = (
    (b"nonsense\r\n\r\n", 400, "bad_request"),
    (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n", 400, "bad_request"),
    (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "bad_request"),
    (b"POST * HTTP/1.1\r\nhost: a\r\n\r\n", 400, "bad_request"),
    (HEAD.replace(b" HTTP", b"#a HTTP") + b"\r\n", 400, "bad_request"),
    (HEAD.replace(b"1.1", b"1.0") + b"\r\n", 426, "bad_request"),
    (HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 403, "bad_request"),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 404, "not_found"),
    (HEAD + b"x: " + b"a" * 5000 + b"\r\n\r\n", 431, "headers_too_large"),
    (HEAD + b"x: a\r\n" * 25 + b"\r\n", 431, "headers_too_large"),
    (HEAD, 408, "headers_too_slow"),
    (b"P", 408, "headers_too_slow"),
    (HEAD + b"content-length: 9\r\n\r\n{}", 408, "body_too_slow"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", 408, "body_too_slow"),
    (HEAD + b"content-length: 200001\r\n\r\n" + b"a" * 200_001, 413, "body_too_large"),
)


async def test_malformed_request_is_refused_at_the_door():
    async with open_door(bounds=TINY) as door:
        for raw, status, code in NO_REQUESTS:
            got = await door.send(raw)
            assert (got.status, got.error["code"], raw) == (status, code, raw)
            assert not door.servers[0].heard and not door.asked(DECIDE)
        # The next client is served.
        assert (await door.ask()).status == 200


async def test_silent_connection_is_closed():
    async with open_door(bounds=TINY) as door:
        with pytest.raises(asyncio.IncompleteReadError):
            await door.send()
        assert (await door.ask()).status == 200


async def test_connections_above_the_bound_are_refused():
    async with open_door(bounds=Bounds(connections=2)) as door:
        held = [await asyncio.open_connection("127.0.0.1", door.spec.port) for _ in range(2)]
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await door.ask()
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    assert (await door.ask()).status == 200
                    break
                await asyncio.sleep(0.02)


async def test_requests_are_refused_before_memory_ends():
    # An idle Envoy has some 10 MB, so a body that stands still passes this bound.
    half = HEAD + b"content-length: 60000000\r\n\r\n" + b"a" * 30_000_000
    async with open_door(bounds=Bounds(heap_bytes=24 << 20), own=True) as door:
        _, writer = await asyncio.open_connection("127.0.0.1", door.spec.port)
        writer.write(half)
        assert door.refuses(await door.until(lambda got: got.status != 200), "overloaded")
        writer.transport.abort()
        await door.until(lambda got: got.status == 200)


async def test_client_that_expects_is_told_to_go_on():
    async with open_door() as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.spec.port)
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(b"{}")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        assert "expect" not in door.servers[0].heard[0].headers


async def test_hop_by_hop_headers_end_at_the_door():
    async with open_door() as door:
        door.send_to(0)
        got = await door.ask(
            connection=f"x-mine, {TO_ID_HEADER}", x_mine="1", keep_alive="1", proxy_connection="a",
            proxy_authorization="b",
        )  # fmt: skip
        assert got.status == 200
        headers = door.servers[0].heard[0].headers
        gone = {"connection", "x-mine", "keep-alive", "proxy-connection", "proxy-authorization"}
        assert not gone & headers.keys()
        # No client can have a header of ours removed by calling it one of its connection.
        assert headers[TO_ID_HEADER] == "id-1"


# -- the decider --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_body_is_not_read_before_it_is_admitted(chunked):
    body = b"a" * 1_000_000
    if chunked:
        raw = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        raw = b"content-length: %d\r\n\r\n%s" % (len(body), body)
    admitted = asyncio.Event()

    async with open_door(own=True) as door:

        async def decide(heard):
            await admitted.wait()
            return Answer(headers={ENDPOINT_HEADER: door.addresses(0), TO_ID_HEADER: "a"})

        door.decider.script = decide
        asking = asyncio.create_task(door.send(HEAD + raw))
        await until(lambda: door.decider.heard)
        await asyncio.sleep(0.1)
        assert [one.target for one in door.decider.heard] == [ADMIT + CHAT]
        assert door.decider.heard[0].body == b""
        stats = await door.gateway._ask("GET", "/stats?filter=^server.memory_allocated$")
        buffered = int(stats.partition(": ")[2])
        admitted.set()
        assert (await asking).status == 200
        assert buffered < 16 << 20
        assert [len(one.body) for one in door.asked(DECIDE)] == [len(body)]
        assert [len(one.body) for one in door.servers[0].heard] == [len(body)]


async def test_body_that_is_cut_short_reaches_no_decider():
    async with open_door() as door:
        door.send_to(0)
        _, writer = await asyncio.open_connection("127.0.0.1", door.spec.port)
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        assert (await door.ask()).status == 200
        assert len(door.decider.heard) == len(door.servers[0].heard) == 1


async def test_large_body_is_refused_without_being_read():
    refusal = Answer(401, {"content-type": "application/json", "retry-after": "7"}, b'{"a": 1}')
    async with open_door() as door:
        door.decider.script = lambda heard: refusal
        got = await door.send(HEAD + b"content-length: 50000000\r\n\r\n")
        assert (got.status, got.body, got.headers["retry-after"]) == (401, b'{"a": 1}', "7")
        assert got.headers["content-type"] == "application/json"
        assert [one.target for one in door.decider.heard] == [ADMIT + CHAT]


async def test_refusal_with_5xx_reaches_the_client_as_it_was_meant():
    async with open_door() as door:
        for status in (500, 502, 503, 504):
            head = {"content-type": "application/json", "retry-after": "7"}
            refusal = Answer(veiled(status), head, b'{"a": 1}')
            door.decider.script = lambda heard, refusal=refusal: refusal
            got = await door.ask()
            assert (got.status, got.body, got.headers["retry-after"]) == (status, b'{"a": 1}', "7")


async def test_answer_has_the_headers_that_the_decider_gives():
    async with open_door() as door:
        door.send_to(0, x_kappa_node="n", x_kappa_tone="t", x_request_id="mine", x_other="o",
                     x_kappa_to_body="{}")  # fmt: skip
        got = await door.ask(x_request_id="theirs")
        mine = {name: text for name, text in got.headers.items() if name.startswith("x-")}
        assert mine == {"x-kappa-node": "n", "x-kappa-tone": "t", "x-request-id": "mine"}
        headers = door.servers[0].heard[0].headers
        assert (headers["x-request-id"], headers["x-kappa-to-body"]) == ("mine", "{}")
        assert "x-other" not in headers


async def test_decision_may_take_longer_than_a_body():
    async with open_door(bounds=TINY) as door:

        async def slowly(heard):
            await asyncio.sleep(1.2)
            return Answer(headers={ENDPOINT_HEADER: door.addresses(0), TO_ID_HEADER: "a"})

        door.decider.script = slowly
        assert (await door.ask()).status == 200
        assert len(door.decider.heard) == 1


async def test_decider_that_hangs_is_given_up():
    async with open_door(bounds=replace(TINY, decide_s=0.3)) as door:
        door.decider.script = never
        got = await door.ask()
        assert (got.status, got.error["code"]) == (503, "decider_away")
        assert got.headers["retry-after"] == "1"


async def test_gateway_refuses_without_a_decider():
    async with open_door() as door:
        await door.decider.close()
        assert door.refuses(await door.ask(), "decider_away")
        assert door.servers[0].heard == []
        got = await door.ask("/v1/messages")
        assert json.loads(got.body)["error"]["type"] == "overloaded_error"
        # Our own paths still answer, and a decider that comes back is found.
        assert (await door.ask("/v1/nodes")).body == b"face"
        await door.reopen()
        assert (await door.ask()).status == 200


async def test_request_waits_for_a_decider_that_starts_again():
    async with open_door() as door:
        await door.decider.close()
        asking = asyncio.create_task(door.ask())
        await asyncio.sleep(0.02)
        await door.reopen()
        assert (await asking).status == 200


async def test_servers_share_without_a_decider_if_that_is_wanted():
    async with open_door((None, None), decider_away="least_request") as door:
        door.send_to(1)
        for _ in range(4):
            assert (await door.ask()).status == 200
        assert [len(one.heard) for one in door.servers] == [0, 4]
        await door.decider.close()
        # A draining server gets none, one that is gone is stepped over.
        door.file.write([door.endpoints[0]])
        await door.until(lambda got: got.status != 200 or door.servers[0].heard)
        seen = len(door.servers[1].heard)
        for _ in range(4):
            assert (await door.ask()).status == 200
        assert len(door.servers[1].heard) == seen


async def test_ends_and_failed_attempts_are_told():
    ended, failed = asyncio.Queue(), asyncio.Queue()
    begun = asyncio.Event()

    async def slow():
        yield b"data: 1\n\n"
        begun.set()
        await asyncio.sleep(60)

    async with (
        open_door((lambda heard: Answer(cut=True), None), own=True) as door,
        ends_heard(door.spec.slots[0].events_socket, ended.put_nowait, failed.put_nowait),
        asyncio.timeout(20),
    ):
        door.send_to(0, 1)
        await door.ask("/v1/nodes")
        await door.ask(body=b"{}")
        end, failure = await ended.get(), await failed.get()
        assert (end.request_id, end.status, end.sent_bytes) == ("id-1", 200, 2)
        assert end.upstream == door.addresses(1) and end.duration_s > 0 and not end.flags
        assert (failure.request_id, failure.upstream) == ("id-1", door.addresses(0))
        assert failure.broken and not failure.unreached

        door.servers[1].script = lambda heard: Answer(429)
        door.send_to(1)
        await door.ask()
        assert ((await ended.get()).status, (await failed.get()).status) == (429, 429)

        await door.servers[0].close()
        door.send_to(0)
        await door.ask()
        end, failure = await ended.get(), await failed.get()
        assert (end.status, end.unreached, failure.unreached) == (503, True, True)

        door.servers[1].script = lambda heard: Answer(chunks=slow())
        door.send_to(1)
        leaving = asyncio.create_task(door.ask())
        await begun.wait()
        leaving.cancel()
        end = await ended.get()
        assert (end.status, end.client_gone, end.broken) == (200, True, False)


async def test_ends_wait_for_a_decider_that_is_away():
    ended = asyncio.Queue()
    async with open_door(own=True) as door, asyncio.timeout(20):
        door.send_to(0)
        await door.ask()
        await asyncio.sleep(1.0)  # Envoy fails to connect, again and again.
        async with ends_heard(door.spec.slots[0].events_socket, ended.put_nowait):
            assert (await ended.get()).status == 200


async def test_stream_that_goes_on_is_told(monkeypatch):
    monkeypatch.setattr("kappa_router.gateway.bootstrap.GOES_ON_S", 0.2)
    going, ended, done = asyncio.Queue(), asyncio.Queue(), asyncio.Event()

    async def slow():
        yield b"data: 1\n\n"
        await done.wait()

    async with (
        open_door((lambda heard: Answer(chunks=slow()),), own=True) as door,
        ends_heard(door.spec.slots[0].events_socket, ended.put_nowait, print, going.put_nowait),
        asyncio.timeout(20),
    ):
        asking = asyncio.create_task(door.ask())
        assert [await going.get() for _ in range(2)] == ["id-1"] * 2 and ended.empty()
        done.set()
        await asking
        assert (await ended.get()).status == 200


# -- protocols ----------------------------------------------------------------------------------


async def test_gateway_speaks_http2_on_the_same_port():
    async with open_door() as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.spec.port)
        async with asyncio.timeout(5):
            first, body = await post(reader, writer, CHAT, b"{}")
        writer.close()
        assert (first, body) == (b"\x88", b"{}")
        assert door.servers[0].heard[0].body == b"{}"
        # Of unknown length, so it was looked at beforehand.
        assert [one.target for one in door.decider.heard] == [ADMIT + CHAT, DECIDE + CHAT]


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
async def test_gateway_speaks_tls_and_agrees_on_a_protocol(tmp_path, protocol):
    tls = pair(tmp_path)
    trust = ssl.create_default_context(cafile=str(tls.cert))
    trust.set_alpn_protocols([protocol])
    async with open_door(tls=tls) as door:
        reader, writer = await asyncio.open_connection("localhost", door.spec.port, ssl=trust)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == protocol
        async with asyncio.timeout(5):
            if protocol == "h2":
                assert (await post(reader, writer, CHAT, b"{}"))[1] == b"{}"
            else:
                writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        assert door.servers[0].heard[0].headers["x-forwarded-proto"] == "https"


async def test_new_certificate_is_taken_without_a_restart(tmp_path):
    tls = pair(tmp_path)
    async with open_door(tls=tls) as door:

        def shown():
            return ssl.get_server_certificate(("127.0.0.1", door.spec.port), timeout=5)

        before = await asyncio.to_thread(shown)
        fresh = pair(tmp_path, stem="new")
        for new, old in ((fresh.key, tls.key), (fresh.cert, tls.cert)):
            Path(new).replace(old)
        async with asyncio.timeout(10):
            while await asyncio.to_thread(shown) == before:
                await asyncio.sleep(0.05)
