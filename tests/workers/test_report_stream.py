"""A replica's stream over real sockets: events and measurements in, one numbered stream out."""

from types import SimpleNamespace

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kappa.protocol import (
    SAMPLES,
    Admission,
    LoadSample,
    Spent,
    StepSample,
    TenantCharge,
    WorkerReport,
)
from kappa_workers.in_flight import InFlight
from kappa_workers.report_stream import ReportStream
from kappa_workers.report_totals import ReportTotals
from kappa_workers.stats_channel import StatsSender

pytestmark = pytest.mark.vllm

_PATIENCE_MS = 20_000


def totals_of():
    return ReportTotals("w", InFlight(0.0))


def step(**changes):
    return {
        "kind": "step", "tokens": 10, "running": 2, "prefilled": [], "pace_s": 0.2,
        "took_s": 0.25, "real_s": 0.1, "overrun": False, "t_s": 1.0,
    } | changes  # fmt: skip


def test_totals_add_up_and_lists_start_anew():
    totals = totals_of()
    assert not totals.urgent
    totals.add(step(prefilled=["a"], spent=[["a", 0.5, 0.25]]))
    totals.add(step(overrun=True))
    totals.add({"kind": "admit", "request_id": "a", "device_tokens": 1, "host_tokens": 2,
                "new_tokens": 3, "t_s": 1.0})  # fmt: skip
    totals.add({"kind": "store", "tokens": 5, "bytes": 500, "took_s": 0.5})
    totals.add({"kind": "wait", "took_s": 0.125})
    totals.add({"kind": "faults", "failed_loads": 3, "misused_blocks": 1})
    totals.lost(2)
    assert totals.urgent
    report = totals.take(9.0)
    assert report == WorkerReport(
        worker="w", time_s=9.0, steps_total=2, step_seconds_total=0.5,
        step_tokens_total=20,
        overruns_total=1, store_tokens_total=5, store_bytes_total=500, store_seconds_total=0.5,
        store_wait_seconds_total=0.125, event_gaps_total=2,
        failed_loads_total=3, misused_blocks_total=1,
        admitted=(Admission("a", 1, 2, 3),), prefilled=("a",), spent=(Spent("a", 0.5, 0.25),),
    )  # fmt: skip
    assert not totals.urgent
    again = totals.take(10.0)
    assert (again.admitted, again.prefilled, again.spent, again.steps_total) == ((), (), (), 2)


def iterations(**changes):
    return {
        "kind": "iterations", "iterations": 9, "queued_iterations": 4, "budget_fill": 2.5,
        "vram_fill": 3.5, "passed": {"vram": 7}, "preemptions": 1, "rule_errors": 2,
        "charges": {}, "waiting": 3, "loading": 2, "running": 1,
    } | changes  # fmt: skip


def test_the_schedulers_totals_are_taken_over_as_they_are():
    totals = totals_of()
    totals.add(iterations(iterations=8, waiting=5))
    totals.add(iterations())
    totals.add({"kind": "store_dropped", "blocks": 2, "tokens": 64, "why": "backlog"})
    assert not totals.urgent
    assert totals.take(9.0) == WorkerReport(
        worker="w", time_s=9.0, iterations_total=9, queued_iterations_total=4,
        budget_fill_sum=2.5, vram_fill_sum=3.5, passed_total={"vram": 7}, preemptions_total=1,
        rule_errors_total=2, stores_dropped_total=1, waiting=3, loading=2, running=1,
    )  # fmt: skip


def test_totals_report_new_charges_and_all_every_ten_seconds():
    totals = totals_of()
    totals.add(iterations(charges={"a": [1.0, 0.0, 0.0], "b": [1.0, 2.0, 3.0]}))
    totals.add(iterations(charges={"a": [2.0, 0.0, 0.5]}))
    both = (TenantCharge("a", 2.0, 0.0, 0.5), TenantCharge("b", 1.0, 2.0, 3.0))
    assert totals.take(100.0).charges == both
    assert totals.take(101.0).charges == ()
    totals.add(iterations(charges={"a": [3.0, 0.0, 0.5]}))
    assert [c.tenant for c in totals.take(102.0).charges] == ["a"]
    assert {c.tenant: c.vram_s for c in totals.take(110.0).charges} == {"a": 3.0, "b": 1.0}


def test_a_report_holds_the_latest_step_and_load_of_each_size():
    totals = totals_of()
    for took_s, tokens in ((0.1, 20), (0.2, 31), (0.3, 32), (9.0, 1)):
        totals.add(step(tokens=tokens, work=[tokens, 2.5, 40, 3], took_s=took_s))
    totals.add(step(took_s=5.0))  # of an engine that does not say what it computed
    load = {"kind": "load", "tokens": 640, "bytes": 6400, "took_s": 0.25}
    totals.add(load)
    totals.add(load | {"tokens": 650, "took_s": 0.5, "disk_tokens": 32})
    report = totals.take(0.0)
    assert report.h2d_bytes_per_s == 6400 / 0.25
    assert report.steps == (
        StepSample(31, 2.5, 40, 0.2), StepSample(32, 2.5, 40, 0.3), StepSample(1, 2.5, 40, 9.0),
    )  # fmt: skip
    assert report.loads == (LoadSample(640, 0.25), LoadSample(650, 0.5, 32))
    assert totals.take(1.0).steps == ()


def test_a_report_holds_sixteen_steps_at_most():
    totals = totals_of()
    for size in range(40):
        totals.add(step(tokens=2**size - 1, work=[2**size - 1, 0.0, 0, 1]))
    assert len(totals.take(0.0).steps) == SAMPLES


def test_bandwidth_is_smoothed_over_loads():
    totals = totals_of()
    load = {"kind": "load", "tokens": 4, "bytes": 100, "took_s": 1.0}
    totals.add(load)
    assert totals.take(0.0).h2d_bytes_per_s == 100
    totals.add(load | {"bytes": 200})
    report = totals.take(0.0)
    assert report.h2d_bytes_per_s == pytest.approx(120)
    assert (report.load_tokens_total, report.load_bytes_total) == (8, 300)
    totals.add(load | {"took_s": 0.0})  # too short to time: the speed stays
    assert totals.take(0.0).h2d_bytes_per_s == pytest.approx(120)


def test_a_load_from_disk_says_nothing_of_the_link():
    totals = totals_of()
    load = {"kind": "load", "tokens": 4, "bytes": 100, "took_s": 1.0}
    for message in (load, load | {"disk_tokens": 2, "took_s": 50.0}):
        totals.add(message)
    report = totals.take(0.0)
    assert (report.h2d_bytes_per_s, report.load_seconds_total) == (100, 51.0)


def test_unknown_kinds_are_ignored_and_nonsense_is_not():
    totals = totals_of()
    totals.add({"kind": "weather"})
    totals.add({})
    with pytest.raises(ValueError, match="not a number"):
        totals.add({"kind": "wait", "took_s": "long"})


def told(payload):
    return WorkerReport.from_dict(msgspec.msgpack.decode(payload))


class Engine:
    """The engine's side of a replica's sockets."""

    def __init__(self, folder):
        self.context = zmq.Context()
        self.kv_endpoint, self.stats_endpoint = f"ipc://{folder}/kv", f"ipc://{folder}/stats"
        self.kv = self.context.socket(zmq.XPUB)
        self.kv.bind(self.kv_endpoint)
        self.stream = ReportStream("w", "127.0.0.1", self.stats_endpoint, self.kv_endpoint)
        self.stats = StatsSender(self.stats_endpoint)
        self.reader = self._socket(zmq.SUB)
        self.reader.setsockopt(zmq.SUBSCRIBE, b"")
        self.reader.connect(self.stream.events_endpoint)
        self.seen = -1
        self.stream.start()
        self.kv.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        assert self.kv.recv() == b"\x01"  # the stream has subscribed

    def _socket(self, kind):
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        return socket

    def publish(self, seq):
        payload = kv_payload(100 + seq)
        self.kv.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
        return payload

    def next(self, kind, accept=lambda _: True):
        """The next message of a kind; numbers must rise by one from the first that was seen."""
        while True:
            what, seq, payload = self.reader.recv_multipart()
            number = int.from_bytes(seq, "big")
            assert self.seen in (-1, number - 1)
            self.seen = number
            if what == kind and accept(payload):
                return payload

    def report(self, accept=lambda _: True):
        """The next report that is accepted."""
        return told(self.next(b"report", lambda payload: accept(told(payload))))

    def snapshot(self):
        asker = self._socket(zmq.DEALER)
        asker.connect(self.stream.snapshot_endpoint)
        asker.send_multipart([b"", b"snapshot"])
        empty, seq, *batches = asker.recv_multipart()
        assert empty == b""
        return int.from_bytes(seq, "big"), batches

    def close(self):
        self.stream.close()
        self.context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    made.next(b"report")  # the reader has subscribed too: reports come by themselves
    yield made
    made.close()


def test_engine_events_pass_through_unchanged_and_numbered(engine):
    sent = [engine.publish(seq) for seq in range(3)]
    assert [engine.next(b"kv") for _ in sent] == sent


def test_a_snapshot_holds_what_was_published_up_to_its_number(engine):
    engine.publish(0)
    engine.next(b"kv")
    number_of_event = engine.seen
    seq, batches = engine.snapshot()
    assert seq >= number_of_event
    (batch,) = (msgspec.msgpack.decode(b, type=KVEventBatch) for b in batches)
    assert [event.block_hashes for event in batch.events] == [[100]]


def test_gap_in_engine_events_resets_readers_and_snapshot(engine):
    engine.publish(0)
    engine.publish(2)
    engine.next(b"kv")
    engine.next(b"reset")
    engine.next(b"kv")
    _, batches = engine.snapshot()
    events = [e for b in batches for e in msgspec.msgpack.decode(b, type=KVEventBatch).events]
    assert [event.block_hashes for event in events] == [[102]]
    assert engine.report(lambda report: report.event_gaps_total).event_gaps_total == 1


def test_events_from_before_the_stream_listened_count_as_a_gap(engine):
    payload = engine.publish(3)  # 0 to 2 were published before
    assert engine.next(b"reset") == b""
    assert engine.next(b"kv") == payload
    assert engine.report(lambda report: report.event_gaps_total).event_gaps_total == 1


def test_what_is_in_flight_follows_a_snapshot(engine):
    body = SimpleNamespace(vllm_xargs={"kappa_request_id": "r"})
    engine.stream.in_flight.arrived(body, 0.0)

    engine.report(lambda report: report.arrived)
    seq, _ = engine.snapshot()
    report = engine.report(lambda report: report.in_flight is not None)
    assert [arrival.request_id for arrival in report.in_flight] == ["r"]
    assert engine.seen > seq, "numbered, so that a reader who misses it knows"


def kv_payload(number):
    event = BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[0, 1], block_size=2,
        lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[event]))


def test_news_leave_in_lots_and_first_tokens_sooner(tmp_path, monkeypatch):
    now, sent = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("kappa_workers.report_stream.time", clock)
    stream = ReportStream("w", "127.0.0.1", f"ipc://{tmp_path}/stats", f"ipc://{tmp_path}/kv")
    monkeypatch.setattr(stream, "_publish", lambda kind, payload: sent.append(kind))

    def after(seconds):
        now[0] += seconds
        sent.clear()
        stream._publish_lot()
        return sent

    assert after(0.0) == [b"report"], "the first"
    stream.in_flight.arrived(SimpleNamespace(vllm_xargs={"kappa_request_id": "r"}), 0.0)
    for number in range(2):
        stream._add_events(number, kv_payload(number))
    assert after(0.024) == []
    assert after(0.002) == [b"kv", b"kv", b"report"], "one lot"
    stream.totals.add(step(prefilled=["r"]))
    assert after(0.009) == []
    assert after(0.002) == [b"report"]
    stream._add_events(2, kv_payload(2))
    assert after(0.026) == [b"kv"], "which change no prediction by themselves"
    assert after(0.1) == [] and after(0.2) == [b"report"]
    stream.close()


def test_measurements_come_out_as_reports(engine):
    engine.stats.send(step(prefilled=["r"]))
    report = engine.report(lambda report: report.prefilled)
    assert (report.worker, report.prefilled, report.steps_total) == ("w", ("r",), 1)


def test_nonsense_from_the_engine_does_not_stop_the_stream(engine):
    engine.stats.send(step())
    engine.stats.send({"kind": "wait", "took_s": "long"}, urgent=False)
    engine.kv.send_multipart([b"kv", (0).to_bytes(8, "big"), b"\xc1"])
    engine.stats.send(step(prefilled=["after"]))
    engine.report(lambda report: report.prefilled == ("after",))
    engine.publish(1)
    engine.next(b"kv")


def test_sender_without_a_reader_neither_blocks_nor_keeps(tmp_path):
    for endpoint in (f"ipc://{tmp_path}/unread", ""):
        sender = StatsSender(endpoint)
        for _ in range(10_050):
            sender.send({"kind": "wait"})
        assert sender._held == []


def test_sender_holds_unurgent_messages_for_urgent_ones_or_50_ms(tmp_path, monkeypatch):
    context = zmq.Context()
    there = context.socket(zmq.PULL)
    there.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
    there.bind(f"ipc://{tmp_path}/stats")
    now = [10.0]
    monkeypatch.setattr(
        "kappa_workers.stats_channel.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    sender = StatsSender(f"ipc://{tmp_path}/stats")

    def arrived(*numbers):
        got = [msgspec.msgpack.decode(there.recv())["n"] for _ in numbers]
        return got == list(numbers) and not there.poll(50)

    sender.send({"n": 0})
    sender.send({"n": 1}, urgent=False)
    assert arrived(0)
    sender.send({"n": 2})
    assert arrived(1, 2), "in their order"
    now[0] += 0.049
    sender.send({"n": 3}, urgent=False)
    assert arrived()
    now[0] += 0.002
    sender.send({"n": 4}, urgent=False)
    assert arrived(3, 4)
    sender.send({"n": 5}, urgent=False)
    sender.flush()
    sender.flush()
    assert arrived(5)
    context.destroy(linger=0)


def test_closing_ends_the_thread(tmp_path):
    engine = Engine(tmp_path)
    engine.close()
    assert not engine.stream._thread.is_alive()


def test_an_unreadable_engine_event_invalidates_what_is_known(engine):
    engine.publish(0)
    engine.next(b"kv")
    engine.kv.send_multipart([b"kv", (1).to_bytes(8, "big"), b"not msgpack at all"])
    engine.next(b"reset")
    assert engine.snapshot()[1] == []
    payload = engine.publish(2)
    assert engine.next(b"kv") == payload


def test_what_is_known_besides_the_engine_goes_into_every_report(engine):
    engine.stream.complete = lambda report: replace(report, power_w=123.0, power_source="model")
    assert engine.report(lambda report: report.power_w == 123.0)


@pytest.mark.parametrize("odd", [2**64, -(2**63) - 1, "\ud800", object(), {1j: 2}])
def test_sender_drops_what_it_cannot_encode_and_sends_the_next(stats, odd):
    endpoint, message = stats
    sender = StatsSender(endpoint)
    for value in (odd, 1):
        sender.send({"kind": "arrive", "max_tokens": value})
    assert message()["max_tokens"] == 1
