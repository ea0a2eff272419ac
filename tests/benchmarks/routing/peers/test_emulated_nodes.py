"""Emulated nodes behind real sockets, and our router before them, as the bench runs them."""

import asyncio
import json
import sys

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from benchmarks.routing.peers.emulated_node import scaled_memory
from benchmarks.routing.peers.play import Asked, Player, Proxy
from benchmarks.routing.peers.sidecar import Sidecar, SidecarError
from benchmarks.routing.peers.traffic import Cut, arrivals
from benchmarks.routing.peers.wire import NODE_HEADER, SHAPE_KEY, block_tokens, prompt_text
from kappa.shapes import model_shape
from simulator.clusters import cluster_named, kv_room
from workload.catalogue import workload_named

BLOCK = 64
HELLO = {
    "cluster": "small",
    "model": "llama-3.1-8b",
    "dilation": 1.0,
    "noise": 0.0,
    "seed": 1,
    "block_tokens": BLOCK,
    "scale": 4,
}
SERVE = [sys.executable, "-m", "benchmarks.routing.peers.emulated_nodes"]
START_S = 60.0


@pytest.fixture
async def nodes():
    helper = await Sidecar.started("nodes", SERVE, HELLO, START_S)
    yield helper
    await helper.close()


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=30.0) as made:
        yield made


def body(request, blocks, output=3):
    return {
        "model": "m",
        "prompt": prompt_text(blocks, request),
        "max_tokens": output,
        "stream": True,
        SHAPE_KEY: {"request": request, "tokens": BLOCK * len(blocks) + 5, "kept": []},
    }


def events(answer):
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


async def test_an_answer_is_streamed_and_says_everywhere_that_it_is_emulated(nodes, client):
    row = nodes.ready["nodes"][0]
    answer = await client.post(f"{row['url']}/v1/completions", json=body("r", [11, 12]))
    assert answer.headers[NODE_HEADER] == row["name"] == "gh200-0"
    assert answer.headers["x-kappa-emulated"] == "true"
    *chunks, last = events(answer)
    assert last == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text.split() == ["emulated"] * 3
    assert all("emulated" in c["model"] and "emulated" in c["system_fingerprint"] for c in chunks)
    models = (await client.get(f"{row['url']}/v1/models")).json()
    assert "emulated" in models["data"][0]["id"]
    assert (await client.get(f"{row['url']}/health")).json()["emulated"] is True


async def test_blocks_are_published_as_an_engine_would_and_found_again(nodes, client):
    row = nodes.ready["nodes"][1]
    stream = zmq.asyncio.Context.instance().socket(zmq.SUB)
    stream.setsockopt(zmq.SUBSCRIBE, b"")
    stream.connect(row["events_endpoint"])
    try:
        await asyncio.sleep(0.3)
        for request in ("first", "second"):
            url = f"{row['url']}/v1/completions"
            assert (await client.post(url, json=body(request, [21, 22, 23]))).status_code == 200
        _, _, batch = await asyncio.wait_for(stream.recv_multipart(), 10.0)
    finally:
        stream.close(linger=0)
    (event,) = msgspec.msgpack.decode(batch)[1]
    assert (event["type"], event["medium"]) == ("BlockStored", "GPU")
    assert (event["block_hashes"], event["parent_block_hash"]) == ([21, 22, 23], None)
    assert event["token_ids"][BLOCK : 2 * BLOCK] == block_tokens(22, BLOCK)
    totals = (await nodes.ask({"op": "totals"}))["nodes"][row["name"]]
    assert totals["device_tokens"] == 3 * BLOCK
    assert totals["prompt_tokens"] == 2 * (3 * BLOCK + 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "hello"},
        {"max_tokens": 0},
        {SHAPE_KEY: {"request": "r", "tokens": 10**9, "kept": []}},
        {SHAPE_KEY: None},
    ],
)
async def test_what_cannot_be_served_is_refused_not_left_waiting(nodes, client, wrong):
    url = f"{nodes.ready['nodes'][0]['url']}/v1/completions"
    answer = await client.post(url, json={**body("r", [1]), **wrong})
    assert answer.status_code == 400
    assert "error" in answer.json()


@pytest.mark.parametrize("wrong", [{"cluster": "nowhere"}, {"model": "no-such-model"}])
async def test_what_does_not_exist_is_an_error_before_anything_is_served(wrong):
    with pytest.raises(SidecarError, match="no"):
        await Sidecar.started("nodes", SERVE, {**HELLO, **wrong}, START_S)


async def test_our_router_sends_a_prefix_back_to_where_it_is(nodes, client):
    rows = nodes.ready["nodes"]
    hello = {"nodes": rows, "block_tokens": BLOCK, "policy": "ttft", "seed": 1}
    ours = [sys.executable, "-m", "benchmarks.routing.peers.emulated_router"]
    router = await Sidecar.started("ours", ours, hello, START_S)
    blocks = list(range(100, 180))
    asked = {"op": "route", "session": "s", "blocks": blocks, "output_tokens": 3,
             "tokens": BLOCK * len(blocks) + 5}  # fmt: skip
    try:
        await asyncio.sleep(0.5)
        url = f"{rows[2]['url']}/v1/completions"
        assert (await client.post(url, json=body("r0", blocks))).status_code == 200
        for number in range(100):
            answer = await router.ask({**asked, "request": f"r{number}"})
            router.tell({"op": "done", "request": f"r{number}", "output_tokens": 3})
            if answer["matched_tokens"]:
                break
            await asyncio.sleep(0.05)
        assert answer["worker"] == rows[2]["name"]
        assert answer["matched_tokens"] == BLOCK * len(blocks)
    finally:
        await router.close()


async def test_an_unknown_policy_is_an_error(nodes):
    hello = {"nodes": nodes.ready["nodes"], "block_tokens": BLOCK, "policy": "luck", "seed": 1}
    with pytest.raises(SidecarError, match="luck"):
        ours = [sys.executable, "-m", "benchmarks.routing.peers.emulated_router"]
        await Sidecar.started("ours", ours, hello, START_S)


async def test_a_run_is_played_to_its_end(nodes, client):
    """Every request that was sent has an outcome, and behind a proxy the node is known too."""
    work = Cut(turns=2, pause=0.0, scale=64).apply(workload_named("narrativeqa"))
    work_nodes = await Sidecar.started(
        "nodes", SERVE, {**HELLO, "block_tokens": work.block_tokens, "scale": 64}, START_S
    )
    try:
        row = work_nodes.ready["nodes"][0]
        player = Player(client, Proxy(row["url"]), 1.0)
        await player.play(arrivals(work, 20.0, 1.0, 1), 1.0, 30.0)
    finally:
        await work_nodes.close()
    assert player.outcomes
    assert not [o.error for o in player.outcomes if o.error]
    assert {o.node for o in player.outcomes} == {row["name"]}
    assert all(0 < o.ttft_s <= o.e2e_s for o in player.outcomes)


async def test_a_node_that_refuses_or_is_gone_is_an_outcome_not_a_crash(nodes, client):
    work = Cut(turns=1, pause=0.0, scale=64).apply(workload_named("narrativeqa"))
    for url, why in (("http://127.0.0.1:9", "ConnectError"), (f"{nodes.ready['nodes'][0]['url']}/x",
                                                               "status 404")):  # fmt: skip
        player = Player(client, Proxy(url), 1.0)
        await player.play(arrivals(work, 20.0, 0.5, 1), 0.5, 10.0)
        assert player.outcomes and all(o.error.startswith(why) for o in player.outcomes)


async def test_a_router_that_dies_ends_the_run_with_its_reason(nodes, client, tmp_path):
    path = tmp_path / "dies.py"
    path.write_text("print('{\"ready\": true}', flush=True)\nraise SystemExit('out of luck')")
    router = await Sidecar.started("dies", [sys.executable, str(path)], {}, START_S)
    urls = {row["name"]: row["url"] for row in nodes.ready["nodes"]}
    work = Cut(turns=1, pause=0.0, scale=64).apply(workload_named("narrativeqa"))
    player = Player(client, Asked(router, urls), 1.0)
    try:
        with pytest.raises(SidecarError, match="out of luck"):
            await player.play(arrivals(work, 20.0, 0.5, 1), 0.5, 10.0)
    finally:
        await router.close()


@pytest.mark.parametrize("scale", [1, 4])
def test_memory_shrinks_with_the_prompts_so_that_blocks_stay_as_many(scale):
    shape = model_shape("llama-3.1-8b")
    for spec in cluster_named("small").nodes:
        whole = kv_room(spec, shape, 256)
        part = kv_room(scaled_memory(spec, shape, scale), shape, 256 // scale)
        assert part.device_blocks == pytest.approx(whole.device_blocks, abs=1)
        assert part.host_blocks == whole.host_blocks


@pytest.mark.parametrize(
    "module",
    ["benchmarks.routing.peers.emulated_nodes", "benchmarks.routing.peers.emulated_router"],
)
async def test_without_a_bench_there_is_no_helper(nodes, module):
    """Standard input ends with the bench, however the bench ends; then they end by themselves."""
    ours = {"nodes": nodes.ready["nodes"], "block_tokens": BLOCK, "policy": "ttft", "seed": 1}
    helper = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert helper.stdin is not None and helper.stdout is not None
    try:
        hello = HELLO if module.endswith("nodes") else ours
        helper.stdin.write(json.dumps(hello).encode() + b"\n")
        assert json.loads(await asyncio.wait_for(helper.stdout.readline(), START_S))["ready"]
        helper.stdin.close()
        assert await asyncio.wait_for(helper.wait(), START_S) == 0
    finally:
        if helper.returncode is None:
            helper.kill()
            await helper.wait()
