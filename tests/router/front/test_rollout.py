"""Modes of `kappa route`: who steers, what the journal holds, and its report."""

import errno
import json
import math
import os

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kappa.settings.base import SettingsError
from kappa.settings.front import load_front_settings
from kappa_deploy.cli import app as kappa
from kappa_router.front.conversations import Conversations, opening_of
from kappa_router.live import record_file
from kappa_router.rollout_journal import read_journal
from tests.router.front.conftest import chat, fronted, routing
from tests.router.front.offering import FakeServer, serving

CHATS = "/v1/chat/completions"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def segments_of(path):
    return read_journal(path.read_text().splitlines(), str(path))


async def send(here, count, **headers):
    for k in range(count):
        body = chat(f"question {k} " * 40, stream=True, stream_options={"include_usage": True})
        async with here.http.post(CHATS, json=body, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()
        await here.settled()


async def test_shadow_lets_the_present_steer_and_records_ours(tmp_path):
    path, shadow = tmp_path / "j", {"mode": "shadow"}
    async with serving(FakeServer(), FakeServer()) as (one, two):
        async with routing(one, two, router=shadow, journal=str(path)) as here:
            await send(here, 6)
            async with here.http.get("/v1/journal") as answer:
                assert answer.status == 200
                assert all(json.loads(line) for line in (await answer.text()).splitlines())
        assert [len(one.seen), len(two.seen)] == [3, 3]
    (segment,) = segments_of(path)
    assert segment.mode == "shadow" and segment.present == "round-robin"
    assert sorted(segment.workers) == ["a", "b"] and len(segment.requests) == 6
    assert {r.steered for r in segment.requests} == {"present"}
    assert [r.worker for r in segment.requests].count("a") == 3
    first = segment.requests[0]
    assert first.output_tokens == 4 and len(first.blocks) and first.end_s >= first.arrival_s
    assert all(line["shadow"] for line in lines_of(path) if line["line"] == "request")


async def test_full_disk_ends_the_journal_and_no_request(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    given = {"router": {"mode": "shadow"}, "journal": str(tmp_path / "j")}
    with capture_logs() as logged:
        async with fronted(FakeServer(), **given) as (here, _):
            monkeypatch.setattr(record_file.os, "write", full)
            await send(here, 3)
            async with here.http.get("/metrics") as answer:
                assert answer.status == 200
            live = here.live
        assert [r.end for r in live.records.values()] == ["done"] * 3
    (ended,) = [line for line in logged if line["event"] == "record_ended"]
    assert "No space left" in ended["why"] and ended["path"] == given["journal"]
    assert (tmp_path / "j").read_bytes() == b""


async def test_canary_keeps_conversations_in_their_arms(tmp_path):
    path = tmp_path / "j"
    given = {"router": {"mode": "canary:50"}, "journal": str(path)}
    async with fronted(FakeServer(), FakeServer(), **given) as (here, _):
        for k in range(12):
            await send(here, 2, **{"x-session-id": f"talk {k}"})
    (segment,) = segments_of(path)
    arms = {}
    for request in segment.requests:
        arms.setdefault(request.conversation, set()).add(request.steered)
    assert len(arms) == 12 and all(len(each) == 1 for each in arms.values())
    assert set().union(*arms.values()) == {"kappa", "present"}


async def test_front_steers_and_writes_nothing_without_a_journal(tmp_path):
    async with fronted(FakeServer()) as (here, _):
        await send(here, 1)
        async with here.http.get("/v1/journal") as answer:
            assert (answer.status, await answer.text()) == (200, "")
        (record,) = here.live.records.values()
        assert record.steered == "kappa" and record.shadow is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"router": {"mode": "ray"}}, "give shadow"),
        ({"router": {"mode": "shadow"}}, "--journal FILE"),
        ({"router": {"mode": "half"}}, "canary:N"),
        ({"present": "random"}, "round-robin"),
        ({"present": "ftp://a"}, "no address of a server"),
    ],
)
def test_modes_that_cannot_be_are_refused(given, why):
    backends = [{"url": "http://a", "profile": "h100-pcie5"}]
    with pytest.raises(SettingsError, match=why):
        load_front_settings(None, backends=backends, **given)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"user": "u", "prompt": "a"}, {"user": "u", "prompt": "b"}, True),
        ({"prompt": "a" * 1024 + "x"}, {"prompt": "a" * 1024 + "y"}, True),
        ({"prompt": "a"}, {"prompt": "b"}, False),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}, False),
        (chat("a"), {"messages": [*chat("a")["messages"], {"role": "assistant"}]}, True),
        ({"messages": [{"role": "system"}, {"role": "user", "content": "a"}]},
         {"messages": [{"role": "system"}, {"role": "user", "content": "b"}]}, False),
    ],
)  # fmt: skip
def test_conversation_is_known_by_its_name_or_its_beginning(one, other, same):
    conversations = Conversations()
    names = [conversations.of(opening_of(body)) for body in (one, other)]
    assert all(names) and (names[0] == names[1]) == same


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("prompt", ["a" * 40, "b" * 500, "c" * 9000]),
        ("input", ["a" * 40, "b" * 500, "c" * 9000]),
        ("prompt", [[1] * 40, [2] * 90, [3]]),
    ],
)
def test_bare_prompt_that_grows_stays_one_conversation(key, words):
    conversations, prompt, names = Conversations(), words[0][:0], []
    for word in words:
        prompt = prompt + word
        names.append(conversations.of(opening_of({key: prompt})))
    assert len(set(names)) == 1
    assert conversations.of(opening_of({key: prompt[:8] + words[1] + words[0]})) != names[0]


def test_prompts_that_share_an_opening_are_two_conversations():
    conversations = Conversations()
    one, other = ("system " * 20 + end * 9 for end in ("x", "y"))
    names = [
        conversations.of(opening_of({"prompt": text})) for text in (one, other, one * 2, other * 2)
    ]
    assert names[0] == names[2] != names[1] == names[3]


@pytest.mark.parametrize("body", [{}, {"messages": 5}, {"prompt": None}, {"user": 3}])
def test_body_that_tells_no_conversation_has_none(body):
    assert Conversations().of(opening_of(body)) == ""


# -- a real balancer in front of the same servers --------------------------------------------------


class Balancer(FakeServer):
    """Answers itself, in the name of `named`."""

    named = ""

    async def _answer(self, request, body):
        answer = await super()._answer(request, body)
        if self.named and not answer.prepared:
            answer.headers["x-upstream"] = self.named
        return answer


async def via(tmp_path, named, **changes):
    """A request through a balancer: its line in the journal, and what it left."""
    path, balancer = tmp_path / "j", Balancer(**changes)
    async with serving(FakeServer(), FakeServer(), balancer) as (one, two, _):
        balancer.named = named.format(a=one.url, b=two.url.removeprefix("http://"))
        given = {
            "present": balancer.url, "present_header": "X-Upstream", "journal": str(path),
        }  # fmt: skip
        async with routing(one, two, router={"mode": "shadow"}, **given) as here:
            async with here.http.post(CHATS, json=chat("question " * 60)) as answer:
                await answer.read()
            await here.settled()
            assert not here.live.router.reservations and not one.seen and not two.seen
            held = {name: backend.sent._number for name, backend in here.backends.items()}
            breakers = here.live.members.blocked()
    assert len(balancer.seen) == 1 or balancer.status != 200
    (line,) = [line for line in lines_of(path) if line["line"] == "request"][-1:]
    return answer.status, line, held, breakers


@pytest.mark.parametrize(("named", "worker"), [("{a}", "a"), ("{b}", "b")])
async def test_balancer_header_says_where_a_request_went(tmp_path, named, worker):
    status, line, held, _ = await via(tmp_path, named)
    assert status == 200 and line["worker"] == worker == line["shadow"]["present_worker"]
    assert held == {"a": int(worker == "a"), "b": int(worker == "b")}
    assert line["steered"] == "present" and line["end"] == "done"


@pytest.mark.parametrize("named", ["", "10.9.9.9:1"])
async def test_server_is_guessed_when_a_balancer_names_none(tmp_path, named):
    status, line, _, _ = await via(tmp_path, named)
    assert status == 200 and line["worker"] in ("a", "b")


async def test_balancer_failure_is_no_servers_failure(tmp_path):
    status, line, _, breakers = await via(tmp_path, "", status=503)
    assert status == 503 and line["end"] == "unsent" and not breakers.failing


# -- the report ------------------------------------------------------------------------------------


def report(*args):
    return CliRunner().invoke(kappa, ["route", "report", *map(str, args)])


async def written(path, mode, requests=60):
    given = {"router": {"mode": mode}, "journal": str(path)}
    slow = FakeServer(ttft_s=0.02)
    async with fronted(FakeServer(), slow, **given) as (here, _):
        for k in range(requests):
            await send(here, 1, **{"x-session-id": f"{k % 20}"})


async def test_shadow_report_says_what_is_saved_and_how_surely(tmp_path):
    await written(tmp_path / "j", "shadow")
    found = json.loads(report(tmp_path / "j", "--json").stdout)
    assert found["mode"] == "shadow" and found["measured"] is None and found["requests"] == 60
    for row in found["estimated"]["ttft_s"].values():
        assert row["present"] > 0 and row["kappa"] > 0 and row["low_s"] <= row["high_s"]
        assert math.isclose(row["present"] - row["kappa"], row["saved_s"], abs_tol=1e-9)
    text = report(tmp_path / "j").stdout
    assert "would save" in text and "round-robin" in text and "p99" in text
    assert len(text.splitlines()) < 40


def test_report_names_a_file_that_is_no_journal(tmp_path):
    path = tmp_path / "j"
    path.write_text('{"line": "request"}\n')
    for given in ((), (path, "--url", "http://a")):
        assert report(*given).exit_code == 2
    ended = report(path)
    assert ended.exit_code == 2 and "j:1" in ended.output
    path.write_text("")
    assert "empty" in report(path).output
    assert report(tmp_path / "absent").exit_code == 2
