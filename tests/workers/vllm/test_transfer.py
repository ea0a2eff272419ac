"""Blocks from one device cache to another, in threads: what arrives, what is lost, who waits."""

import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kappa.settings.engine import TransferSettings
from workers.vllm import transfer
from workers.vllm.arguments import hand_over
from workers.vllm.link import LOAD_SOURCES
from workers.vllm.options import TRANSFER_KEY
from workers.vllm.transfer import Mover, Receive, Send, fill
from workers.vllm.transfer_files import TransferError, TransferFiles, TransferOptions

pytestmark = pytest.mark.vllm

NAME = "ab" * 16
FILES = TransferSettings(folder="/dev/shm/x", most_bytes=1 << 20, wait_s=2.0)


def cache(seed, blocks=12):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 127, (blocks, size), dtype=torch.int8, generator=generator)
        for size in (64, 32)
    ]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def mover(tmp_path):
    made = Mover(TransferFiles(TransferOptions(str(tmp_path), 1 << 20, 0.3)))
    yield made
    made.shutdown()


class FakeFiles:
    """Transfers that go nowhere, and blocks that are there at once."""

    def __init__(self, blocks):
        self.blocks, self.sent = blocks, None

    def send(self, name, copies, tokens):
        self.sent = copies

    def receive(self, name, tokens, since_s):
        return self.blocks


def until_done(mover, request_id):
    deadline = time.monotonic() + 30
    while request_id not in (done := mover.take_ended()):
        assert mover.wait_for_load(0.05), "nothing was in flight, and nothing came"
        assert time.monotonic() < deadline
    return done


def test_blocks_arrive_where_they_belong_and_nowhere_else(mover):
    source, target = cache(1), cache(2)
    mover.send(Send(NAME, [3, 1, 7], 48), source)
    # What is sent is copied at once: the cache may be used for others from then on.
    for tensor in source:
        tensor.zero_()
    mover.receive(Receive("r", NAME, [5, 0], 1, 32), target)
    assert until_done(mover, "r") == {"r"}
    expected = cache(2)
    for into, sent in zip(expected, cache(1), strict=True):
        into[[5, 0]] = sent[[1, 7]]
    assert same(target, expected)
    assert mover.take_lost() == set() and mover.take_load_s("r") > 0
    assert mover.take_load_s("r") == 0.0 and not mover.wait_for_load(0.0)


def test_blocks_of_a_fake_gpu_are_sent_and_filled_without_mixing_devices():
    with FakeTensorMode():
        gpu = [torch.empty((12, size), dtype=torch.int8, device="cuda") for size in (64, 32)]
        files = FakeFiles([torch.empty((3, size), dtype=torch.int8) for size in (64, 32)])
        made = Mover(files)
        made.send(Send(NAME, [3, 1, 7], 48), gpu)
        made.shutdown()
        assert [(c.device.type, c.shape) for c in files.sent] == [
            ("cpu", (3, 64)),
            ("cpu", (3, 32)),
        ]
        fill(gpu, files.blocks, [5, 0], 1)
        with pytest.raises(TransferError, match="not shaped"):
            fill(gpu, files.blocks[:1], [5, 0], 1)


def test_on_a_gpu_nothing_is_filled_before_earlier_writes_nor_told_before_it_is_there(monkeypatch):
    """The order of waits and writes, with events and streams that only note that they were used."""
    seen = []

    class Noted:
        def __init__(self, what="event"):
            self.what = what

        def record(self):
            seen.append("recorded")

        def synchronize(self):
            seen.append(f"{self.what} waited for")

    monkeypatch.setattr(torch.cuda, "Event", Noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Noted("stream"))
    monkeypatch.setattr(transfer, "fill", lambda *_: seen.append("filled"))

    class Tensor:
        is_cuda, device = True, "cuda:0"

    made = Mover(FakeFiles([]))
    made.receive(Receive("r", NAME, [5], 0, 16), [Tensor()])
    until_done(made, "r")
    made.shutdown()
    assert seen == ["recorded", "event waited for", "filled", "stream waited for"]
    assert made.take_lost() == set()


@pytest.mark.parametrize("broken", [False, True])
def test_what_does_not_come_is_named_block_by_block_and_the_request_goes_on(
    mover, tmp_path, broken
):
    if broken:  # a failure that nobody foresaw
        (tmp_path / f"{NAME}-0.kv").mkdir()
    target = cache(2)
    mover.receive(Receive("r", NAME, [5, 0], 0, 32), target)
    assert until_done(mover, "r") == {"r"}
    assert mover.take_lost() == {5, 0} and mover.take_lost() == set()
    assert same(target, cache(2)) and not mover.wait_for_load(0.0)


def test_transfers_that_will_not_come_wait_together():
    waited = []

    class Files:
        def receive(self, name, tokens, since_s):
            waited.append(since_s)
            raise TransferError("not there")

    made = Mover(Files())
    before_s = time.monotonic()
    for request in "ab":
        made.receive(Receive(request, NAME, [0], 0, 16), cache(2))
    ordered_s = time.monotonic()
    ended = set()
    while ended != {"a", "b"}:
        ended |= made.take_ended()
        made.wait_for_load(1.0)
    made.shutdown()
    assert len(waited) == 2 and all(before_s <= since_s <= ordered_s for since_s in waited)


def test_one_that_is_lost_does_not_stop_the_next(mover):
    source, target = cache(1), cache(2)
    mover.receive(Receive("lost", "cd" * 16, [1], 0, 16), target)
    mover.send(Send(NAME, [0], 16), source)
    mover.receive(Receive("found", NAME, [2], 0, 16), target)
    until_done(mover, "found")
    assert mover.take_lost() == {1}
    assert torch.equal(target[0][2], source[0][0])


@pytest.mark.parametrize(
    "handed",
    [
        cache(1, blocks=1),
        cache(1)[:1],
        [tensor.to(torch.int32) for tensor in cache(1)],
        [tensor[:, :16] for tensor in cache(1)],
    ],
)
def test_blocks_of_another_shape_are_refused_before_anything_is_written(handed):
    target = cache(2)
    with pytest.raises(TransferError, match="not shaped"):
        fill(target, handed, [0, 1], 0)
    assert same(target, cache(2))


def test_a_mover_that_has_stopped_is_asked_no_more(tmp_path):
    before = set(threading.enumerate())
    made = Mover(TransferFiles(TransferOptions(str(tmp_path), 1, 0.1)))
    assert made in LOAD_SOURCES
    made.receive(Receive("r", NAME, [0], 0, 16), cache(2))
    made.shutdown()
    assert made not in LOAD_SOURCES
    assert not set(threading.enumerate()) - before


def test_an_engine_with_a_host_tier_sends_and_receives():
    config = {"kv_connector": "HostTierConnector", "kv_connector_extra_config": {"a": 1}}
    hand_over(FILES, {"kv_transfer_config": config}, None)
    assert config == {
        "kv_connector": "TransferConnector",
        "kv_connector_module_path": "workers.vllm.transfer",
        "kv_connector_extra_config": {
            "a": 1,
            TRANSFER_KEY: {"folder": "/dev/shm/x", "most_bytes": 1 << 20, "wait_s": 2.0},
        },
    }


def test_between_machines_vllms_own_stands_before_the_host_tier():
    arguments = {"kv_transfer_config": {"kv_connector": "HostTierConnector"}}
    hand_over(TransferSettings(connector="nixl"), arguments, None)
    made = arguments["kv_transfer_config"]
    connectors = made["kv_connector_extra_config"]["connectors"]
    assert [one["kv_connector"] for one in connectors] == ["NixlConnector", "HostTierConnector"]
    assert made["kv_load_failure_policy"] == "recompute"


def test_without_a_host_tier_there_is_nothing_to_build_on():
    with pytest.raises(ValueError, match=r"engine\.host_bytes"):
        hand_over(FILES, {}, None)
