"""A whole run in one process: records, decisions and clock come together in its folder."""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import sys
from pathlib import Path

from aiohttp import web
from rich.console import Console

from kappa_loadtest.client import EndpointSettings
from kappa_loadtest.run import play, quick_process, showing, streams_allowed
from kappa_loadtest.run_folder import OPTIONS, RequestRecord, RunFolder, read_records
from kappa_loadtest.runner import Counts, RunSettings
from tests.loadtest.rude_endpoint import Rude, rude, session


async def played(
    server: Rude, run_folder: RunFolder, *prompts: str
) -> dict[tuple[str, int], RequestRecord]:
    sessions = iter([session(f"s{n}", prompt) for n, prompt in enumerate(prompts)])
    endpoint = EndpointSettings(server.url, "m")
    await play(endpoint, RunSettings(closed=1), sessions, run_folder, Counts())
    run_folder.close()
    return {(record.session, record.turn): record for record in read_records(run_folder.folder)}


async def test_decisions_of_a_cluster_of_ours_reach_their_records(tmp_path: Path) -> None:
    fetched = []

    async def decisions(request: web.Request) -> web.Response:
        fetched.append(int(request.query["limit"]))
        decision = {
            "request_id": "id-2",
            "predicted": {"load_s": 0.5, "compute_s": 0.1},
            "actual": {"new_tokens": 6, "queue_s": 0.2, "compute_s": 0.3},
        }
        return web.json_response({"decisions": [decision]})

    async with rude({"/v1/decisions": decisions}) as server:
        # The first answer has none of our headers, so its decision is not fetched.
        records = await played(server, RunFolder.create(tmp_path, {}), "well a", "ours b")
    assert records["s0", 0].predicted is None
    assert records["s1", 0].predicted == {"load_s": 0.5, "compute_s": 0.1}
    assert records["s1", 0].actual == {"new_tokens": 6, "queue_s": 0.2, "compute_s": 0.3}
    assert fetched
    async with rude({"/v1/decisions": decisions}) as server:
        fetched.clear()
        await played(server, RunFolder.create(tmp_path / "foreign", {}), "well a")
    assert fetched == []


async def test_a_run_that_goes_on_keeps_its_clock(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path, {OPTIONS: {}})
    run_folder.write(RequestRecord("s0", 0, ended_s=1000.0))
    resumed = RunFolder.resume(tmp_path, {})
    async with rude() as server:
        records = await played(server, resumed, "well a", "well b")
    assert server.received == ["b"]
    assert records["s1", 0].scheduled_s >= 1000.0


def test_streams_are_bounded_by_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert streams_allowed(5) == 5
        most = streams_allowed(10**9)
        assert 1 <= most < 10**9
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_interpreter_is_left_as_it_was() -> None:
    before = gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()
    with quick_process():
        assert sys.getswitchinterval() < before[1]
    assert (gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()) == before


async def test_ctrl_c_ends_the_wait_for_decisions_but_not_the_run(tmp_path: Path) -> None:
    fetched = []

    async def decisions(_: web.Request) -> web.Response:
        # Everything has been answered: only the decisions are still missing.
        fetched.append(os.kill(os.getpid(), signal.SIGINT))
        return web.json_response({"decisions": []})

    run_folder = RunFolder.create(tmp_path, {})
    async with rude({"/v1/decisions": decisions}) as server:
        outcome = await play(
            EndpointSettings(server.url, "m"), RunSettings(), iter([session("s", "ours a")]),
            run_folder, Counts(),
        )  # fmt: skip
    run_folder.close()
    assert len(fetched) == 1
    assert (outcome.was_stopped, outcome.decisions_missing) == (False, 1)
    assert [record.error for record in read_records(tmp_path)] == [""]


def shown(counts: Counts, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120)
    with showing(counts, 10, console):
        counts.ended, counts.in_flight, counts.held_back = 1234, 5, 6
        counts.errors["429"] = 7
    return file.getvalue()


def test_a_terminal_sees_the_counts() -> None:
    text = shown(Counts(), is_terminal=True)
    assert "1,234 ended, 5 in flight, 6 held back" in text
    assert "7 failed" in text


def test_a_pipe_gets_nothing() -> None:
    assert shown(Counts(), is_terminal=False) == ""
