"""When requests are sent: open and closed loops, bounds, retries, stops. Against a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from loadtest.client import Endpoint, EndpointSettings
from loadtest.feeder import Feeder
from loadtest.journal import RequestRecord
from loadtest.options import bounded
from loadtest.runner import Counts, Runner, RunSettings
from tests.loadtest.rude_endpoint import Rude, rude, session
from workload.replay import ReplaySession


@dataclass
class Run:
    """A run under way and what it wrote."""

    runner: Runner
    task: asyncio.Task[None]
    records: list[RequestRecord] = field(default_factory=list)

    async def end(self) -> dict[tuple[str, int], RequestRecord]:
        await asyncio.wait_for(self.task, 30)
        return {(record.session, record.turn): record for record in self.records}


def begin(
    server: Rude,
    sessions: Iterator[ReplaySession],
    settings: RunSettings | None = None,
    done: dict[str, int] | None = None,
    write: Callable[[RequestRecord], None] | None = None,
) -> Run:
    begin_s = time.monotonic()
    records: list[RequestRecord] = []

    def now_s() -> float:
        return time.monotonic() - begin_s

    endpoint = Endpoint(EndpointSettings(server.url, "m"), now_s)
    runner = Runner(endpoint, settings or RunSettings(), write or records.append, Counts())

    async def work() -> None:
        with Feeder(sessions, endpoint.settings.prepare, done) as feeder:
            async with endpoint:
                await runner.run(feeder)

    return Run(runner, asyncio.create_task(work()), records)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    # No answer ends before all requests have come: a loop that waited would never end.
    sessions = [session(f"s{i}", f"wait s{i}", arrival_s=i * 0.001) for i in range(40)]
    async with rude() as server:
        run = begin(server, iter(sessions))
        await server.until_received(40)
        server.gate.set()
        records = await run.end()
    assert server.most_at_once == 40
    assert [records[f"s{i}", 0].scheduled_s for i in range(40)] == [i * 0.001 for i in range(40)]
    assert all(record.sent_s >= record.scheduled_s for record in records.values())
    assert run.runner.counts.most_in_flight == 40


async def test_a_closed_loop_has_so_many_sessions_at_a_time() -> None:
    sessions = [session(f"s{i}", f"well s{i}/0", f"well s{i}/1") for i in range(10)]
    async with rude() as server:
        run = begin(server, iter(sessions), RunSettings(closed=3))
        records = await run.end()
    assert len(records) == 20
    assert server.most_at_once <= 3
    # A fourth session begins only when one of the first three has ended both turns.
    begun = [name.split("/")[0] for event, name in server.log if event == "came"]
    fourth = begun.index("s3")
    assert any(begun[:fourth].count(f"s{i}") == 2 for i in range(3))


async def test_a_turn_waits_for_its_predecessor_and_its_pause() -> None:
    async with rude() as server:
        run = begin(server, iter([session("s", "well 0", "well 1", "well 2", after_s=0.05)]))
        records = await run.end()
    assert server.log == [(e, str(n)) for n in range(3) for e in ("came", "ended")]
    for turn in (1, 2):
        before, after = records["s", turn - 1], records["s", turn]
        assert after.scheduled_s >= before.ended_s + 0.05
        assert after.sent_s >= after.scheduled_s


async def test_a_failed_turn_does_not_change_what_is_offered() -> None:
    async with rude() as server:
        records = await begin(server, iter([session("s", "500 0", "cut 1", "well 2")])).end()
    assert [records["s", turn].error for turn in range(3)] == ["http_500", "cut", ""]


async def test_the_bound_on_streams_holds_back_counts_and_hides_nothing() -> None:
    sessions = [session(f"s{i}", f"wait s{i}") for i in range(5)]
    async with rude() as server:
        run = begin(server, iter(sessions), RunSettings(in_flight=2))
        await server.until_received(2)
        server.gate.set()
        records = await run.end()
    assert server.most_at_once == 2
    assert run.runner.counts.held_back == 3
    first_end_s = min(record.ended_s for record in records.values())
    late = [record for record in records.values() if record.sent_s >= first_end_s]
    assert len(late) == 3
    # Latency counts from when it was due, not from when there was room.
    assert all(record.scheduled_s < first_end_s for record in late)


@pytest.mark.parametrize("status", [429, 503, 502])
async def test_what_may_pass_is_tried_again_only_when_asked(status: int) -> None:
    async with rude() as server:
        records = await begin(server, iter([session("s", f"once-{status} x")])).end()
    assert len(server.received) == 1
    assert records["s", 0].error == (str(status) if status != 502 else "http_502")
    async with rude() as server:
        run = begin(server, iter([session("s", f"once-{status} x")]), RunSettings(retries=1))
        record = (await run.end())["s", 0]
    assert len(server.received) == 2
    assert (record.error, record.attempt) == ("", 1)
    assert record.retried == [str(status) if status != 502 else "http_502"]
    assert run.runner.counts.retried == 1
    if status != 502:
        assert record.sent_s - record.scheduled_s >= 0.2  # as Retry-After said


async def test_what_cannot_pass_is_not_tried_again() -> None:
    async with rude() as server:
        run = begin(server, iter([session("s", "401 x")]), RunSettings(retries=3))
        records = await run.end()
    assert len(server.received) == 1
    assert records["s", 0].error == "401"
    assert run.runner.counts.errors == {"401": 1}


async def test_retries_end() -> None:
    async with rude() as server:
        run = begin(server, iter([session("s", "429 x")]), RunSettings(retries=2))
        record = (await run.end())["s", 0]
    assert len(server.received) == 3
    assert (record.error, record.attempt, record.retried) == ("429", 2, ["429", "429"])


async def test_a_prompt_that_cannot_be_made_is_a_failed_request() -> None:
    broken = session("b", lambda: None)  # type: ignore[arg-type]
    async with rude() as server:
        records = await begin(server, iter([broken, session("s", "well x")])).end()
    assert records["b", 0].error == "prompt"
    assert records["b", 0].error_detail
    assert records["s", 0].error == ""


async def test_a_stop_sends_nothing_more_and_gives_streams_their_grace() -> None:
    sessions = [session("s0", "wait s0", "well never"), session("s1", "well s1", arrival_s=1e6)]
    async with rude() as server:
        run = begin(server, iter(sessions), RunSettings(grace_s=20))
        await server.until_received(1)
        run.runner.stop()
        server.gate.set()
        records = await run.end()
    assert server.received == ["s0"]
    assert {key: record.error for key, record in records.items()} == {("s0", 0): ""}


async def test_streams_that_outlast_the_grace_are_cancelled_and_written() -> None:
    async with rude() as server:
        run = begin(
            server, iter([session("s", "hang s"), session("t", "well t")]), RunSettings(grace_s=0.1)
        )
        await server.until_received(2)
        while not run.records:
            await asyncio.sleep(0.01)
        run.runner.stop()
        records = await run.end()
    assert {key: record.error for key, record in records.items()} == {
        ("s", 0): "cancelled", ("t", 0): "",
    }  # fmt: skip


async def test_a_second_stop_does_not_wait_for_the_grace() -> None:
    async with rude() as server:
        run = begin(server, iter([session("s", "hang s")]), RunSettings(grace_s=1e6))
        await server.until_received(1)
        run.runner.stop()
        await asyncio.sleep(0)
        run.runner.stop()
        records = await run.end()
    assert records["s", 0].error == "cancelled"


async def test_nothing_is_due_after_the_duration() -> None:
    sessions = [
        session("a", "well a0", "well a1", after_s=1e6), session("b", "well b", arrival_s=1e6)
    ]  # fmt: skip
    async with rude() as server:
        records = await begin(server, iter(sessions), RunSettings(duration_s=1000)).end()
    assert list(records) == [("a", 0)]


async def test_a_run_goes_on_at_the_first_turn_that_is_missing() -> None:
    sessions = [session(n, *(f"well {n}{t}" for t in range(3))) for n in "abc"]
    async with rude() as server:
        records = await begin(server, iter(sessions), done={"a": 3, "b": 1}).end()
    assert sorted(server.received) == ["b1", "b2", "c0", "c1", "c2"]
    assert sorted(records) == [("b", 1), ("b", 2), ("c", 0), ("c", 1), ("c", 2)]


async def test_a_full_disk_stops_the_run_and_is_raised() -> None:
    def full(_: RequestRecord) -> None:
        raise OSError("no space left")

    endless = (session(f"s{i}", f"well s{i}") for i in range(10**9))
    async with rude() as server:
        run = begin(server, endless, RunSettings(closed=2), write=full)
        with pytest.raises(OSError, match="no space"):
            await run.end()


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


def test_bounds_on_sessions_and_requests() -> None:
    sessions = [session(str(n), *["well"] * 3) for n in range(5)]

    def lengths(most_sessions: int | None, most_requests: int | None) -> list[int]:
        kept = bounded(iter(sessions), most_sessions, most_requests)
        return [len(s.requests) for s in kept]

    assert lengths(None, None) == [3] * 5
    assert lengths(2, None) == [3, 3]
    assert lengths(None, 7) == [3, 3, 1]
    assert lengths(None, 6) == [3, 3]
    assert lengths(1, 7) == [3]


async def test_many_wait_for_prompts_that_take_long_to_make() -> None:
    def slow() -> Iterator[ReplaySession]:
        for i in range(6):
            time.sleep(0.03)  # longer than one visit of the thread that makes them
            yield session(f"s{i}", f"well s{i}")

    async with rude() as server:
        records = await begin(server, slow(), RunSettings(closed=8)).end()
    assert sorted(records) == [(f"s{i}", 0) for i in range(6)]


async def test_a_stop_before_a_retry_keeps_what_became_of_the_attempt() -> None:
    sessions = [session("a", "503 a"), session("b", "hang b", arrival_s=0.01)]
    async with rude() as server:
        # While a waits before its second attempt, b takes the only slot.
        settings = RunSettings(retries=1, in_flight=1, grace_s=0.1)
        run = begin(server, iter(sessions), settings)
        await server.until_received(2)
        while run.runner.counts.held_back < 1:
            await asyncio.sleep(0.01)
        run.runner.stop()
        records = await run.end()
    assert server.received == ["a", "b"]
    first = records["a", 0]
    assert (first.error, first.attempt, first.retried) == ("503", 0, [])
    assert records["b", 0].error == "cancelled"


async def test_after_a_stop_nothing_is_tried_again() -> None:
    async with rude() as server:
        settings = RunSettings(retries=5, grace_s=20)
        run = begin(server, iter([session("s", "later-503 s")]), settings)
        await server.until_received(1)
        run.runner.stop()
        server.gate.set()
        records = await run.end()
    assert server.received == ["s"]
    assert (records["s", 0].error, records["s", 0].attempt) == ("503", 0)
