"""`kappa replay` as one runs it: in a process of its own, against a real server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from kappa.hardware import CATALOGUE
from kappa_deploy.commands.replay import replay
from kappa_loadtest.run_folder import RequestRecord, locked, read_records
from tests.loadtest.rude_endpoint import rude

_RUN = "import typer; from kappa_deploy.commands.replay import replay; typer.run(replay)"
_TIMEOUT_S = 90


async def cards(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny", "object": "model"}]})


def recorded(path: Path, *talks: tuple[str, ...]) -> Path:
    """A file of recorded sessions; each is its turns' inputs, a second apart."""
    lines = [
        json.dumps({"session": f"s{number}", "t_s": turn, "input": text, "output": "ok"})
        for number, talk in enumerate(talks)
        for turn, text in enumerate(talk)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@asynccontextmanager
async def started(*words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUN, *map(str, words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def ran(*words: object) -> tuple[int, str, str]:
    """In this process, but another thread, as the server is on this one's event loop."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(replay)
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    done = await asyncio.to_thread(CliRunner(env=wide).invoke, app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs in this process: drawing takes most of their time. Others draw."""
    monkeypatch.setattr("kappa_loadtest.report.drawn", lambda *_: {})


def records(folder: Path) -> dict[tuple[str, int], RequestRecord]:
    found = list(read_records(folder))
    by_key = {(record.session, record.turn): record for record in found}
    assert len(by_key) == len(found)
    return by_key


@pytest.mark.usefixtures("no_pictures")
async def test_a_run_reports_and_its_exit_code_is_the_objective(tmp_path: Path) -> None:
    file = recorded(tmp_path / "w.jsonl", ("well a",), ("500 b",), ("well c",))
    common = (file, "--arrivals", "constant:100", "--slo-ttft", "1000", "--json")
    async with rude({"/v1/models": cards}) as server:
        words = ("--url", server.url, "--slo-share", "0.6", "--key", "sesame")
        code, out, err = await ran(*common, *words, "--out", tmp_path / "met")
        # Nothing else when piped.
        assert (code, err) == (0, f"{file}: 3 requests of 3 sessions, read as: recorded sessions\n")
        figures: dict[str, Any] = json.loads(out)
        assert (figures["requests"], figures["completed"]) == (3, 2)
        assert figures["errors"]["http_500"]["count"] == 1
        assert server.bodies[0]["model"] == "tiny"
        assert server.headers[0]["Authorization"] == "Bearer sesame"
        code, _, _ = await ran(
            *common, "--url", server.url, "--slo-share", "0.9", "--out", tmp_path / "missed"
        )
        assert code == 1
    assert (tmp_path / "met" / "report.html").exists()
    assert (tmp_path / "met" / "records.parquet").exists()
    kept = [path.name for path in (tmp_path / "met").iterdir() if b"sesame" in path.read_bytes()]
    assert kept == []


@pytest.mark.usefixtures("no_pictures")
async def test_replay_deals_sessions_to_tenants_that_have_keys(tmp_path: Path) -> None:
    file = recorded(tmp_path / "w.jsonl", *((f"well {one}",) for one in "abc"))
    words = ("--arrivals", "constant:100", "--tenant-key", "x=sk-x", "--tenant-key", "y=sk-y")
    async with rude({"/v1/models": cards}) as server:
        code, out, _ = await ran(
            file,
            *words,
            "--priority",
            "y=2",
            "--url",
            server.url,
            "--json",
            "--out",
            tmp_path / "r",
        )
        sent = [
            (headers["Authorization"], body.get("priority"))
            for headers, body in zip(server.headers[-3:], server.bodies[-3:], strict=True)
        ]
    assert code == 0 and sorted(sent) == [
        ("Bearer sk-x", None), ("Bearer sk-x", None), ("Bearer sk-y", 2)
    ]  # fmt: skip
    assert {row["name"]: row["requests"] for row in json.loads(out)["tenants"]} == {"x": 2, "y": 1}


@pytest.mark.usefixtures("no_pictures")
async def test_an_objective_that_was_not_required_cannot_be_missed(tmp_path: Path) -> None:
    profile = CATALOGUE["h100-pcie5"].to_dict()
    row = {"node": "n", "paced": False, "emulated_model": "llama-3.1-8b", "profile": profile}

    async def nodes(_: web.Request) -> web.Response:
        return web.json_response({"nodes": [row]})

    file = recorded(tmp_path / "w.jsonl", ("well a",), ("500 b",))
    common = (file, "--arrivals", "constant:100", "--prompts", "chat")
    async with rude({"/v1/models": cards, "/v1/nodes": nodes}) as server:
        words = (*common, "--url", server.url)
        code, out, _ = await ran(*words, "--out", tmp_path / "own")
        assert (code, "idle objective: 50.0% met" in out) == (0, True)
        assert "missed" not in out
        code, out, _ = await ran(*words, "--slo-share", "0.9", "--out", tmp_path / "asked")
        assert (code, "SLO missed: 50.0%, 90.0% required" in out) == (1, True)


@pytest.mark.usefixtures("no_pictures")
async def test_a_run_without_a_request_answered_nothing(tmp_path: Path) -> None:
    file = recorded(tmp_path / "w.jsonl", ("well a",))
    async with rude({"/v1/models": cards}) as server:
        words = (file, "--url", server.url, "--arrivals", "constant:0.001", "--duration", "1e-9")
        code, out, _ = await ran(*words, "--out", tmp_path / "run")
    assert (code, server.received) == (1, [])
    assert "0 requests" in out


@pytest.mark.usefixtures("no_pictures")
async def test_what_cannot_go_on_now_is_refused(tmp_path: Path) -> None:
    file, out = recorded(tmp_path / "w.jsonl", ("well a",), ("well b",)), tmp_path / "run"
    async with rude({"/v1/models": cards}) as server:
        words = (file, "--url", server.url, "--model", "tiny", "--closed", 1, "--out", out)
        assert (await ran(*words))[0] == 0
        with locked(out):
            code, _, err = await ran("--resume", out)
        assert (code, "another run is writing" in err) == (2, True)
        assert (await ran("--resume", out))[0] == 0
    # Without its answer one cannot know what it would have been sent.
    code, _, err = await ran("--resume", out)
    assert (code, "nobody answers" in err) == (2, True)
    assert len(records(out)) == 2


async def test_ctrl_c_writes_the_partial_report(tmp_path: Path) -> None:
    talks = [("well a",), ("well b",), *[(f"hang {n}",) for n in range(6)]]
    file, out = recorded(tmp_path / "w.jsonl", *talks), tmp_path / "run"
    async with rude({"/v1/models": cards}) as server:
        words = (file, "--url", server.url, "--closed", 2, "--grace", 0.1, "--out", out)
        async with started(*words) as process:
            while sum(name.isdecimal() for name in server.received) < 2:
                await asyncio.wait_for(server.arrived.wait(), _TIMEOUT_S)
                server.arrived.clear()
            process.send_signal(signal.SIGINT)
            code, _, err = await ended(process)
        assert (code, err.count("\n")) == (130, 1)
        found = records(out)
        assert Counter(record.error for record in found.values())["cancelled"] == 2
        assert len(found) == len(server.received) < 8
        assert "Partial" in (out / "report.html").read_text()
        assert json.loads((out / "run.json").read_text())["interrupted"] is True
        # And it goes on from there: what was stopped and what was never sent.
        answered = {key for key, record in found.items() if not record.error}
        server.gate.set()
        server.received.clear()
        code, _, _ = await ran("--resume", out)
    assert code == 0
    assert len(server.received) == 8 - len(answered)
    assert {record.error for record in records(out).values()} == {""}
    assert len(records(out)) == 8


@pytest.mark.usefixtures("no_pictures")
async def test_after_kill_9_nothing_that_was_answered_is_sent_again(tmp_path: Path) -> None:
    talks = [(f"well {n}/0", f"{'well' if n < 2 else 'hang'} {n}/1") for n in range(5)]
    file, out = recorded(tmp_path / "w.jsonl", *talks), tmp_path / "run"
    async with rude({"/v1/models": cards}) as server:
        common = ("--url", server.url, "--closed", 2, "--pause-factor", 0, "--out", out)
        async with started(file, *common) as process:
            while sum(name[0] > "1" and name.endswith("/1") for name in server.received) < 2:
                await asyncio.wait_for(server.arrived.wait(), _TIMEOUT_S)
                server.arrived.clear()
            process.kill()
            await process.wait()
        kept = {f"{record.session[1:]}/{record.turn}" for record in records(out).values()}
        assert kept
        server.gate.set()
        server.received.clear()
        refused, _, err = await ran(file, "--url", server.url, "--closed", 3, "--resume", out)
        assert refused == 2
        assert "closed 2, not 3" in " ".join(err.split())
        assert server.received == []
        code, _, _ = await ran(file, "--url", server.url, "--resume", out)
    assert code == 0
    every = {f"{n}/{turn}" for n in range(5) for turn in range(2)}
    assert sorted(server.received) == sorted(every - kept)
    assert len(records(out)) == 10


@pytest.mark.usefixtures("no_pictures")
async def test_replay_counts_a_down_endpoint_only_if_a_model_is_named(
    tmp_path: Path,
) -> None:
    file, out = recorded(tmp_path / "w.jsonl", ("well a",)), tmp_path / "run"
    async with rude() as gone:
        pass
    words = (file, "--url", gone.url, "--out", out)
    code, _, err = await ran(*words)
    assert (code, out.exists()) == (2, False)
    assert "nobody answers" in err and "with --model NAME requests are sent all the same" in err
    code, text, _ = await ran(*words, "--model", "tiny", "--json")
    assert code == 1
    assert {kind: figures["count"] for kind, figures in json.loads(text)["errors"].items()} == {
        "connect": 1
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("sharegpt",), "give --url"),
        (("nowhere", "--url", "URL"), "no workload and no file 'nowhere'"),
        (("BROKEN", "--url", "URL"), "w.jsonl:2"),
        (("FILE", "--url", "URL", "--arrivals", "poison:5"), "Did you mean 'poisson'?"),
        (("FILE", "--url", "URL", "--arrivals", "trace"), "does not say when its sessions came"),
        (
            ("FILE", "--url", "URL", "--closed", "0"),
            "Invalid value for '--closed': Input should be",
        ),
        (("FILE", "--url", "URL", "--slo-ttft", "-1"), "ttft_s is -1"),
        (("FILE", "--url", "localhost:80"), "'localhost:80' is no endpoint"),
        (("FILE", "--url", "URL", "--resume", "NONE"), "holds no run"),
        (("FILE", "--url", "URL", "--tenant-key", "secret"), "give TENANT=KEY"),
        (("FILE", "--url", "URL", "--priority", "a=1"), "give --tenant-key a=KEY"),
        (("FILE", "--url", "http://me:secret@h"), "give --key instead"),
        (("FILE", "--url", "URL", "--slo-share", "0.9"), "give --slo-ttft or --slo-tpot"),
    ],
)
async def test_bad_input_names_what_is_wrong_and_nothing_is_sent(
    words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    file = recorded(tmp_path / "ok.jsonl", ("well a",))
    broken = recorded(tmp_path / "w.jsonl", ("well a",))
    broken.write_text(broken.read_text() + "{not json\n")
    async with rude({"/v1/models": cards}) as server:
        places = {"URL": server.url, "FILE": file, "BROKEN": broken, "NONE": tmp_path}
        given = [places.get(word, word) for word in words]
        code, out, err = await ran(*given, "--out", tmp_path / "run")
        assert server.received == []
    assert code == 2
    assert why in err
    assert "secret" not in out + err
    assert not (tmp_path / "run").exists()
