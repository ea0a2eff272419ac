"""`kappa bench peers`: nodes on the wall clock, routers in processes of their own, and the rows."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import typer
import zmq
import zmq.asyncio
from typer.testing import CliRunner

from benchmarks.routing.peers import peers as module
from benchmarks.routing.peers import wire
from benchmarks.routing.peers.nodes import EmulatedNode, PacedLoop, scaled_memory
from benchmarks.routing.peers.play import (
    Cut,
    Outcome,
    against,
    arrivals,
    repeat_row,
    router_row,
)
from benchmarks.routing.peers.routers import PeerError, started
from kappa.shapes import model_shape
from simulator.clusters import cluster_named, kv_room
from workload.shapes import SessionShape, TurnShape, Workload

BLOCK = 64
SHAPE = model_shape("llama-3.1-8b")
WIRE = Path(wire.__file__).parent
ROOT = WIRE.parents[2]


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_a_prompts_tokens_are_those_of_its_blocks_and_a_rest(size):
    blocks = [0xFFFF_FFFF_FFFF_FFFF, 1, 0x0123_4567_89AB_CDEF]
    tokens = wire.prompt_tokens(blocks, size, 3 * size + 5)
    assert len(tokens) == 3 * size + 5 and all(0 <= token < 1 << 16 for token in tokens)
    assert tokens[size : 2 * size] == wire.block_tokens(1, size)
    assert len({tuple(wire.block_tokens(block, 16)) for block in blocks}) == 3


def test_prompts_share_as_much_text_as_they_share_blocks():
    one, other = wire.prompt_text([1, 2, 7], "a"), wire.prompt_text([1, 2, 8], "b")
    shared = f"{1:016x} {2:016x} {0:015x}"
    assert one.startswith(shared) and other.startswith(shared)


def test_another_interpreter_can_import_the_lines_alone():
    program = (
        f"import sys; sys.path.append({str(WIRE)!r}); import wire; print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# -- processes ----------------------------------------------------------------------------------

ECHO = f"""
import asyncio, os, sys
sys.path.append({str(WIRE)!r})
from wire import serve

async def make(hello):
    if "of" not in hello:
        raise ValueError("no hello")
    async def handle(message):
        if message["op"] == "fail":
            raise ValueError("no such luck")
        if message["op"] == "die":
            os.write(2, b"a last word\\n")
            os._exit(3)
        return {{"what": message["what"]}}
    print("noise on stdout", flush=True)
    return handle

asyncio.run(serve(make))
"""
COMMAND = [sys.executable, "-c", ECHO]


async def test_a_process_answers_each_question_and_ends():
    async with started("echo", COMMAND, {"of": 1}) as helper:
        answers = await asyncio.gather(*(helper.ask({"op": "say", "what": n}) for n in range(20)))
        assert [answer["what"] for answer in answers] == list(range(20))
        with pytest.raises(PeerError, match="echo: ValueError: no such luck"):
            await helper.ask({"op": "fail"})
        with pytest.raises(PeerError, match="it has ended: a last word"):
            await helper.ask({"op": "die"})
        with pytest.raises(PeerError, match="ended"):
            await helper.ask({"op": "say", "what": 1})
    assert not psutil.pid_exists(helper.pid)


@pytest.mark.parametrize(
    ("command", "hello", "why"),
    [
        (COMMAND, {}, "no hello"),
        ([sys.executable, "-c", "import sys; sys.exit('no wheel')"], {}, "no wheel"),
        (["/nowhere/nothing"], {}, "nothing"),
    ],
)
async def test_a_process_that_does_not_start_is_an_error(command, hello, why):
    with pytest.raises(PeerError, match=why):
        async with started("s", command, hello):
            pass


def test_processes_end_when_the_bench_is_killed():
    program = f"""
import asyncio
from benchmarks.routing.peers.routers import started
async def main():
    async with started("echo", {COMMAND!r}, {{"of": 1}}) as helper:
        print(helper.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    bench = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pid = int(bench.stdout.readline())
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# -- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [1.0, 3.0])
async def test_events_happen_in_order_at_their_own_time(dilation):
    loop, seen = PacedLoop(dilation), []
    for at_s in (0.03, 0.01, 0.02):
        loop.at(at_s, lambda name: seen.append((name, loop.now_s)), at_s)
    driver = asyncio.create_task(loop.drive())
    while loop.pending:
        await asyncio.sleep(0.002)
    driver.cancel()
    assert seen == [(0.01, 0.01), (0.02, 0.02), (0.03, 0.03)]
    assert len(loop.late_s) == 3 and min(loop.late_s) >= 0


async def test_a_handler_that_fails_ends_the_loop():
    loop = PacedLoop(1.0)
    loop.at(0.0, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(loop.drive(), 10.0)


async def test_blocks_are_published_as_an_engine_would_and_found_again():
    loop = PacedLoop(1.0)
    spec = scaled_memory(cluster_named("small").nodes[1], SHAPE, 4)
    node = EmulatedNode(spec, SHAPE, BLOCK, ((1, 0), 0.0), loop)
    driver, ids = asyncio.create_task(loop.drive()), np.array([21, 22, 23], dtype=np.uint64)
    stream = zmq.asyncio.Context.instance().socket(zmq.SUB)
    stream.setsockopt(zmq.SUBSCRIBE, b"")
    stream.connect(node.events_endpoint)
    try:
        await asyncio.sleep(0.3)
        for request in ("first", "second"):
            ticket = node.submit(request, TurnShape(0.0, 3 * BLOCK + 5, 3, ids, ids))
            await asyncio.wait_for(ticket.done.wait(), 30.0)
            assert 0 < ticket.first_s < ticket.done_s
        _, _, batch = await asyncio.wait_for(stream.recv_multipart(), 10.0)
        with pytest.raises(ValueError, match="never fit"):
            node.submit("large", TurnShape(0.0, 10**9, 1, ids[:0], ids[:0]))
    finally:
        driver.cancel()
        stream.close(linger=0)
        node.close()
    (event,) = msgspec.msgpack.decode(batch)[1]
    assert (event["type"], event["medium"]) == ("BlockStored", "GPU")
    assert (event["block_hashes"], event["parent_block_hash"]) == ([21, 22, 23], None)
    assert event["token_ids"][BLOCK : 2 * BLOCK] == wire.block_tokens(22, BLOCK)
    assert node.totals["device_tokens"] == 3 * BLOCK
    assert node.totals["prompt_tokens"] == 2 * (3 * BLOCK + 5)


def test_memory_is_scaled_as_prompts_are():
    spec = cluster_named("small").nodes[0]
    whole = kv_room(spec, SHAPE, BLOCK)
    part = kv_room(scaled_memory(spec, SHAPE, 4), SHAPE, BLOCK)
    assert part.device_blocks == pytest.approx(whole.device_blocks / 4, abs=2)
    assert part.host_blocks == pytest.approx(whole.host_blocks / 4, abs=2)


# -- traffic and rows ----------------------------------------------------------------------------


def workload(count=40):
    def turn(tokens, after_s):
        ids = np.arange(1, 1 + (tokens + 5) // 16, dtype=np.uint64)
        return TurnShape(after_s, tokens, 5, ids[: tokens // 16], ids)

    turns = (turn(100, 0.0), turn(180, 4.0), turn(183, 4.0))
    return Workload("w", 16, tuple(SessionShape(str(i), turns) for i in range(count)), "made up")


def test_a_seed_gives_the_same_sessions_at_the_given_rate():
    found = arrivals(workload(), 8.0, 2_000.0, 1)
    starts = [[at_s for at_s, _ in arrivals(workload(), 8.0, 2_000.0, seed)] for seed in (1, 1, 2)]
    assert [at_s for at_s, _ in found] == starts[0] == starts[1] != starts[2]
    assert sum(len(one.turns) for _, one in found) / 2_000.0 == pytest.approx(8.0, rel=0.05)


def test_a_cut_keeps_the_blocks_and_scales_the_rest():
    cut = Cut(turns=2, pause=0.25, scale=4).apply(workload())
    assert cut.block_tokens == 4
    for session in cut.sessions:
        assert [turn.input_tokens for turn in session.turns] == [25, 45]
        assert [turn.after_s for turn in session.turns] == [0.0, 1.0]
        assert all(turn.input_tokens // 4 == len(turn.blocks) for turn in session.turns)
    with pytest.raises(ValueError, match="does not divide"):
        Cut(scale=3).apply(workload())


TOTALS = {
    "a": {"prompt_tokens": 300, "device_tokens": 100, "host_tokens": 0},
    "b": {"prompt_tokens": 100, "device_tokens": 0, "host_tokens": 100},
}


def outcome(number, ttft_s, node="a", error=""):
    done = {} if error else {"ttft_s": ttft_s, "e2e_s": 2 * ttft_s, "route_s": 0.001}
    return Outcome(f"r{number}", float(number), node=node, error=error, **done)


def test_a_repeat_counts_shares_failures_and_hits():
    outcomes = [outcome(0, 1.0), outcome(1, 2.0, "b"), outcome(2, 3.0)]
    outcomes += [outcome(3, 0.0, error="unfinished"), outcome(4, 0.0, error="never fit: a")]
    row = repeat_row(outcomes, TOTALS)
    assert (row["requests"], row["completed"]) == (5, 3)
    assert row["failed"] == {"unfinished": 1, "never fit": 1}
    assert row["node_share"] == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert row["found"] == {"device": 0.25, "host": 0.25}
    assert (row["ttft_s"]["p50"], row["e2e_s"]["p50"]) == (2.0, 4.0)
    assert row["route_ms"] == pytest.approx(1.0)
    assert row["in_flight"] == pytest.approx((2 + 4 + 6) / 4)


def test_a_repeat_in_which_nothing_ended_has_no_figures():
    row = repeat_row([outcome(0, 0.0, error="unfinished")], TOTALS)
    assert "ttft_s" not in row and "ttft_s" not in router_row([row])


def test_routers_are_compared_repeat_by_repeat():
    def of(name, *ttft_s):
        repeats = [repeat_row([outcome(i, t) for i in range(3)], TOTALS) for t in ttft_s]
        return {"router": name, **router_row(repeats)}

    rows = [of("ours", 1.0, 2.0, 4.0), of("theirs", 2.0, 2.0, 2.0)]
    assert rows[0]["ttft_s"]["p50"] == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert (rows[0]["requests"], rows[0]["completed"]) == (9, 9)
    (ratio,) = against(rows, "ours")
    assert ratio["router"] == "theirs"
    assert ratio["p99"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    assert against(rows, "nobody") == []


# -- the bench -----------------------------------------------------------------------------------


async def test_our_router_serves_sessions_and_finds_their_prefixes():
    cut = Cut(4, 0.01, 4)
    setting = module.Setting("small", "llama-3.1-8b", 1.0, 0.0, 6.0, cut, "priced")
    found, capacity = setting.prepared("narrativeqa", 1)
    traffic = [(0.3 * at_s, one) for at_s, one in arrivals(found, 0.2 * capacity, 3.0, 1)]
    row = await module.run(module.OURS, traffic, setting, found.block_tokens, 1)
    assert row["completed"] == row["requests"] - sum(row["failed"].values()) > 0
    assert sum(row["node_share"].values()) == pytest.approx(1.0)
    assert row["found"]["device"] > 0.3


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command where Dynamo's environment cannot be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    app = typer.Typer()
    app.command()(module.peers)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nobody"], "unknown 'nobody': choose of kappa, dynamo"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--workload", "nothing"], "nothing"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--scale", "3"], "does not divide"),
        (["--dilation", "0.5"], "dilation"),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(run, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_router_that_cannot_run_is_listed_with_the_remedy(run):
    done = run("--only", "dynamo", "--seconds", "5", "--repeats", "1", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["rows"] == []
    (lost,) = result["not_run"]
    assert lost["router"] == "dynamo" and "PIP_INDEX_URL" in lost["why"]
    assert result["emulated"] is True and result["header"] == module.EMULATED
