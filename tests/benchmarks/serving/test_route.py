"""The emulated servers and the load of the benches of `kappa route`."""

import asyncio
import itertools
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kappa.settings.base import SettingsError
from kappa_benchmarks.serving import route
from kappa_benchmarks.serving.route import RouteLoad, _checked, _summary, play, prompt_of
from kappa_benchmarks.serving.route_backend import (
    BLOCK_BYTES,
    EmulatedEngine,
    EmulatedLaw,
    LruTier,
    make_server,
    prompt_blocks,
)
from kappa_benchmarks.serving.route_proxy import ProxyLoad, loads_of, losses, send, ttft_s
from kappa_loadtest.run_folder import RequestRecord
from kappa_workload.scaling import scaled
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of

FAST = EmulatedLaw(token_s=1e-7, pair_s=0, decode_s=0, step_s=1e-4, load_s=0, load_token_s=0)


def test_a_step_costs_more_than_in_proportion_and_in_tiles():
    law = EmulatedLaw(token_s=1e-4, pair_s=0, decode_s=1e-3, step_s=0.01)
    assert law.of_step([(1, 0)], 0) == pytest.approx(0.01 + 128e-4 * (1 + 128 / 4096))
    assert law.of_step([(129, 0)], 0) == law.of_step([(256, 0)], 0)
    assert law.of_step([(2048, 0)], 0) > 2 * law.of_step([(1024, 0)], 0) - 0.01
    assert law.of_step([], 5) == pytest.approx(0.01 + 8e-3)


def test_a_load_takes_its_tokens_and_none_takes_nothing():
    law = EmulatedLaw(load_token_s=1e-5, load_s=0.002)
    assert law.of_load(0) == 0.0 and law.of_load(1000) == pytest.approx(0.012)


def test_tier_evicts_the_oldest_and_ends_before_beginnings():
    tier = LruTier(4)
    tier.keep([1, 2, 3])
    tier.keep([7, 8])
    assert tier.leading([1, 2, 3]) == 2 and tier.leading([7, 8]) == 2
    tier.keep([1, 2])
    tier.keep([9])
    assert tier.leading([7, 8]) == 1 and tier.leading([1, 2]) == 2


def test_a_blocks_name_is_of_all_before_it():
    a, b = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert prompt_blocks(a + b)[0] == prompt_blocks(a)[0]
    assert prompt_blocks(a + b)[1] != prompt_blocks(b + b)[1]
    assert prompt_blocks(b"a" * (BLOCK_BYTES - 1)) == []


def turn(tokens, key="s"):
    return turn_of(0.0, tokens, 5, stream_ids(key_of(key), 0, 40), 64)


def test_prompts_share_their_beginning_as_far_as_their_blocks():
    short, long = prompt_of(turn(200), 64), prompt_of(turn(500), 64)
    assert (len(short), len(long)) == (800, 2000)
    assert long[: 3 * BLOCK_BYTES] == short[: 3 * BLOCK_BYTES]
    assert prompt_of(turn(200, "other"), 64)[:BLOCK_BYTES] != short[:BLOCK_BYTES]


def test_a_file_of_servers_is_read_and_a_bad_one_is_refused(tmp_path):
    file = tmp_path / "route.yaml"
    file.write_text("backends: [{url: http://a:8000, profile: h100-pcie5}]\nblock_tokens: 32\n")
    assert _checked(file)["block_tokens"] == 32
    file.write_text("backends: [{url: http://a:8000, profile: h1000}]\n")
    with pytest.raises(SettingsError, match=r"backends\.0\.profile"):
        _checked(file)


@pytest.fixture
async def server():
    engine = EmulatedEngine(FAST, device_blocks=100, host_blocks=1000, seed=0)
    async with TestClient(TestServer(make_server(engine, "b", tells_metrics=True))) as client:
        yield client


async def answer(client, prompt, **body):
    given = {"prompt": prompt, "max_tokens": 3, **body}
    response = await client.post("/v1/completions", json=given)
    return response.headers.get("x-backend"), await response.text()


async def test_a_server_says_how_much_of_a_prompt_it_found(server):
    prompt = prompt_of(turn(500), 64)
    for cached in (0, 448):
        usage = json.loads((await answer(server, prompt))[1])["usage"]
        assert usage["prompt_tokens"] == 500
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    await server.post("/reset")
    usage = json.loads((await answer(server, prompt))[1])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b'{"max_tokens": 1000000}',
     b'{"max_tokens": "x"}', b'{"max_tokens": 1e999}', b'{"messages": ' + b"[" * 20_000],
)  # fmt: skip
async def test_a_server_refuses_what_it_cannot_answer(server, body):
    answered = await server.post("/v1/completions", data=body)
    assert answered.status == 400
    assert (await answered.json())["error"]["type"] == "invalid_request_error"


async def test_a_stream_names_its_server_and_ends_as_openai_has_it(server):
    name, text = await answer(server, "hello", stream=True)
    events = [line[6:] for line in text.splitlines() if line]
    assert name == "b" and events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 3
    assert [json.loads(e)["choices"][0]["finish_reason"] for e in events[:3]] == [
        None,
        None,
        "length",
    ]


async def test_agents_wait_for_answers_and_send_what_is_wanted(server):
    turns = tuple(turn(100 + 64 * k) for k in range(4))
    workload = Workload("made up", 64, (SessionShape("s", turns),), "made up")
    load = RouteLoad(requests=10, agents=3, output=2, pause=0.0, most=10_000)
    records = await asyncio.wait_for(play(str(server.make_url("/")), load, workload, 0), 60)
    assert len(records) == 10 and not any(r.error for r in records)
    by_session = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    for session in by_session.values():
        for before, after in itertools.pairwise(session):
            assert after.sent_s >= before.ended_s


async def test_real_servers_get_ids_and_the_name_of_the_conversation(monkeypatch):
    bodies = []

    async def completions(request):
        bodies.append(await request.json())
        return web.json_response({"choices": [{"text": "x"}], "usage": {}})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    monkeypatch.setattr(route, "served_model", lambda url: "small")
    turns = tuple(turn(100 + 64 * k) for k in range(3))
    workload = Workload("made up", 64, (SessionShape("s", turns),), "made up")
    load = RouteLoad(requests=6, agents=1, output=2, pause=0.0, most=10_000, shrink=16)
    async with TestServer(app) as one:
        small = scaled(workload, 1 / 16)
        await asyncio.wait_for(play(str(one.make_url("/")), load, small, 0), 60)
    assert [len(body["prompt"]) for body in bodies[:3]] == [6, 10, 14]  # 100, 164, 228 over 16
    assert {body["model"] for body in bodies} == {"small"} and bodies[0]["ignore_eos"]
    assert [body["user"] for body in bodies[:3]] == [bodies[0]["user"]] * 3
    assert len({body["user"] for body in bodies}) == 2


async def test_open_loop_sends_each_once_and_times_first_tokens(server):
    load = ProxyLoad(rate=200.0, size=1000, output=4)
    records = await asyncio.wait_for(send(str(server.make_url("/")), 20, load), 60)
    assert [r.error for r in records] == [""] * 20 and all(ttft_s(r) > 0 for r in records)
    gone = await asyncio.wait_for(send("http://127.0.0.1:9", 2, load), 60)
    assert all(r.error and r.first_token_s is None for r in gone)
    found = losses([*records, *gone, RequestRecord("", 0, first_token_s=1.0, error="cut")], 3)
    assert (found["requests"], found["kills"]) == (23, 3)
    assert (found["lost_before_their_first_token"], found["lost_after_it"]) == (2, 1)


def row(arm, seed, p50, mean, p99, saved=None):
    made = {"arm": arm, "seed": seed, "p50": p50, "mean": mean, "p99": p99}
    if saved is not None:
        each = {name: {"saved_s": saved} for name in ("median", "mean", "p99")}
        made["estimated"] = {"ttft_s": each}
    return made


def test_estimates_are_held_against_what_turning_it_on_showed():
    rows = [row("round-robin", s, 2.0, 4.0, 8.0 + s, saved=1.5) for s in range(3)]
    rows += [row("on", s, 1.0, 2.0, 4.0) for s in range(3)]
    found = _summary(rows)["arms"]["round-robin"]
    assert found["p99"] == {"median": 9.0, "least": 8.0, "most": 10.0}
    assert found["on_over_it"]["p99"]["median"] == pytest.approx(4 / 9)
    assert found["estimate_over_truth"]["mean"]["median"] == pytest.approx(0.75)
    assert "on_over_it" not in _summary(rows)["arms"]["on"]


def test_each_size_of_bodies_is_sent_at_its_own_rate():
    assert loads_of("1e3,2e6", "100,2", 8) == [ProxyLoad(100, 1000, 8), ProxyLoad(2, 2_000_000, 8)]
    assert [load.rate for load in loads_of("1000,5000", "20", 8)] == [20, 20]


@pytest.mark.parametrize(("size", "rate"), [("100", "1"), ("1000", "1,2"), ("x", "1")])
def test_sizes_and_rates_that_do_not_fit_are_refused(size, rate):
    with pytest.raises(ValueError, match=r"--size|--rate"):
        loads_of(size, rate, 8)
