"""The server's log of evictions: followed over subscriptions that end, restarts and losses."""

import threading
from types import SimpleNamespace

import pytest

from kappa_workers.vllm.lmcache import scheduler as lmcache_scheduler
from kappa_workers.vllm.lmcache.scheduler import EvictionFeed

pytestmark = pytest.mark.vllm


class Contents:
    """Notes what happens to it, in order."""

    def __init__(self):
        self.events = []

    def evicted(self, hashes):
        self.events += list(hashes)

    def clear(self):
        self.events.append("cleared")


def batch(cursor, *hashes, incarnation=1, lost=False, enabled=True, kind="removed"):
    events = [SimpleNamespace(kind=kind, block_hashes=list(hashes))] if hashes else []
    return SimpleNamespace(
        enabled=enabled, lost=lost, incarnation=incarnation, next_cursor=cursor, events=events
    )


def followed(*subscriptions, monkeypatch):
    """Follow a server that answers each subscription so; what the contents noted, the cursors."""
    monkeypatch.setattr(lmcache_scheduler, "_RESUBSCRIBE_S", 0.0)
    asked, answers, over = [], list(subscriptions), threading.Event()

    def subscribe(me, model, cursor, most):
        asked.append(cursor)
        if not answers:
            over.set()
            return iter([batch(cursor, enabled=False)])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return iter(answer)

    client = SimpleNamespace(subscribe_kv_events=subscribe)
    adapter = SimpleNamespace(req_clients={"tcp://x:1": client}, model_name="m")
    contents = Contents()
    feed = EvictionFeed(adapter, contents)
    feed.start()
    assert over.wait(20.0)
    feed.join(20.0)
    assert not feed.is_alive()
    return contents.events, asked


@pytest.mark.parametrize(
    ("subscriptions", "events", "cursors"),
    [
        # One that ended goes on where it was.
        ([[batch(3, b"a"), batch(5, b"b", b"c")], [batch(7, b"d")]], [b"a", b"b", b"c", b"d"],
         [0, 5, 7]),
        # What was lost, or came from another server, withdraws everything. A log that was trimmed
        # before we came has lost us nothing.
        ([[batch(3, b"a", lost=True), batch(9, b"b", lost=True)], [batch(2, b"c", incarnation=2)]],
         [b"a", "cleared", b"b", "cleared", b"c"], [0, 9, 2]),
        # So does a log that breaks, and is followed again.
        ([[batch(3, b"a")], ConnectionError("gone"), [batch(4, b"b")]], [b"a", "cleared", b"b"],
         [0, 3, 3, 4]),
        # A store is no eviction.
        ([[batch(3, b"a", kind="stored")]], [], [0, 3]),
    ],
)  # fmt: skip
def test_feed_evicts_and_clears_as_its_subscriptions_say(
    monkeypatch, subscriptions, events, cursors
):
    assert followed(*subscriptions, monkeypatch=monkeypatch) == (events, cursors)
