"""Several `kappa route` tell each other what they have in flight."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kappa.host import free_port
from kappa.protocol import Arrival, WorkerReport
from kappa.settings.front import load_front_settings
from kappa_router.decision import RouteRequest
from kappa_router.front import peers
from kappa_router.front.gateway import picking
from kappa_router.front.peers import Heard, Peers, Teller, Told
from kappa_router.live.metrics import RouterMetrics
from tests.router.building import announcement, router
from tests.router.front.conftest import QUICK, fronted
from tests.router.front.offering import FakeServer, serving
from tests.router.patience import until

KEYS = {
    "by_key": {"sk-root-0123456789": "root", "sk-bob-0123456789": "bob"},
    "operators": ["root"], "unknown": "refuse",
}  # fmt: skip


def row(name="r", new=400, **what):
    return Arrival(name, new_tokens=new, **what)


def told(router="peer", ended=(), **sent):
    return Told(1, router, {worker: list(rows) for worker, rows in sent.items()}, list(ended))


# -- lines --------------------------------------------------------------------------------------


def test_teller_tells_all_first_and_then_what_changed():
    teller = Teller("me")
    first = {"a": (row("r"), row("s")), "b": (row("t"),)}
    assert teller.told(first) == told("me", a=first["a"], b=first["b"])
    assert teller.told(first) == told("me")
    later = {"a": (row("r", prefilled=True),), "b": (row("t"), row("u"))}
    assert teller.told(later) == told("me", ["s"], a=[row("r", prefilled=True)], b=[row("u")])
    assert teller.told({"a": (), "b": ()}) == told("me", ["r", "t", "u"])


def test_heard_hands_on_ends_before_what_is_new():
    heard = Heard(8)
    (first,) = heard.take(told(a=[row()]), whole=True)
    assert first == WorkerReport("a", 0.0, arrived=(row("peer/r"),))
    moved = heard.take(told(b=[row()]), whole=False)
    assert [(r.worker, r.finished) for r in moved] == [("a", ("peer/r",)), ("b", ())]
    assert heard.take(told(ended=["r", "of nobody"]), whole=False)[0].worker == "b"
    assert heard.servers == {}


def test_heard_drops_what_a_whole_list_lacks():
    heard = Heard(8)
    heard.take(told(a=[row("r"), row("s")]), whole=True)
    heard.take(told(a=[row("s")]), whole=True)
    assert set(heard.servers) == {"peer/s"}
    # It was started again, and draws another name.
    heard.take(told("again", a=[row("s")]), whole=True)
    assert set(heard.servers) == {"again/s"}
    assert heard.nothing() == [WorkerReport("a", 0.0, finished=("again/s",))]


@given(st.lists(st.dictionaries(st.sampled_from("rstuvw"), st.sampled_from("abc")), max_size=8))
def test_heard_knows_what_the_teller_has(states):
    teller, heard, known = Teller("peer"), Heard(6), router(*map(announcement, "abc"))
    for i, state in enumerate(states):
        sent = {worker: [row(r) for r in state if state[r] == worker] for worker in "abc"}
        line = msgspec.json.decode(msgspec.json.encode(teller.told(sent)), type=Told)
        for report in heard.take(line, whole=i == 0):
            known.others(report, 1.0)
        assert heard.servers == {f"peer/{r}": worker for r, worker in state.items()}
        assert {f.request_id: f.worker for f in known.flights.values()} == heard.servers


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([row(f"r{i}") for i in range(9)], "more than 8 requests"),
        ([row(new=1 << 40)], "cannot be one"),
        ([row(disk_tokens=1 << 40)], "cannot be one"),
        ([row("r" * 300)], "cannot be one"),
    ],
)
def test_line_that_no_router_says_is_refused_and_changes_nothing(wrong, why):
    heard = Heard(8)
    heard.take(told(a=[row("before")]), whole=True)
    with pytest.raises(ValueError, match=why):
        heard.take(told(b=wrong, ended=["before"]), whole=False)
    assert heard.servers == {"peer/before": "a"}


# -- over sockets --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def speaking(answer):
    """A peer that answers so: its address."""

    async def handler(request):
        assert request.path == "/v1/in_flight"
        return await answer(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def following(monkeypatch, *addresses, silent_s=0.3, **given):
    """Peers of a router of two servers, that follows those at the addresses."""
    monkeypatch.setattr(peers, "pause_s", lambda attempt: 0.02)
    monkeypatch.setattr(peers, "SILENT_S", silent_s)
    monkeypatch.setattr(peers, "_LOOK_S", 0.05)
    settings = load_front_settings(
        None, backends=[{"url": "http://a:8000", "profile": "pcie"}], router={"max_queue": 100},
        peers={"urls": [f"http://{one}" for one in addresses], **given},
    )  # fmt: skip
    known = router(announcement("a"), announcement("b"))
    live = SimpleNamespace(
        router=known, metrics=RouterMetrics(), others=lambda report: known.others(report, 1.0)
    )
    async with aiohttp.ClientSession() as http:
        made = Peers(settings, live, http)
        task = asyncio.create_task(made.follow())
        try:
            yield made, known, live
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def lines(request, *said, then=None):
    answer = web.StreamResponse()
    await answer.prepare(request)
    for line in said:
        await answer.write(msgspec.json.encode(line) + b"\n" if isinstance(line, Told) else line)
    if then is not None:
        await then.wait()
    return answer


async def test_silent_peer_is_forgotten_and_heard_again(monkeypatch):
    silent, goes_on = asyncio.Event(), asyncio.Event()

    async def answer(request):
        if silent.is_set():
            await goes_on.wait()
        return await lines(request, told(a=[row("r"), row("s")]), then=silent)

    async with (
        speaking(answer) as address,
        following(monkeypatch, address) as (made, known, live),
    ):
        await until(lambda: known.in_flight == 2)
        assert made.rows()[0]["in_flight"] == 2 and made.rows()[0]["peer"] == address
        silent.set()
        await until(lambda: known.in_flight == 0)
        assert made.rows()[0]["why"] == "nothing came within 0.3 s"
        assert made.rows()[0]["age_s"] > 0.3
        assert f'kappa_peer_age_seconds{{peer="{address}"}}' in live.metrics.exposition().decode()
        silent.clear()
        goes_on.set()
        await until(lambda: known.in_flight == 2 and made.rows()[0]["why"] is None)


async def test_dead_peer_is_forgotten_whatever_the_pause(monkeypatch):
    async def answer(request):
        return await lines(request, told(a=[row()]), then=asyncio.Event())

    async with contextlib.AsyncExitStack() as alive:
        address = await alive.enter_async_context(speaking(answer))
        async with following(monkeypatch, address) as (_, known, _):
            await until(lambda: known.in_flight == 1)
            monkeypatch.setattr(peers, "pause_s", lambda attempt: 60.0)
            await alive.aclose()
            await until(lambda: known.in_flight == 0)


async def _million(request):
    rows = b",".join([b'{"request_id":"r"}'] * 1_000_000)
    return await lines(request, b'{"form":1,"router":"p","sent":{"a":[' + rows + b"]}}\n")


async def _denied(request):
    return web.Response(status=403)


async def _page(request):
    return web.Response(text="<html>")


async def _none(request):
    return web.Response(text="")


def said(line):
    async def answer(request):
        return await lines(request, line)

    return answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_million, "cannot be read"),
        (said(b'{"form":1,"router":"p","sent":{"a":[{"request_id":"r","new_tokens":NaN}]}}\n'),
         "cannot be read"),
        (said(b'{"form":1,"router":"p","sent":{"a":[{"request_id":"r","new_tokens":-1}]}}\n'),
         "cannot be read"),
        (said(b'{"form":2,"router":"p","sent":{"a":7}}\n'), "one version in all replicas"),
        (said(b'{"form":1,"router":"p","x":' + b"[" * 9_000 + b"]" * 9_000 + b"}\n"),
         "cannot be read"),
        (said(told(a=[row(f"r{i}") for i in range(101)])), "more than 100 requests"),
        (_page, "cannot be read"), (_none, "answered nothing"), (_denied, "peers.key_env"),
    ],
)  # fmt: skip
async def test_peer_of_nonsense_is_one_line_and_counts_as_silent(monkeypatch, answer, why):
    with capture_logs() as logs:
        async with (
            speaking(answer) as address,
            following(monkeypatch, address, silent_s=100.0) as (made, known, _),
        ):
            await until(lambda: made._peers)
            made._peers[address].heard_s -= 200.0  # As if it had been followed for that long.
            await until(lambda: any(why in one.get("why", "") for one in logs))
            for _ in range(20):  # It asks on, and says no more.
                await asyncio.sleep(0.01)
            assert known.in_flight == 0 and why in made.rows()[0]["why"]
    (line,) = (one for one in logs if why in one.get("why", ""))
    assert (line["event"], line["peer"]) == ("peer_not_heard", address)


async def test_name_that_resolves_to_oneself_and_others_is_followed(monkeypatch):
    asked = []

    async def answer(request):
        asked.append(dict(request.headers))
        return await lines(request, told(b=[row()]), then=asyncio.Event())

    monkeypatch.setenv("KAPPA_TEST_KEY", "sk-root-0123456789")
    async with speaking(answer) as address:
        name = f"localhost:{address.rpartition(':')[2]}"
        key = {"key_env": "KAPPA_TEST_KEY"}
        async with following(monkeypatch, name, **key) as (made, known, _):
            await until(lambda: known.in_flight == 1)
            assert asked[0]["Authorization"] == "Bearer sk-root-0123456789"
            assert asked[0]["Host"] == name and made.rows()[-1]["peer"].endswith(name[9:])

    async def own(request):
        return await lines(request, *[Told(1, made._name)], then=asyncio.Event())

    async with speaking(own) as address, following(monkeypatch, address) as (made, known, _):
        await until(lambda: made._peers and all(p.oneself for p in made._peers.values()))
        assert made.rows() == [] and known.in_flight == 0


async def test_what_was_told_at_ones_own_address_is_forgotten(monkeypatch):
    # As behind a load balancer: first another router, then oneself.
    heard = asyncio.Event()

    async def answer(request):
        return await lines(request, Told(1, made._name) if heard.is_set() else told(a=[row()]))

    async with speaking(answer) as address, following(monkeypatch, address) as (made, known, live):
        await until(lambda: made.rows() and known.in_flight == 1)
        heard.set()
        await until(lambda: not made.rows() and known.in_flight == 0)
        assert address not in live.metrics.exposition().decode()


async def test_unresolved_name_is_one_line_and_others_are_heard(monkeypatch):
    async def answer(request):
        return await lines(request, told(b=[row()]), then=asyncio.Event())

    with capture_logs() as logs:
        async with speaking(answer) as address:
            both = ("no-such-host.invalid:80", address)
            async with following(monkeypatch, *both) as (_, known, _):
                await until(lambda: known.in_flight == 1)
                await asyncio.sleep(0.2)
    assert [one["event"] for one in logs].count("peers_not_resolved") == 1


async def test_only_operators_hear_what_is_in_flight():
    async with fronted(FakeServer(), tenants=KEYS) as (front, servers):
        servers[0].hold.clear()
        bob, root = ({"authorization": f"Bearer {key}"} for key in reversed(KEYS["by_key"]))
        chat = {"json": {"model": "llama-3.1-8b", "messages": []}, "headers": bob}
        busy = asyncio.create_task(front.http.post("/v1/chat/completions", **chat))
        await until(lambda: front.live.router.in_flight)
        assert (await front.http.get("/v1/in_flight")).status == 401
        assert (await front.http.get("/v1/in_flight", headers=bob)).status == 403
        async with front.http.get("/v1/in_flight", headers=root) as answer:
            first = json.loads(await answer.content.readline())
            assert first["form"] == 1 and [len(rows) for rows in first["sent"].values()] == [1]
            servers[0].hold.set()
            while not (after := json.loads(await answer.content.readline()))["ended"]:
                pass
            assert after["ended"] == [one["request_id"] for one in first["sent"]["a"]]
        await busy


async def test_answer_to_a_peer_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_S", 0.2)
    async with fronted(FakeServer()) as (front, _):
        text = await (await front.http.get("/v1/in_flight")).text()
        assert text.endswith("\n") and json.loads(text.splitlines()[0])["form"] == 1


async def test_router_that_ends_ends_what_it_tells(monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_S", 3600.0)
    async with serving(FakeServer()) as (server,), aiohttp.ClientSession() as http:
        rows = [{"url": server.url, "profile": "pcie"}]
        given = {"backends": rows, "epp": {"port": 0}, "http": {"port": 0}, "probe": QUICK}
        async with picking(load_front_settings(None, **given)) as here:
            answer = await http.get(f"{here.url}/v1/in_flight")
            await answer.content.readline()
        # It was not cut.
        await answer.read()


async def test_endpoint_pickers_tell_each_other_too():
    ports = [free_port("127.0.0.1") for _ in "ab"]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with serving(FakeServer()) as (server,), contextlib.AsyncExitStack() as stack:
        rows = [{"url": server.url, "profile": "pcie", "name": "a"}]
        given = {"backends": rows, "peers": {"urls": urls}, "epp": {"port": 0}, "probe": QUICK}
        one, other = [
            (
                await stack.enter_async_context(
                    picking(load_front_settings(None, **given, http={"port": port}))
                )
            ).front.live
            for port in ports
        ]
        await until(lambda: one.choosable and other.choosable)
        one.route(RouteRequest("r", np.arange(400), max_tokens=5))
        await until(lambda: other.router.remote_in_flight_on("a") == 1)
        one.release("r", "done")
        await until(lambda: not other.router.in_flight)
