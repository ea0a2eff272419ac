"""When requests are sent: open and closed loops, bounds, retries, stops. Against a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kappa_loadtest.client import Endpoint, EndpointSettings
from kappa_loadtest.feeder import Feeder
from kappa_loadtest.options import bounded
from kappa_loadtest.run_folder import RequestRecord
from kappa_loadtest.runner import Counts, Runner, RunSettings
from kappa_workload.replay import ReplaySession
from tests.loadtest.rude_endpoint import Rude, rude, session

Records = dict[tuple[str, int], RequestRecord]


@dataclass
class Run:
    """A run under way and what it wrote."""

    runner: Runner
    task: asyncio.Task[None]
    records: list[RequestRecord] = field(default_factory=list)

    async def end(self) -> Records:
        await asyncio.wait_for(self.task, 30)
        return {(record.session, record.turn): record for record in self.records}


def begin(
    server: Rude,
    sessions: Iterable[ReplaySession],
    write: Callable[[RequestRecord], None] | None = None,
    done: dict[str, int] | None = None,
    **settings: Any,
) -> Run:
    begin_s = time.monotonic()
    records: list[RequestRecord] = []
    endpoint = Endpoint(EndpointSettings(server.url, "m"), lambda: time.monotonic() - begin_s)
    runner = Runner(endpoint, RunSettings(**settings), write or records.append, Counts())

    async def work() -> None:
        with Feeder(iter(sessions), endpoint.settings.prepare, done) as feeder:
            async with endpoint:
                await runner.run(feeder)

    return Run(runner, asyncio.create_task(work()), records)


async def until_held_back(run: Run, count: int) -> None:
    """Until so many requests have found no slot."""
    async with asyncio.timeout(30):
        while run.runner.counts.held_back < count:
            await asyncio.sleep(0.001)


def errors(records: Records) -> dict[tuple[str, int], str]:
    return {key: record.error for key, record in records.items()}


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    # No answer ends before all requests have come: a loop that waited would never end.
    async with rude() as server:
        sessions = (session(f"s{i}", f"wait s{i}", arrival_s=i * 0.001) for i in range(40))
        run = begin(server, sessions)
        await server.until_received(40)
        server.gate.set()
        records = await run.end()
    assert server.most_at_once == run.runner.counts.most_in_flight == 40
    assert [records[f"s{i}", 0].scheduled_s for i in range(40)] == [i * 0.001 for i in range(40)]
    assert all(record.sent_s >= record.scheduled_s for record in records.values())


async def test_a_closed_loop_has_so_many_sessions_at_a_time() -> None:
    sessions = [session(f"s{i}", f"well s{i}/0", f"well s{i}/1") for i in range(10)]
    async with rude() as server:
        records = await begin(server, sessions, closed=3).end()
    assert len(records) == 20
    assert server.most_at_once <= 3
    # A fourth session begins only when one of the first three has ended both turns.
    begun = [name.split("/")[0] for event, name in server.log if event == "came"]
    fourth = begun.index("s3")
    assert any(begun[:fourth].count(f"s{i}") == 2 for i in range(3))


async def test_a_turn_waits_for_its_predecessor_and_its_pause() -> None:
    async with rude() as server:
        sessions = [session("s", "well 0", "well 1", "well 2", after_s=0.05)]
        records = await begin(server, sessions).end()
    assert server.log == [(e, str(n)) for n in range(3) for e in ("came", "ended")]
    for turn in (1, 2):
        before, after = records["s", turn - 1], records["s", turn]
        assert after.scheduled_s >= before.ended_s + 0.05
        assert after.sent_s >= after.scheduled_s


async def test_what_fails_does_not_change_what_is_offered() -> None:
    broken = session("b", lambda: None)  # type: ignore[arg-type]
    async with rude() as server:
        sessions = [session("s", "500 0", "cut 1", "well 2"), broken]
        records = await begin(server, sessions).end()
    assert [records["s", turn].error for turn in range(3)] == ["http_500", "cut", ""]
    assert records["b", 0].error == "prompt" and records["b", 0].error_detail


async def test_stream_bound_holds_requests_back_and_counts_their_wait() -> None:
    async with rude() as server:
        run = begin(server, (session(f"s{i}", f"wait s{i}") for i in range(5)), in_flight=2)
        await server.until_received(2)
        await until_held_back(run, 3)
        server.gate.set()
        records = await run.end()
    assert (server.most_at_once, run.runner.counts.held_back) == (2, 3)
    first_end_s = min(record.ended_s for record in records.values())
    late = [record for record in records.values() if record.sent_s >= first_end_s]
    assert len(late) == 3
    # Latency counts from when it was due, not from when there was a free stream.
    assert all(record.scheduled_s < first_end_s for record in late)


@pytest.mark.parametrize(
    ("what", "retries", "tries", "outcome"),
    [
        ("once-429", 0, 1, ("429", 0, [])),
        ("once-429", 1, 2, ("", 1, ["429"])),
        ("once-503", 1, 2, ("", 1, ["503"])),
        ("once-502", 1, 2, ("", 1, ["http_502"])),
        ("401", 3, 1, ("401", 0, [])),  # cannot pass
        ("429", 2, 3, ("429", 2, ["429", "429"])),
    ],
)
async def test_what_may_pass_is_tried_again_as_often_as_wanted(
    what: str, retries: int, tries: int, outcome: tuple[str, int, list[str]]
) -> None:
    async with rude() as server:
        run = begin(server, [session("s", f"{what} x")], retries=retries)
        record = (await run.end())["s", 0]
    assert (len(server.received), run.runner.counts.retried) == (tries, tries - 1)
    assert (record.error, record.attempt, record.retried) == outcome
    assert dict(run.runner.counts.errors) == ({record.error: 1} if record.error else {})
    if tries > 1 and "502" not in what:
        assert record.sent_s - record.scheduled_s >= 0.2 * (tries - 1)  # as Retry-After said


async def test_a_stop_sends_nothing_more_and_gives_streams_their_grace() -> None:
    sessions = [session("s0", "wait s0", "well never"), session("s1", "well s1", arrival_s=1e6)]
    async with rude() as server:
        run = begin(server, sessions, grace_s=20)
        await server.until_received(1)
        run.runner.stop()
        server.gate.set()
        records = await run.end()
    assert server.received == ["s0"]
    assert errors(records) == {("s0", 0): ""}


async def test_streams_that_outlast_the_grace_are_cancelled_and_kept() -> None:
    async with rude() as server:
        run = begin(server, [session("s", "hang s"), session("t", "well t")], grace_s=0.1)
        await server.until_received(2)
        while not run.records:
            await asyncio.sleep(0.01)
        run.runner.stop()
        records = await run.end()
    assert errors(records) == {("s", 0): "cancelled", ("t", 0): ""}


async def test_a_second_stop_does_not_wait_for_the_grace() -> None:
    async with rude() as server:
        run = begin(server, [session("s", "hang s")], grace_s=1e6)
        await server.until_received(1)
        run.runner.stop()
        await asyncio.sleep(0)
        run.runner.stop()
        assert errors(await run.end()) == {("s", 0): "cancelled"}


async def test_a_stop_before_a_retry_keeps_what_became_of_the_attempt() -> None:
    sessions = [session("a", "later-503 a"), session("b", "hang b", arrival_s=0.01)]
    async with rude() as server:
        run = begin(server, sessions, retries=1, in_flight=1, grace_s=0.1)
        await server.until_received(1)
        await until_held_back(run, 1)
        # While a waits before its second attempt, b takes the only slot.
        server.gate.set()
        server.gate.clear()
        await server.until_received(2)
        await until_held_back(run, 2)
        run.runner.stop()
        records = await run.end()
    assert server.received == ["a", "b"]
    first = records["a", 0]
    assert (first.error, first.attempt, first.retried) == ("503", 0, [])
    assert records["b", 0].error == "cancelled"


async def test_after_a_stop_nothing_is_tried_again() -> None:
    async with rude() as server:
        run = begin(server, [session("s", "later-503 s")], retries=5, grace_s=20)
        await server.until_received(1)
        run.runner.stop()
        server.gate.set()
        records = await run.end()
    assert server.received == ["s"]
    assert (records["s", 0].error, records["s", 0].attempt) == ("503", 0)


async def test_nothing_is_due_after_the_duration() -> None:
    late = session("b", "well b", arrival_s=1e6)
    async with rude() as server:
        sessions = [session("a", "well a0", "well a1", after_s=1e6), late]
        assert list(await begin(server, sessions, duration_s=1000).end()) == [("a", 0)]


async def test_a_run_goes_on_at_the_first_turn_that_is_missing() -> None:
    sessions = [session(n, *(f"well {n}{t}" for t in range(3))) for n in "abc"]
    async with rude() as server:
        records = await begin(server, sessions, done={"a": 3, "b": 1}).end()
    assert sorted(server.received) == ["b1", "b2", "c0", "c1", "c2"]
    assert sorted(records) == [("b", 1), ("b", 2), ("c", 0), ("c", 1), ("c", 2)]


async def test_a_full_disk_stops_the_run_and_is_raised() -> None:
    def full(_: RequestRecord) -> None:
        raise OSError("no space left")

    endless = (session(f"s{i}", f"well s{i}") for i in range(10**9))
    async with rude() as server:
        with pytest.raises(OSError, match="no space"):
            await begin(server, endless, full, closed=2).end()


async def test_a_workload_that_breaks_is_raised_after_what_was_sent() -> None:
    def breaks() -> Iterator[ReplaySession]:
        yield session("s", "well s")
        raise ValueError("line 2 is no session")

    async with rude() as server:
        run = begin(server, breaks())
        with pytest.raises(ValueError, match="line 2"):
            await run.end()
    assert [record.session for record in run.records] == ["s"]


async def test_endless_workloads_are_read_no_further_than_needed() -> None:
    read = 0

    def endless() -> Iterator[ReplaySession]:
        nonlocal read
        while True:
            yield session(f"s{read}", f"well s{read}", arrival_s=read * 1e5)
            read += 1

    async with rude() as server:
        run = begin(server, endless())
        await server.until_received(1)
        run.runner.stop()
        await run.end()
    assert read < 5000


async def test_many_wait_for_prompts_that_take_long_to_make() -> None:
    def slow() -> Iterator[ReplaySession]:
        for i in range(6):
            time.sleep(0.03)  # in the thread that makes them, while eight clients wait
            yield session(f"s{i}", f"well s{i}")

    async with rude() as server:
        assert sorted(await begin(server, slow(), closed=8).end()) == [
            (f"s{i}", 0) for i in range(6)
        ]


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        ((None, None), [3] * 5), ((2, None), [3, 3]), ((None, 7), [3, 3, 1]),
        ((None, 6), [3, 3]), ((1, 7), [3]),
    ],
)  # fmt: skip
def test_bounds_on_sessions_and_requests(most: tuple[Any, Any], lengths: list[int]) -> None:
    kept = bounded((session(str(n), *["well"] * 3) for n in range(5)), *most)
    assert [len(each.requests) for each in kept] == lengths
