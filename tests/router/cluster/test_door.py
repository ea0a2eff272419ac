"""Requests through a real Envoy to workers on ports of their own, decided by the decider."""

import asyncio
import json
import signal
from functools import partial
from itertools import product

import httpx
import pytest

from kappa.protocol import ERROR_EVENT
from kappa.settings.routing import FailoverSettings, RouterSettings
from kappa_workers.paced.emulated_engine import WORD
from tests.router.cluster.conftest import MODEL, STEP_S, PortedNode, StoppableNode
from tests.router.patience import until

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"
SAID = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def test_chat_is_answered_by_a_worker(cluster):
    async with cluster(PortedNode("a"), PortedNode("b")) as here:
        answer = await here.http.post(CHAT, json=SAID, headers={"x-request-id": "mine"})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 4
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kappa-node"] in ("a", "b")
        assert "x-kappa-predicted-ttft-ms" in answer.headers
        assert not [name for name in answer.headers if name.startswith(("x-kappa-to-", "x-envoy"))]
        await until(lambda: here.live.records["mine"].end == "done")
        record = here.live.records["mine"]
        await until(lambda: record.admitted is not None)
        assert not here.live.router.flights
        account = (await here.http.get("/v1/decisions/mine")).json()
        assert account["end"] == "done" and account["timeline"]["status"] == 200


async def test_messages_and_responses_are_answered_by_the_worker(cluster):
    bodies = {
        "/v1/messages": {"messages": SAID["messages"], "max_tokens": 4},
        "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    }
    # On a busy machine engines that should take microseconds are late: admission would refuse.
    router = RouterSettings(index_blocks=10_000, stale_after_s=1e9, admission=False)
    async with cluster(PortedNode("a"), router=router) as here:
        for path, stream in product(bodies, (False, True)):
            given = {"model": MODEL, "stream": stream, **bodies[path]}
            mine = f"{path[4:]}-{stream}"
            answer = await here.http.post(path, json=given, headers={"x-request-id": mine})
            assert answer.status_code == 200 and WORD * (1 if stream else 4) in answer.text
            assert answer.headers["content-type"].startswith("text/event-stream") == stream
            record = here.live.records[mine]
            await until(lambda record=record: record.generated_tokens == 4)
            refused = await here.http.post(path, json={**given, "temperature": 9})
            assert refused.status_code == 400


async def test_gateways_headers_are_read_before_a_worker_is_chosen(cluster):
    fairness = {"x-gateway-inference-fairness-id": "somebody"}
    async with cluster(PortedNode("a")) as here:
        headers = {"x-slo-ttft-ms": "30000", "x-request-id": "mine", **fairness}
        answer = await here.http.post(CHAT, json=SAID, headers=headers)
        assert answer.status_code == 200, "without keys there is one tenant"
        for path, body in ((CHAT, SAID), ("/v1/route", SAID)):
            answer = await here.http.post(path, json=body, headers={"x-slo-ttft-ms": "-1"})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "x-slo-ttft-ms"


OWN_PATHS = (
    "/v1/models", f"/v1/models/{MODEL}", "/v1/nodes", "/ready", "/metrics", "/v1/decisions",
    "/v1/tenants", "/",
)  # fmt: skip


async def test_own_paths_are_answered_and_others_are_refused(cluster):
    async with cluster(PortedNode("a")) as here:
        for path in OWN_PATHS:
            answer = await here.http.get(path)
            assert answer.status_code == 200, answer.text
        answer = await here.http.get(CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        for path, changes, status, code in (
            ("/v1/nowhere", {}, 404, "not_found"),
            ("/v1/chat/completions/", {}, 404, "not_found"),
            ("/health", {}, 404, "not_found"),
            ("/v1/embeddings", {}, 404, "not_served"),
            ("/v1/audio/transcriptions", {}, 404, "not_served"),
            (CHAT, {"model": "none"}, 404, "model_not_found"),
            (CHAT, {"kv_transfer_params": {"a": 1}}, 400, None),
            (CHAT, {"max_tokens": 1 << 20}, 400, None),
        ):
            answer = await here.http.post(path, json=SAID | changes)
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert code is None or error["code"] == code
        assert not here.live.router.flights


async def test_worker_that_went_costs_no_request(cluster):
    nodes = PortedNode("a"), PortedNode("b")
    async with cluster(*nodes) as here:
        # Only its port: the decider has not noticed yet.
        await nodes[0].shut()
        asked = [here.http.post(CHAT, json=SAID) for _ in range(6)]
        answers = await asyncio.gather(*asked)
        assert [one.status_code for one in answers] == [200] * 6
        await until(lambda: not here.live.router.flights)


async def test_decider_that_goes_cuts_no_stream(cluster):
    async with cluster(PortedNode("a")) as here:
        body = {**SAID, "stream": True, "max_tokens": 64}
        async with here.http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await here.restart()
            rest = [line async for line in lines]
        assert rest[-2:] in (["data: [DONE]", ""], ["", "data: [DONE]"])
        assert not [line for line in rest if line.startswith(ERROR_EVENT)]
        assert (await here.http.post(CHAT, json=SAID)).status_code == 200
        assert json.loads((await here.http.get("/ready")).text) == {"workers": 1}


# -- workers that hang ---------------------------------------------------------------------------

SOON = RouterSettings(
    index_blocks=10_000, max_queue=64, stale_after_s=3.0,
    failover=FailoverSettings(stall_after_s=1.0),
)  # fmt: skip
LONG = {**SAID, "max_tokens": 200, "stream": True, "ignore_eos": True}


async def streamed(http):
    """A long answer that has begun: its rest, to be awaited, and its node."""
    begun = asyncio.get_running_loop().create_future()

    async def read():
        lines = []
        try:
            async with http.stream("POST", CHAT, json=LONG) as answer:
                async for line in answer.aiter_lines():
                    if not begun.done():
                        begun.set_result(answer.headers["x-kappa-node"])
                    lines.append(line)
        except httpx.HTTPError:
            return [*lines, "cut"]
        return [line for line in lines if line]

    reading = asyncio.create_task(read())
    return reading, await begun


async def harmed(http, harm):
    """Four streams that began on both nodes before the harm: the node and the rest of each.
    Requests that come after it are served."""
    streams = [await streamed(http) for _ in range(4)]
    assert {node for _, node in streams} == {"a", "b"}
    harm()
    answers = await asyncio.gather(*(http.post(CHAT, json=SAID) for _ in range(8)))
    assert [one.status_code for one in answers] == [200] * 8
    return [(node, await reading) for reading, node in streams]


async def test_stopped_worker_loses_nothing_that_had_not_begun(cluster):
    stopped = StoppableNode("a", 4.0)
    async with cluster(stopped, PortedNode("b", STEP_S), router=SOON) as here:
        stop = partial(stopped.process.send_signal, signal.SIGSTOP)
        for node, rest in await harmed(here.http, stop):
            assert rest[-1] == ("cut" if node == "a" else "data: [DONE]")
        assert await stopped.process.wait() == -signal.SIGKILL
        await until(lambda: not here.live.router.flights)


async def test_hung_engine_loses_nothing_that_had_not_begun(cluster, tmp_path, monkeypatch):
    faults = tmp_path / "faults.json"
    monkeypatch.setenv("KAPPA_EMULATED_FAULTS", str(faults))
    async with cluster(PortedNode("a", STEP_S), PortedNode("b", STEP_S), router=SOON) as here:
        hangs = '{"a": {"hangs": true}}'
        for node, rest in await harmed(here.http, lambda: faults.write_text(hangs)):
            told = any(line.startswith(ERROR_EVENT) for line in rest)
            assert rest[-1] == "data: [DONE]" and told == (node == "a")
        faults.unlink()
        await until(lambda: not here.live.router.flights)
