"""The live router between a real worker stream and the registry, without Ray."""

import asyncio
import errno
import json
import os
import threading
import time

import pytest

import kappa_router.live.live_router
import kappa_router.live.membership
import kappa_router.live.record_file
import kappa_router.live.supervised
from kappa.protocol import TenantCharge, WorkerReport
from kappa_router.api.status import nodes, refresh_gauges
from kappa_router.config import RouterConfig
from kappa_router.decision import NoWorkerError
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.record_file import RecordFile
from kappa_router.policy import policy_named
from tests.router.building import ask_counting as ask
from tests.router.building import sample
from tests.router.patience import until

pytestmark = pytest.mark.vllm


@pytest.fixture
async def scene(registry):
    live = LiveRouter(RouterConfig(policy=policy_named("ttft"), secret=12345))
    yield live, registry
    await live.close()
    assert not live.members._closing


async def joined(live, registry, *workers, **changes):
    registry.publish("d", {w.name: w.announcement(**changes) for w in workers})
    await until(lambda: len(live.router.workers) == len(workers))


async def test_route_refuses_without_workers_with_a_retry_time(scene):
    live, _ = scene
    with pytest.raises(NoWorkerError, match="0 known"):
        live.route(ask())
    assert live.retry_after_s() > 0
    assert live.records == {} and live.router.reservations == 0


async def test_unready_replica_is_no_worker_yet(scene, worker):
    live, registry = scene
    registry.publish("d", {"w": {}})
    await asyncio.sleep(0)
    assert live.router.workers == {}
    await joined(live, registry, worker())
    assert live.route(ask()).worker == "w"


async def test_request_is_followed_from_decision_to_end(scene, worker):
    live, registry = scene
    w = worker()
    await joined(live, registry, w)
    # Reports before the router listens are lost, except those that a snapshot holds.
    await until(lambda: live.router.workers["w"].report is not None)
    decision = live.route(ask())
    assert decision.informed and live.router.in_flight_on("w") == 1
    record = live.records["r"]
    w.admit(record.sent_as, device=0, host=32, new=68)
    w.step(record.sent_as)
    await until(lambda: record.admitted and record.spent and record.ttft_s is not None)
    live.first_token("r")  # the stream notices later than the report: no second time
    live.tokens("r", 3)
    assert record.generated_tokens is None
    sent_as = record.sent_as
    over = WorkerReport("w", live.now_s(), finished=(sent_as,), generated={sent_as: 3})
    live.reported(over)
    assert record.generated_tokens == 3
    live.release("r", "done")
    live.release("r", "client_gone")  # only the first end counts
    told = record.to_dict()
    assert told["actual"] == {
        "device_tokens": 0, "cached_tokens": 32, "disk_tokens": 0, "new_tokens": 68,
        "ttft_s": record.ttft_s,
        "queue_s": record.ttft_s - 2e-6 - 1e-6, "load_s": 2e-6, "compute_s": 1e-6,
    }  # fmt: skip
    assert (told["end"], told["node"], told["paced"]) == ("done", "node-w", True)
    assert live.router.reservations == 0
    assert nodes(live)[0]["prompt_tokens"] == {"device": 0, "host": 32, "new": 68}
    assert told["soonest_other"] is None
    assert sample(live, 'kappa_prompt_tokens_total{node="node-w",source="host"}') == 32
    assert sample(live, 'kappa_output_tokens_total{node="node-w"}') == 3
    assert sample(live, 'kappa_ttft_seconds_count{node="node-w"}') == 1
    assert sample(live, 'kappa_paced_overruns_total{node="node-w"}') == 1


async def test_worker_that_goes_takes_its_reservations_along(scene, worker):
    live, registry = scene
    first, second = worker("a"), worker("b")
    await joined(live, registry, first, second)
    gone = live.route(ask("r")).worker
    stays = ({"a", "b"} - {gone}).pop()
    refresh_gauges(live)
    registry.remove("d", gone)
    await until(lambda: len(live.router.workers) == 1)
    other = live.records["r"].to_dict()["soonest_other"]
    assert other["node"] == f"node-{stays}" and other["ttft_s"] > 0
    assert live.records["r"].end == "worker_died"
    assert live.router.reservations == 0
    live.release("r", "error")
    assert live.records["r"].end == "worker_died"
    assert live.route(ask("s")).worker == stays
    assert sample(live, f'kappa_reservations{{node="node-{gone}"}}') is None


async def test_replicas_of_another_deployment_are_not_dropped(scene, worker):
    live, registry = scene
    await joined(live, registry, worker())
    registry.publish("other", {})
    await asyncio.sleep(0.05)
    assert set(live.router.workers) == {"w"}


@pytest.mark.parametrize("spoilt", [{"protocol": 99}, {"unheard_of": 1}])
async def test_announcement_that_cannot_be_read_is_refused(scene, worker, spoilt):
    live, registry = scene
    registry.publish("d", {"w": worker().announcement() | spoilt})
    await until(lambda: "w" in live.members.refused)
    assert live.router.workers == {}


async def test_nodes_show_what_is_known(scene, worker):
    live, registry = scene
    w = worker()
    await joined(live, registry, w, profile_error="no GPU", measured={"h2d_bytes_per_s": 5.0})
    w.store(1, 2, 3)
    w.step()
    await until(lambda: nodes(live)[0]["totals"] and nodes(live)[0]["totals"]["steps_total"])
    await until(lambda: (nodes(live)[0]["held_blocks"] or {}).get("device"))
    (row,) = nodes(live)
    assert (row["node"], row["paced"], row["profile_error"]) == ("node-w", True, "no GPU")
    assert row["kappa_crit"] == pytest.approx(1e-5 * 55e9 / 1e5)
    assert row["measured"] == {"h2d_bytes_per_s": 5.0}
    assert row["held_blocks"] == {"device": 3, "host": 0, "disk": 0}
    assert row["prompt_tokens"] == {}
    refresh_gauges(live)
    assert sample(live, 'kappa_cached_tokens{node="node-w",tier="device",worker="w"}') == 48
    assert row["totals"]["overruns_total"] == 1


async def test_request_that_outlives_thousands_ends_as_it_should(scene, worker):
    live, registry = scene
    live.records.memory = 3
    await joined(live, registry, worker())
    live.route(ask("long"))
    for i in range(5):
        live.route(ask(f"r{i}"))
        live.release(f"r{i}", "done")
    assert set(live.records) == {"long", "r3", "r4"}
    live.release("long", "error")
    assert live.records["long"].end == "error"
    assert live.members.breakers.state("w", live.now_s()).failures == 1


async def test_charges_are_counted_by_tenant_and_outlive_their_worker(scene, worker):
    live, registry = scene
    await joined(live, registry, worker("a"), worker("b"))
    later_s = time.time() + 3600.0  # than what the worker itself reports, which has no charges
    for time_s, seconds in ((later_s, 2.0), (later_s + 1, 5.0), (later_s + 1, 5.0)):
        charge = TenantCharge("alice", seconds, 0.5, 0.0)
        live.reported(WorkerReport("a", time_s, charges=(charge,)))
    vram = 'kappa_tenant_charge_seconds_total{resource="vram",tenant="alice"}'
    assert sample(live, vram) == 5.0
    registry.remove("d", "a")
    await until(lambda: len(live.router.workers) == 1)
    assert live.charges.elsewhere("b")["alice"].vram_s == 5.0
    live.reported(WorkerReport("a", later_s + 2, charges=(TenantCharge("alice", 9.0, 0.5, 0.0),)))
    assert sample(live, vram) == 5.0, "a worker that is gone is not heard"


async def test_decision_and_its_log_line_name_the_tenant(scene, worker, capsys):
    live, registry = scene
    await joined(live, registry, worker())
    live.route(ask(tenant="alice"))
    live.release("r", "done")
    assert live.records["r"].to_dict()["tenant"] == "alice"
    assert "alice" in "".join(capsys.readouterr())


# -- what must go on -----------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """Writes of the record's file fail while the list holds an errno."""
    failing, real = [], os.write

    def write(file, data):
        if failing:
            real(file, data[: len(data) // 2])  # as a disk does that is full in mid-line
            raise OSError(failing[0], os.strerror(failing[0]))
        return real(file, data)

    monkeypatch.setattr(kappa_router.live.record_file.os, "write", write)
    return failing


async def test_full_disk_ends_the_record_and_nothing_else(registry, tmp_path, worker, full_disk):
    path = tmp_path / "record.jsonl"
    live = LiveRouter(RouterConfig(policy=policy_named("ttft"), secret=1), record=str(path))
    w = worker()
    await joined(live, registry, w)
    await until(lambda: live.members.synced)
    live.route(ask("before"))
    # Its lines before that are of a release and of an estimate.
    await until(lambda: '"call": "route"' in path.read_text())
    full_disk.append(errno.ENOSPC)
    live.route(ask("during"))
    for request_id in ("before", "during"):
        live.release(request_id, "done")
    w.store(1, 2)
    w.step()
    await until(lambda: live.router.workers["w"].report.steps_total)
    await until(lambda: live.router.index.stats()["blocks"] == 2)
    await until(lambda: sample(live, "kappa_record_dropped_total"))
    full_disk.clear()
    assert live.route(ask("after")).worker == "w"
    live.release("after", "done")
    assert live.router.reservations == 0 and live.members.get("w").subscriber.synced
    await until(lambda: sample(live, "kappa_record_dropped_total") >= 3)
    assert sample(live, 'kappa_task_restarts_total{task="feed"}') is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [line["request"]["request_id"] for line in lines if line["call"] == "route"]
    assert told == ["before"], "no line is cut, and none comes after what was lost"
    assert path.stat().st_mode & 0o777 == 0o600
    await live.close()


def test_record_ends_whole_at_its_bound_and_is_private(tmp_path):
    path, dropped = tmp_path / "record.jsonl", []
    path.write_text("{}\n")
    path.chmod(0o644)
    file = RecordFile(str(path), lambda: dropped.append(1), max_bytes=20)
    for _ in range(4):
        file({"n": 1})  # 9 bytes with its line's end; 3 + 9 = 12, and 21 would be too many
    file.close()
    assert path.read_text() == '{}\n{"n": 1}\n'
    assert len(dropped) == 3 and path.stat().st_mode & 0o777 == 0o600


def test_closing_a_record_waits_for_its_thread(tmp_path):
    path, dropped = tmp_path / "j", []
    file = RecordFile(str(path), lambda: dropped.append(1))
    for n in range(100):
        file({"n": n})
    file.close()
    lines = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert lines == list(range(100)) and not dropped


def test_disk_that_is_too_slow_ends_the_record(tmp_path, monkeypatch):
    path, dropped, go_on, real = tmp_path / "j", [], threading.Event(), os.write
    monkeypatch.setattr(kappa_router.live.record_file, "_WAITING_BYTES", 20)
    monkeypatch.setattr(
        kappa_router.live.record_file.os, "write", lambda *given: go_on.wait() and real(*given)
    )
    file = RecordFile(str(path), lambda: dropped.append(1))
    for n in range(9):
        file({"n": n})
    assert dropped, "the caller did not wait"
    go_on.set()
    file.close()
    assert len(path.read_text().splitlines()) + len(dropped) == 9


def test_unopened_record_keeps_nothing_from_starting(tmp_path):
    dropped = []
    file = RecordFile(str(tmp_path / "missing" / "record"), lambda: dropped.append(1))
    file({"n": 1})
    assert dropped == [1]


async def test_decider_that_can_follow_no_worker_has_a_fault(scene, worker, monkeypatch):
    live, registry = scene
    await joined(live, registry, worker("a"), worker("b"))
    await until(lambda: live.members.synced)
    assert live.members.fault() == ""
    feeds = [live.members.get(name).subscriber for name in "ab"]
    unread_s = 2 * kappa_router.live.membership._UNREADABLE_S
    # One of two cannot be read: its own fault as likely as ours.
    feeds[0]._broken = True
    monkeypatch.setattr(feeds[0], "_snapshot", unreadable)
    await until(lambda: not feeds[0].synced and feeds[1].connected)
    live.members._readable_s -= unread_s
    live.members.check()
    assert live.members.fault() == ""
    feeds[1]._broken = True
    monkeypatch.setattr(feeds[1], "_snapshot", unreadable)
    await until(lambda: not feeds[1].synced)
    live.members._readable_s -= unread_s
    live.members.check()
    assert "could be read" in live.members.fault()
    live.members._readable_s += unread_s
    feeds[1]._tasks[0].cancel()
    await until(lambda: live.members.fault() == "nobody follows worker b any more")


async def unreadable():
    raise ValueError("nonsense")


async def test_watch_that_fails_is_started_again(scene, worker, monkeypatch):
    live, registry = scene
    monkeypatch.setattr(kappa_router.live.supervised, "PAUSES_S", (0.01,))
    await joined(live, registry, worker())
    real, failures = live.members._awake_s._clock, [1]

    def clock():
        if failures and asyncio.current_task() is live.members._watch:
            raise RuntimeError(f"a fault of ours {failures.pop()}")
        return real()

    live.members._awake_s._clock = clock
    await until(lambda: sample(live, 'kappa_task_restarts_total{task="watch"}') == 1)
    assert live.members.fault() == ""


async def test_policy_changes_from_now_on_and_never_in_a_record(scene, worker, tmp_path):
    live, registry = scene
    await joined(live, registry, worker())
    assert live.route(ask("one")).policy == "ttft"
    live.use_policy(policy_named("least_backlog"))
    assert live.route(ask("two")).policy == "least_backlog"
    recorded = LiveRouter(live.router.config, str(tmp_path / "log"))
    with pytest.raises(ValueError, match=r"router\.record is on"):
        recorded.use_policy(policy_named("ttft"))
    await recorded.close()
