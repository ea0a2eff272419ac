"""`kappa bench faithful`: what counts as the same decision, and who hears of what."""

import io
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.baselines.routing.catalogue import BASELINES
from benchmarks.baselines.routing.catalogue import baseline_named as made
from benchmarks.routing.peers import faithful, routers
from benchmarks.routing.peers.faithful import NOT_COMPARED, PEERS, Shadowed, compared
from kappa.shapes import model_shape
from simulator.clusters import cluster_named
from simulator.run import SimulationConfig, simulate
from tests.benchmarks.baselines.prompts import offer
from workload.catalogue import workload_named


def test_of_equal_costs_either_worker_will_do():
    estimates = offer([0, 0, 0], "abcd", cached_tokens=[32, 32, 0])
    mine = made("dynamo", seed=1)
    assert {compared(mine, estimates, 0, [])[0] for _ in range(20)} == {"equal", "level"}
    assert compared(mine, estimates, 2, []) == ("differs", "least_cost")


def test_a_queue_as_long_is_level_only_among_those_that_the_rule_leaves():
    tiers = made("dynamo_two_tier")
    device = {"device_tokens": [0, 64, 64]}
    assert compared(tiers, offer([2, 2, 2], "abcd", **device), 1, [])[0] == "equal"
    assert compared(tiers, offer([2, 2, 2], "abcd", **device), 2, [])[0] == "level"
    assert compared(tiers, offer([2, 2, 2], "abcd", **device), 0, [])[0] == "differs"
    assert compared(tiers, offer([2, 2, 3], "abcd", **device), 2, [])[0] == "differs"
    history = made("sglang_cache_aware")
    assert compared(history, offer([1, 1], "abcd"), 1, [])[0] == "level"
    history.routed(offer([1, 1], "abcd"), 0)
    assert compared(history, offer([1, 1], "abcd"), 1, [])[0] == "differs"


def test_the_same_draw_of_two_is_asked_for():
    two = made("power_of_two")
    estimates = offer([3, 1, 2, 0], "abcd")
    # Of the pair (0, 2) the shorter queue is 2's, though 3's is the shortest.
    assert compared(two, estimates, 2, [0, 2])[0] == "equal"
    assert compared(two, estimates, 0, [2, 0])[0] == "differs"
    assert compared(two, offer([1, 1, 0], "a"), 1, [1, 0])[0] == "equal"
    assert compared(two, offer([1, 1, 0], "a"), 0, [1, 0])[0] == "level"


class InProcess:
    """A real router's process that goes through given nodes, and keeps what it was sent."""

    def __init__(self, steps):
        self.steps, self.messages = steps, []

    def __call__(self, message):
        self.messages.append(message)
        return {"worker": f"h100-{next(self.steps)}"} if message["op"] == "route" else {}


def simulated(policy, requests=40):
    return simulate(
        SimulationConfig(
            cluster=cluster_named("small"), workload=workload_named("azure"),
            shape=model_shape("llama-3.1-8b"), load=0.3, requests=requests, policy=policy,
        )
    )  # fmt: skip


def test_the_real_one_steers_and_hears_of_first_tokens_and_ends():
    ask = InProcess(iter([0, 1, 2] * 40))
    policy = Shadowed(made("round_robin"), ask)
    outcome = simulated(policy)
    # The GH200 is the first of the four, and gets nothing.
    assert outcome.records.node.tolist() == ([1, 2, 3] * 14)[:40]
    # In turns of four and of three, the last three of every twelve agree.
    assert (policy.counts["equal"], policy.counts.total()) == (9, 40)
    assert policy.differences == {"next_in_turn": 31}
    for op in ("route", "first", "done"):
        names = [m["request"] for m in ask.messages if m["op"] == op]
        assert sorted(names) == sorted(f"r{k}" for k in range(1, 41)), op
    route = next(m for m in ask.messages if m["op"] == "route")
    assert len(route["held"]) == 4 and len(route["blocks"]) == route["tokens"] // 512


GATEWAY = """
import sys
from aiohttp import ClientSession, web
urls = sys.argv[sys.argv.index("--worker-urls") + 1 : sys.argv.index("--host")]
async def answer(request):
    if request.method == "GET":
        return web.Response()
    async with ClientSession() as http:
        async def ask(url):
            async with http.post(url, data=await request.read(), headers=request.headers) as found:
                return await found.json()
        ids = (await ask(urls[0] + "/v1/completions/render"))[0]["token_ids"]
        return web.json_response(await ask(urls[len(ids) % 2] + "/v1/completions"))
app = web.Application()
app.router.add_route("*", "/{path:.*}", answer)
web.run_app(app, port=int(sys.argv[sys.argv.index("--port") + 1]))
"""


async def test_a_gateway_that_asks_workers_for_a_prompts_tokens_gets_them(tmp_path):
    (tmp_path / "vllm_router").mkdir()
    (tmp_path / "vllm_router" / "launch_router.py").write_text(GATEWAY)
    script = Path(routers.__file__).with_name("scripts") / "gateway_router.py"
    command = ["env", f"PYTHONPATH={tmp_path}", sys.executable, str(script)]
    hello = {"nodes": [{"name": "even"}, {"name": "odd"}], "package": "vllm_router",
             "options": [], "block_tokens": 16}  # fmt: skip
    async with routers.started("gateway", command, hello) as process:
        for tokens, worker in ((32, "even"), (33, "odd")):
            route = {"op": "route", "request": f"r{tokens}", "tokens": tokens, "blocks": [1, 2]}
            assert (await process.ask(route))["worker"] == worker
            await process.ask({"op": "done", "request": f"r{tokens}"})


def test_every_baseline_is_compared_or_it_is_said_why_not():
    compared_ones = {spec.partition(":")[0] for spec in PEERS}
    excused = {name for names in NOT_COMPARED for name in names.split(", ")}
    assert compared_ones | excused == set(BASELINES)
    assert not compared_ones & excused
    for spec in PEERS:
        made(spec)


def test_an_unknown_policy_is_refused_with_those_that_have_a_real_one():
    app = typer.Typer()
    app.command()(faithful.faithful)
    answer = CliRunner().invoke(app, ["--policies", "llm_d"])
    assert answer.exit_code == 2
    assert "no 'llm_d'; choose some of dynamo" in " ".join(answer.output.split())


def test_a_peer_that_could_not_be_run_is_shown_with_the_reason():
    rows = [{"policy": "dynamo", "peer": "SelectionService", "error": "no index to be reached"}]
    text = io.StringIO()
    facts = {"rows": rows, "not_compared": {"aibrix": "in Go"}}
    faithful.show(facts, Console(file=text, width=200))
    assert "no index to be reached" in text.getvalue()
    assert "not compared: aibrix: in Go" in text.getvalue()


@pytest.mark.parametrize(("share", "status"), [(0.95, 0), (0.949, 1)])
def test_the_command_fails_below_its_goal(monkeypatch, share, status):
    async def row_of(spec, config):
        ttft = {"p50": 0.1, "p99": 0.2, "met": 1.0}
        return {
            "policy": spec, "peer": "p", "version": "1", "decisions": 20, "equal": 19, "level": 0,
            "share": share, "differences": {}, "real": ttft, "reimplemented": ttft,
        }  # fmt: skip

    monkeypatch.setattr(faithful, "row_of", row_of)
    app = typer.Typer()
    app.command()(faithful.faithful)
    answer = CliRunner().invoke(app, ["--policies", "dynamo", "--trace", "azure"])
    assert answer.exit_code == status, answer.output
