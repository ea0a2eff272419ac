"""Traffic of every kind reaches a real HTTP server as it says; what a row of the table promises."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kappa_benchmarks.faults import isolation as isolating
from kappa_benchmarks.faults.bodies import CHAT, COMPLETION, ROUTE
from kappa_benchmarks.faults.isolation import FAIR, KINDS, Row, attack
from kappa_benchmarks.faults.traffic import Beside

REFUSAL = {"error": {"message": "no", "type": "bad", "param": None, "code": "invalid"}}


def test_a_row_is_broken_by_slowness_refusals_or_leaks():
    fine = Beside(4, {}, 1.0, 1.0, 1.0, 1.0)
    assert Row("a", "", fine, 2.0, 2.0, {}, 0).broken() == []
    assert Row("a", "", fine, 2.1, 2.0, {}, 0).broken() == ["2.1 times its fair time"]
    assert len(Row("a", "", Beside(4, {"429": 1}, 1, 1, 1, 1), 1.0, 3.0, {}, 1).broken()) == 3


@pytest.mark.parametrize("name", [*KINDS, "fair"])
async def test_every_kind_of_traffic_sends_what_it_says(name, monkeypatch):
    kind = replace(KINDS.get(name, FAIR), clients=2)
    monkeypatch.setattr(isolating, "_kind", lambda _name: kind)
    got, now_s = [], [0.0]
    monkeypatch.setattr(isolating, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def endpoint(request):
        got.append((request.method, request.path, await request.read()))
        now_s[0] = 60.0  # the traffic has lasted long enough
        return web.json_response(REFUSAL, status=429)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", endpoint)
    monkeypatch.setattr(isolating, "_SLOW_S", 0.0)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        statuses = await asyncio.to_thread(attack, url, "m", name, 60.0)
    assert set(statuses) == {"429"}
    method, path, body = got[0]
    if name == "decisions":
        assert (method, path) == ("GET", "/v1/decisions")
    else:
        assert path in (CHAT, COMPLETION, ROUTE) and json.loads(body)["model"] == "m"
    assert kind.title
