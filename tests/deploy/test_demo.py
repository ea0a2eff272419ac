"""`kappa demo` against a stand-in for a cluster, over real HTTP: output and exit codes."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from functools import partial

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from typer.testing import CliRunner

from kappa_deploy.cli import app as cli
from kappa_deploy.commands.demo import shortcomings, summary, title, to_dict, worth
from kappa_deploy.commands.demo_acts import Act
from kappa_loadtest.client import EndpointError
from kappa_loadtest.run_folder import RequestRecord
from kappa_loadtest.sessions import ChatSession, ChatTurn, chat_sessions, node_rows, replay
from kappa_workload.sessions import Session, Turn, demo_sessions_path, read_sessions

_PATIENCE_S = 30.0


class StandIn:
    """Answers like a cluster; the test says how it misbehaves."""

    def __init__(self):
        self.nodes, self.host_tokens, self.refuse, self.silent = ["pcie", "c2c"], 640, "", False
        self.rows, self.at_once = True, 1
        self.received, self.running, self.most_running, self.records = [], {}, 0, []
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/nodes")(self.node_rows)
        self.app.get("/v1/decisions")(self.decisions)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self):
        return {"object": "list", "data": [{"id": "m", "object": "model", "created": 0,
                                            "owned_by": "us"}]}  # fmt: skip

    async def node_rows(self):
        steps = 10 * len(self.received)
        rows = [
            {"node": name, "paced": True, "emulated_model": "llama-3.1-8b",
             "profile": {"link_name": "a link", "dilation": 30.0},
             "totals": {"steps_total": steps, "overruns_total": len(self.received)}}
            for name in ("pcie", "c2c")
        ]  # fmt: skip
        return {"nodes": rows} if self.rows else {}

    async def decisions(self, limit: int = 100):
        return {"decisions": self.records[-limit:]}

    async def chat(self, request: Request):
        body = await request.json()
        number = len(self.received)
        self.received.append(body)
        session = body["messages"][0]["content"]
        assert session not in self.running, "a session's turns overlap"
        if self.refuse and any(self.refuse in m["content"] for m in body["messages"]):
            return JSONResponse(
                {"error": {"message": "no", "type": "server_error", "param": None, "code": "x"}},
                503,
            )
        self.running[session] = True
        self.most_running = max(self.most_running, len(self.running))
        node, request_id = self.nodes[number % len(self.nodes)], f"id-{number}"
        split = {"device_tokens": 32, "cached_tokens": self.host_tokens, "new_tokens": 10}
        self.records.append({"request_id": request_id, "predicted": split, "actual": split})

        async def events():
            async with asyncio.timeout(_PATIENCE_S):
                while self.most_running < self.at_once:
                    await asyncio.sleep(0.01)
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            word = {"index": 0, "delta": {"content": "word"}, "finish_reason": "length"}
            for choice in [first] if self.silent else [first, word]:
                yield f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n"
            self.running.pop(session)
            yield "data: [DONE]\n\n"

        headers = {
            "x-request-id": request_id, "x-kappa-node": node, "x-kappa-paced": "true",
            "x-kappa-predicted-ttft-ms": "25.0", "x-kappa-ratio": "64.0", "x-kappa-crit": "16.8",
            "x-kappa-reason": "tie",
        }  # fmt: skip
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


@pytest.fixture
def cluster():
    stand_in = StandIn()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        stand_in.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(stand_in.app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + _PATIENCE_S
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield stand_in
        server.should_exit = True
        thread.join(_PATIENCE_S)


@pytest.fixture
def short(monkeypatch):
    """No pauses between turns."""
    chats = partial(chat_sessions, longest_pause_s=0.0)
    monkeypatch.setattr("kappa_deploy.commands.demo.chat_sessions", chats)


def demo(cluster, *options):
    return CliRunner().invoke(cli, ["demo", "--url", cluster.url, *options])


def test_a_good_run_exits_with_zero_and_is_called_paced(cluster, short):
    cluster.at_once = 3
    done = demo(cluster, "--sessions", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "PACED" in lines[0] and "30 s" in lines[0]
    assert sum("memory" in line and " 640 " in line for line in lines) == 18
    assert "Totals (paced)" in done.stdout
    assert cluster.most_running == 3, "sessions run at once"


def test_json_is_one_object_with_totals_and_requests(cluster, short):
    done = demo(cluster, "--sessions", "2", "--max-tokens", "5", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    totals = shown["totals"]
    assert totals["requests"] == len(shown["requests"]) == 12
    assert (totals["host_tokens"], totals["new_tokens"]) == (12 * 640, 120)
    assert totals["memory_bound_share"] == totals["split_as_predicted_share"] == 1.0
    assert totals["overrun_share"] == pytest.approx(0.1)
    assert totals["paced"] is True and shown["faults"] == []
    assert {body["max_tokens"] for body in cluster.received} == {5}
    assert all(row["ttft_s"] > 0 for row in shown["requests"])


FAULTS = {
    "an idle node": ({"nodes": ["c2c"]}, "no request went to pcie"),
    "an unused host tier": ({"host_tokens": 0}, "engine.device_blocks"),
    "a stream without tokens": ({"silent": True}, "without a token"),
    # What the first session's model answers to its second turn is in chats from the third on.
    "a refused request": (
        {"refuse": read_sessions(demo_sessions_path())[0].turns[1].output_text[:60]},
        "turn 3 failed: HTTP 503",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_demo_that_shows_nothing_fails_with_the_reason(name, cluster, short):
    behaviour, reason = FAULTS[name]
    vars(cluster).update(behaviour)
    done = demo(cluster, "--sessions", "2", "--json")
    assert done.exit_code == 1
    assert reason in done.stderr
    assert "turn 4" not in done.stderr, "a session ends at its first failure"
    assert any(reason in fault for fault in json.loads(done.stdout)["faults"])


def test_an_endpoint_that_does_not_answer_fails_the_demo(short):
    done = CliRunner().invoke(cli, ["demo", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "http://127.0.0.1:9" in done.stderr


def test_settings_of_a_cluster_that_is_not_started_are_refused():
    done = CliRunner().invoke(cli, ["demo", "--url", "http://x", "--policy", "ttft"])
    assert done.exit_code == 2


def test_each_turn_extends_the_one_before_and_copies_differ():
    recorded = read_sessions(demo_sessions_path())
    chats = chat_sessions(recorded, len(recorded) + 2)
    assert len({chat.name for chat in chats}) == len(chats)
    assert len({chat.turns[0].messages for chat in map(_frozen, chats)}) == len(chats)
    for chat in chats:
        for before, after in zip(chat.turns, chat.turns[1:], strict=False):
            assert after.messages[: len(before.messages)] == before.messages
            roles = [m["role"] for m in after.messages if m["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def _frozen(chat):
    turns = tuple(
        ChatTurn(tuple(json.dumps(m) for m in turn.messages), turn.pause_s) for turn in chat.turns
    )
    return ChatSession(chat.name, turns)


def test_pauses_are_the_recorded_ones_up_to_a_bound():
    turns = (Turn(0.0, "a", "b"), Turn(0.25, "a", "b"), Turn(90.0, "a", "b"))
    (chat,) = chat_sessions([Session("name", turns)], 1)
    assert [turn.pause_s for turn in chat.turns] == [0.0, 0.25, 1.0]


def test_totals_of_nothing_are_empty_not_an_error():
    rows = [{"node": "a", "paced": False, "totals": None}]
    failed = [RequestRecord("s", 1, error="connect", error_detail="gone")]
    totals = summary(failed, rows, rows)
    assert (totals["failed"], totals["host_tokens"], totals["overrun_share"]) == (1, 0, None)
    assert totals["ttft_error_median"] is None
    faults = shortcomings([to_dict(record) for record in failed], ["a"], totals)
    assert len(faults) == 3 and "failed: connect: gone" in faults[0]


def test_the_title_calls_only_paced_nodes_paced():
    row = {"node": "a", "paced": False, "profile": {"link_name": "memcpy"}}
    assert "PACED" not in title([row]) and "speed of this machine" in title([row])


async def test_an_endpoint_without_nodes_is_no_cluster_of_ours(cluster):
    cluster.rows = False
    with pytest.raises(EndpointError, match="not a kappa cluster"):
        await node_rows(cluster.url)


async def test_replay_raises_one_error_when_no_cluster_answers():
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9"):
        await replay("http://127.0.0.1:9", [], 1)


class Switched:
    """A cluster that can change its policy; policies: each with its first request's number."""

    def __init__(self, stand_in, settings):
        self.stand_in, self.settings, self.url = stand_in, settings, stand_in.url
        self.policies = [(0, "priced")]

    def use_policy(self, name):
        self.policies.append((len(self.stand_in.received), name))


@pytest.fixture
def started(cluster, monkeypatch):
    """What `kappa demo` starts instead of a cluster."""
    made = []

    @contextlib.contextmanager
    def running(settings):
        made.append(Switched(cluster, settings))
        yield made[-1]

    monkeypatch.setattr("kappa_deploy.commands.demo.running", running)
    monkeypatch.setattr("kappa_deploy.commands.demo.documents_act", lambda settings: SHORT)
    return made


def asked(name, text):
    return ChatSession(name, (ChatTurn(({"role": "user", "content": text},)),))


SHORT = Act([asked("read-0", "a document")], [asked("doc0-0", "why"), asked("fresh-1", "new")])


def test_demo_repeats_its_requests_under_all_other_policies(cluster, short, started):
    done = CliRunner().invoke(cli, ["demo", "--sessions", "2", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    others = ("ray_prefix", "llm_d", "round_robin")
    first = [(12 * at, name) for at, name in enumerate(("priced", *others))]
    # Of the second act a document that is read, and two requests.
    second = [(48 + 3 * at, name) for at, name in enumerate(("priced", *others))]
    assert started[0].policies == first + second
    # Sessions run at once, so that requests of one run may come in another order.
    runs = [cluster.received[at : at + 12] for at, _ in first]
    ours, *theirs = [sorted(json.dumps(body["messages"]) for body in run) for run in runs]
    for name, run in zip(others, theirs, strict=True):
        assert sorted(text.replace(f"{name}: ", "", 1) for text in run) == ours
        assert all(text.count(f"{name}: ") == 1 for text in run), "nothing cached may be found"
    named = ["this", "prefix affinity (Ray Serve LLM's)", "llm-d's rule", "round robin"]
    assert [row["policy"] for row in shown["compared"]] == named
    act = shown["second_act"]
    assert [(row["policy"], row["answered"]) for row in act["compared"]] == [(n, 2) for n in named]
    assert act["memory_bound_share"] == 1.0 and act["requests_per_node"] == {"c2c": 1, "pcie": 1}
    assert act["gained"].startswith("Documents: ") and "100.0%" in act["gained"]
    assert all(row["answered"] == 12 for row in shown["compared"])
    assert all(0 < row["p50_s"] <= row["p99_s"] for row in shown["compared"])


@pytest.mark.parametrize("options", [["--no-compare"], ["--config"]])
def test_demo_compares_nothing_when_told_so_or_recording(
    cluster, short, started, options, tmp_path
):
    if options == ["--config"]:
        file = tmp_path / "cluster.yaml"
        file.write_text(f"router: {{record: {tmp_path}/log}}\n")
        options = ["--config", str(file)]
    done = CliRunner().invoke(cli, ["demo", "--sessions", "2", *options])
    assert done.exit_code == 0, done.output
    assert started[0].policies == [(0, "priced")] and "worth" not in done.stdout


def test_demo_has_nodes_of_silicon_and_says_what_was_gained(cluster, short, started):
    done = CliRunner().invoke(cli, ["demo", "--sessions", "2"])
    assert done.exit_code == 0, done.output
    tables = [pool.silicon for pool in started[0].settings.all_pools]
    assert tables == ["a100_sxm/llama-3.1-8b/tp1", "h100_sxm/llama-3.1-8b/tp1"]
    *_, agents, documents = done.stdout.splitlines()
    assert agents.startswith("Agents: ") and documents.startswith("Documents: ")


def test_demo_cuts_off_a_policy_that_does_not_end_and_shows_rows(
    cluster, short, started, monkeypatch
):
    monkeypatch.setattr("kappa_deploy.commands.demo._COMPARED_S", 0.0)
    done = CliRunner().invoke(cli, ["demo", "--sessions", "2"])
    assert done.exit_code == 0, done.output
    table = done.stdout.partition("What the choice was worth")[2]
    assert "round robin" in table and "first token within 15 s" in " ".join(table.split())
    assert table.count(" 12 ") == 1, "ours alone was answered"


def test_what_a_choice_is_worth_by_hand():
    def record(sent_s, ttft_s, ended_s, error=""):
        first_s = None if error else sent_s + ttft_s
        return RequestRecord("s", 1, sent_s=sent_s, first_token_s=first_s, ended_s=ended_s,
                             error=error)  # fmt: skip

    records = [record(10, 1, 12), record(10, 3, 14), record(12, 9, 30), record(11, 0, 11, "cut")]
    assert worth("x", records, 5.0)._asdict() == {
        # Two of three in time, in the 20 s from the first sent to the last ended.
        "policy": "x", "answered": 3, "p50_s": 3.0, "p99_s": 9.0, "goodput_rps": 0.1,
    }  # fmt: skip
    assert worth("x", records[3:], 5.0).p99_s is None
