"""Blocks between host tiers over real sockets: given, taken, and every way to fail."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kappa.host import free_port
from kappa.protocol import PEER_PARAM
from kappa_workers.vllm import peer_server
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.options import PeerOptions
from kappa_workers.vllm.peer_fetch import HostTierFetches
from kappa_workers.vllm.peer_server import (
    LENGTH,
    BlockQuestion,
    HostRows,
    PeerServer,
    mapped_rows,
    receive_frame,
    send_frame,
    share_layout,
    shared_tensor,
)

pytestmark = pytest.mark.vllm

HOST, BLOCKS, TOKENS, WIDTHS = "127.0.0.1", 8, 16, (64, 192)
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
CONTEXT = ReqContext(req_id="r")


def key(number):
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Tier:
    """A host tier with its rows, its server and its fetches; block n is stored as bytes of n."""

    def __init__(self, blocks=BLOCKS, widths=WIDTHS, **options):
        self.reported, self.recorded = [], []
        self.manager = HostTierManager(
            num_blocks=blocks, cache_policy="lru", enable_events=True,
            block_tokens=TOKENS, backlog_s=1e9, report=self.reported.append,
        )  # fmt: skip
        self.tensors = [np.zeros((blocks, width), dtype=np.uint8) for width in widths]
        self.rows = HostRows(self.tensors)
        given = {"layout": "/nowhere", "host": HOST, "port": free_port(HOST), "token": "secret"}
        self.options = PeerOptions(**{**given, "wait_s": 5.0, **options})
        self.server = PeerServer(
            self.options, lambda: self.rows, self.manager.place, self.manager.knows
        )
        self.fetches = HostTierFetches(
            self.options, self.manager, lambda: self.rows, self.reported.append,
            lambda request, block, key: self.recorded.append((request.request_id, block, key)),
            TOKENS,
        )  # fmt: skip

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.options.port}/{self.options.token}"

    def store(self, *numbers):
        output = self.manager.prepare_store([key(n) for n in numbers], CONTEXT)
        for stored in output.keys_to_store:
            number = int.from_bytes(stored[:32], "big")
            for tensor in self.tensors:
                tensor[self.manager.slot(stored)] = number
        self.manager.complete_store(output.keys_to_store, CONTEXT)

    def begin(self, endpoint, blocks, start=0, stop=None, name="r", handed=False):
        params = {"endpoint": endpoint, "start": start, "stop": stop or len(blocks) * TOKENS}
        params["handed"] = handed
        request = SimpleNamespace(request_id=name, kv_transfer_params={PEER_PARAM: params})
        self.fetches.begin(request, CONTEXT, [key(n) for n in blocks])

    def fetch(self, *args, **options):
        self.begin(*args, **options)
        while self.fetches.under_way("r"):
            self.fetches.wait(1.0)
        return self.fetches.take_ended()

    def found(self, *numbers):
        return [self.manager.lookup(key(n), CONTEXT) for n in numbers]

    def content(self, number):
        slot = self.manager.slot(key(number))
        return [set(tensor[slot].tolist()) for tensor in self.tensors]

    def kinds(self):
        return [m["kind"] for m in self.reported]

    def close(self):
        self.server.close()
        self.fetches.close()


@pytest.fixture
def tier(closing):
    return lambda **options: closing(Tier(**options))


def test_fetch_brings_a_peers_blocks_whole_and_announces_them(tier):
    giver, taker = tier(), tier()
    giver.store(1, 2, 3)
    assert taker.fetch(giver.endpoint, [1, 2, 3])
    assert taker.found(1, 2, 3) == [HIT, HIT, HIT]
    assert [taker.content(n) for n in (1, 2, 3)] == [[{n}, {n}] for n in (1, 2, 3)]
    assert taker.recorded == [("r", i, key(i + 1)) for i in range(3)]
    (news,) = [m for m in taker.reported if m["kind"] == "fetch"]
    assert news["tokens"] == 3 * TOKENS and news["bytes"] == 3 * sum(WIDTHS)
    assert news["took_s"] > 0 and "tier_failed" not in taker.kinds()


def test_blocks_are_awaited_by_look_ups_until_they_came(tier):
    giver, taker = tier(), tier()
    giver.store(1)
    with giver.server._card:  # its network card is busy
        taker.begin(giver.endpoint, [1])
        assert taker.fetches.under_way("r") and taker.found(1) == [PENDING]
    while taker.fetches.under_way("r"):
        taker.fetches.wait(1.0)
    taker.fetches.settle()
    assert taker.found(1) == [HIT]


def test_only_what_is_missing_between_start_and_stop_is_fetched(tier):
    giver, taker = tier(), tier()
    giver.store(1, 2, 3, 4, 5)
    taker.store(3)
    taker.fetch(giver.endpoint, [1, 2, 3, 4, 5], start=TOKENS, stop=4 * TOKENS)
    assert taker.found(1, 2, 3, 4, 5) == [MISS, HIT, HIT, HIT, MISS]
    assert [block for _, block, _ in taker.recorded] == [1, 3]


def test_what_the_peer_has_evicted_is_not_waited_for(tier):
    giver, taker = tier(), tier()
    giver.store(1, 3)
    taker.fetch(giver.endpoint, [1, 2, 3])
    assert taker.found(1, 2, 3) == [HIT, MISS, MISS]
    assert taker.manager.free_blocks == BLOCKS - 1


def test_what_was_overwritten_while_it_was_sent_is_thrown_away(tier):
    """The peer evicts block 2 after its bytes went out, and stores another in its place."""
    giver, taker = tier(blocks=3), tier()
    giver.store(1, 2, 3)
    of, evicted = giver.rows.of, []

    def slow(slot):
        rows = of(slot)
        if slot == giver.manager.slot(key(3)) and not evicted:
            giver.manager.touch([key(1), key(3)], CONTEXT)
            giver.store(9)
            evicted.append(slot)
        return rows

    giver.rows.of = slow
    taker.fetch(giver.endpoint, [1, 2, 3])
    assert taker.found(1, 2, 3) == [HIT, MISS, MISS]
    assert taker.content(1) == [{1}, {1}]


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1:{closed}/secret", "refused"),
        ("127.0.0.1:{open}/guess", "closed the connection"),
        ("nonsense", "its address is none"),
    ],
)
def test_fetch_from_a_failing_peer_leaves_the_room_free(tier, caplog, endpoint, why):
    giver, taker = tier(), tier()
    giver.store(1, 2)
    taker.fetch(endpoint.format(closed=free_port(HOST), open=giver.options.port), [1, 2])
    assert taker.found(1, 2) == [MISS, MISS] and taker.manager.free_blocks == BLOCKS
    assert [m["why"] for m in taker.reported if m["kind"] == "tier_failed"] == ["fetch"]
    assert not taker.recorded


def test_a_peer_that_failed_is_left_alone_for_a_while(tier):
    giver, taker = tier(), tier()
    giver.store(1)
    gone = f"127.0.0.1:{free_port(HOST)}/secret"
    taker.fetch(gone, [1])
    asked = []
    real, socket.create_connection = socket.create_connection, lambda *a: asked.append(a)
    try:
        taker.fetch(gone, [1])
    finally:
        socket.create_connection = real
    assert not asked


def test_a_peer_that_dies_in_mid_transfer_leaves_nothing_behind(tier):
    taker, listener = tier(wait_s=2.0), socket.create_server(("127.0.0.1", 0))

    def half():
        connection, _ = listener.accept()
        with connection:
            receive_frame(connection, time.monotonic() + 20.0)
            send_frame(connection, msgspec.msgpack.encode((2, list(WIDTHS))))
            connection.sendall(b"x" * (sum(WIDTHS) + 10))

    threading.Thread(target=half, daemon=True).start()
    taker.fetch(f"127.0.0.1:{listener.getsockname()[1]}/secret", [1, 2])
    listener.close()
    assert taker.found(1, 2) == [MISS, MISS] and taker.manager.free_blocks == BLOCKS


def test_a_peer_that_says_nothing_is_given_up(tier):
    taker, listener = tier(wait_s=0.2), socket.create_server(("127.0.0.1", 0))
    taker.fetch(f"127.0.0.1:{listener.getsockname()[1]}/secret", [1])
    listener.close()
    assert taker.found(1) == [MISS]


def test_a_peer_of_another_shape_gives_nothing(tier):
    giver, taker = tier(widths=(64, 64)), tier()
    giver.store(1)
    taker.fetch(giver.endpoint, [1])
    assert taker.found(1) == [MISS]


def test_copies_displace_only_older_copies(tier):
    giver, taker = tier(), tier()
    giver.store(1, 2, 3, 4, 5)
    taker.store(20, 21, 22, 23, 24)
    assert taker.manager.room_blocks == 3
    taker.fetch(giver.endpoint, [1, 2, 3])
    assert taker.manager.free_blocks == 0 and taker.manager.room_blocks == 3
    taker.fetch(giver.endpoint, [4, 5])
    assert taker.found(1, 2, 3, 4, 5) == [MISS, MISS, HIT, HIT, HIT]
    assert taker.found(20, 21, 22, 23, 24) == [HIT] * 5
    removed = [e.keys for e in taker.manager.take_events() if e.removed]
    assert removed == [[key(1), key(2)]]


def test_a_copy_that_is_being_loaded_stays(tier):
    giver, taker = tier(), tier(blocks=2)
    giver.store(1, 2, 3, 4)
    taker.fetch(giver.endpoint, [1, 2])
    taker.manager.prepare_load([key(1)], CONTEXT)
    taker.fetch(giver.endpoint, [3, 4])
    assert taker.found(1, 2, 3, 4) == [HIT, MISS, HIT, MISS]


def test_a_tier_full_of_its_own_fetches_nothing(tier):
    giver, taker = tier(), tier(blocks=2)
    giver.store(1)
    taker.store(20, 21)
    taker.begin(giver.endpoint, [1])
    assert not taker.fetches.under_way("r") and taker.found(20, 21) == [HIT, HIT]


def test_handed_over_prompt_displaces_held_blocks_and_stays(tier):
    giver, taker = tier(), tier(blocks=2)
    giver.store(1, 2, 3)
    taker.store(20, 21)
    taker.fetch(giver.endpoint, [1, 2], handed=True)
    assert taker.found(1, 2, 20, 21) == [HIT, HIT, MISS, MISS]
    assert taker.manager.room_blocks == 0, "no copies, which others may displace"
    taker.fetch(giver.endpoint, [3])
    assert taker.found(1, 2, 3) == [HIT, HIT, MISS]


def test_handed_over_prompt_is_waited_for_until_stored(tier):
    giver, taker = tier(), tier()
    giver.store(1)
    output = giver.manager.prepare_store([key(2)], CONTEXT)
    taker.begin(giver.endpoint, [1, 2, 3], handed=True)
    taker.fetches.wait(0.1)
    assert taker.fetches.under_way("r")
    giver.manager.complete_store(output.keys_to_store, CONTEXT)
    while taker.fetches.under_way("r"):
        taker.fetches.wait(1.0)
    taker.fetches.settle()
    assert taker.found(1, 2, 3) == [HIT, HIT, MISS], "a block that no one stores is not waited for"


def test_fetch_gives_up_on_a_store_that_never_ends(tier, monkeypatch):
    passed_s = [0.0]  # by its clock no time passes but while it waits for the store
    clock = SimpleNamespace(monotonic=lambda: sum(passed_s), sleep=lambda _: passed_s.append(1.0))
    monkeypatch.setattr(peer_server, "time", clock)
    giver, taker = tier(), tier()
    giver.store(1)
    giver.manager.prepare_store([key(2)], CONTEXT)
    taker.fetch(giver.endpoint, [1, 2], handed=True)
    assert taker.found(1, 2) == [HIT, MISS]


def test_fetch_of_an_ended_request_still_settles_its_room(tier):
    giver, taker = tier(), tier()
    giver.store(1)
    with giver.server._card:
        taker.begin(giver.endpoint, [1])
        taker.fetches.finished("r")
        assert taker.fetches.has_work and not taker.fetches.under_way("r")
    deadline = time.monotonic() + 20.0
    while taker.fetches.has_work and time.monotonic() < deadline:
        taker.fetches.settle()
    assert taker.found(1) == [HIT] and not taker.fetches.has_work


def test_settle_loses_no_orphan_that_comes_while_it_looks(tier, monkeypatch):
    fetches, completed = tier().fetches, []

    class Coming:
        """Comes between one look and the next."""

        looks = 0

        @property
        def came(self):
            self.looks += 1
            return [1] if self.looks > 1 else None

    fetches._orphans = [one := Coming()]
    monkeypatch.setattr(fetches, "_complete", completed.append)
    fetches.settle()
    fetches.settle()
    assert completed == [one] and not fetches.has_work


def test_a_reset_waits_until_nothing_writes_to_the_tier(tier):
    giver, taker = tier(), tier()
    giver.store(1, 2)
    with giver.server._card:
        taker.begin(giver.endpoint, [1, 2])
        threading.Timer(0.05, giver.server.close).start()
        reset = threading.Thread(target=taker.manager.reset_cache)
        reset.start()
    reset.join(20.0)
    assert not reset.is_alive() and taker.manager.free_blocks == BLOCKS
    assert not taker.fetches.take_ended() and taker.found(1, 2) == [MISS, MISS]


@pytest.mark.parametrize("params", [7, "x", {}, {"endpoint": 1}, {"endpoint": "a", "start": "0"}])
def test_parameters_that_say_nothing_of_a_peer_are_ignored(tier, params):
    taker = tier()
    request = SimpleNamespace(request_id="r", kv_transfer_params={PEER_PARAM: params})
    taker.fetches.begin(request, CONTEXT, [key(1)])
    assert not taker.fetches.under_way("r") and taker.manager.free_blocks == BLOCKS


def test_paced_fetch_takes_as_long_as_the_named_network(tier):
    giver, taker = tier(), tier(fixed_s=0.02, token_s=0.01)
    giver.store(1, 2)
    taker.fetch(giver.endpoint, [1, 2])
    (news,) = [m for m in taker.reported if m["kind"] == "fetch"]
    assert news["took_s"] >= 0.02 + 2 * TOKENS * 0.01


def connected(giver):
    return socket.create_connection((HOST, giver.options.port), 20.0)


def is_ended(connection):
    """Whether the server sends nothing more; bounded by the connection's timeout."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it left bytes of ours unread
        return True


def trickle(connection):
    """Send a byte now and then, for some 20 s at most; whether the other side ended that."""
    try:
        for _ in range(2000):
            connection.sendall(b"\0")
            time.sleep(0.01)
    except OSError:
        return True
    return False


def test_a_server_says_nothing_to_who_does_not_know_its_token(tier):
    giver = tier()
    giver.store(1)
    for token in ("", "secre", "secrets", "s\u00e9cret"):
        with connected(giver) as connection:
            question = BlockQuestion(token, [bytes(key(1))])
            send_frame(connection, msgspec.msgpack.encode(question))
            assert is_ended(connection)


def test_no_keys_are_read_of_who_does_not_know_the_token(tier, monkeypatch):
    monkeypatch.setattr(peer_server, "_QUESTION_S", 600.0)
    giver = tier(wait_s=600.0)
    with connected(giver) as connection:
        begin = msgspec.msgpack.encode({"token": "guess!"})
        connection.sendall(LENGTH.pack(4 << 20) + begin)
        assert is_ended(connection), "the rest was waited for"


def test_server_ends_a_trickling_question_with_the_right_token(tier, monkeypatch):
    monkeypatch.setattr(peer_server, "_QUESTION_S", 0.2)
    giver = tier()
    begin = msgspec.msgpack.encode({"token": giver.options.token, "keys": []})
    with connected(giver) as connection:
        connection.sendall(LENGTH.pack(4 << 20) + begin)
        assert trickle(connection)


def test_connections_without_the_token_keep_no_reader_out(tier, monkeypatch):
    monkeypatch.setattr(peer_server, "_QUESTION_S", 600.0)
    monkeypatch.setattr(peer_server, "_MOST_STRANGERS", 18)
    giver, taker = tier(wait_s=600.0), tier()
    giver.store(1)
    with ExitStack() as open_ones:
        strangers = [open_ones.enter_context(connected(giver)) for _ in range(20)]
        for connection in strangers:
            connection.sendall(LENGTH.pack(4 << 20))
        taker.fetch(giver.endpoint, [1])
        assert taker.found(1) == [HIT]
        assert is_ended(strangers[0]), "the oldest gives way"


def test_a_peer_that_trickles_its_answer_is_given_up(tier):
    taker, listener = tier(wait_s=2.0), socket.create_server((HOST, 0))
    ended = []

    def answer():
        connection, _ = listener.accept()
        with connection:
            receive_frame(connection, time.monotonic() + 20.0)
            connection.sendall(LENGTH.pack(4 << 20))
            ended.append(trickle(connection))

    giver = threading.Thread(target=answer, daemon=True)
    giver.start()
    taker.fetch(f"{HOST}:{listener.getsockname()[1]}/secret", [1])
    giver.join(60.0)
    listener.close()
    assert ended == [True] and taker.found(1) == [MISS]


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93", LENGTH.pack(1 << 30)])
def test_garbage_ends_a_reader_and_not_the_server(tier, body):
    giver, taker = tier(), tier()
    giver.store(1)
    with socket.create_connection(("127.0.0.1", giver.options.port), 5.0) as connection:
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    taker.fetch(giver.endpoint, [1])
    assert taker.found(1) == [HIT]


def test_rows_that_one_process_makes_are_the_same_in_another(tmp_path):
    layout = tmp_path / "peers" / "w"
    assert mapped_rows(layout) is None
    place, tensor = shared_tensor(4, 32)
    share_layout(layout, 4, [(place, 32)])
    rows = mapped_rows(layout)
    assert rows.widths == [32] and not layout.exists()
    rows.of(2)[0][:] = bytes(range(32))
    assert tensor[2].tolist() == list(range(32)) and not tensor[[0, 1, 3]].any()
