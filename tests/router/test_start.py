"""Start and stop of the live router, and what of the settings it is made from."""

import asyncio

import pytest

from kappa.settings.routing import FailoverSettings
from kappa_router.api.start import live_router, member_rule, record_file, router_config
from tests.router.scripted import announcement, decider_settings

pytestmark = pytest.mark.ray


def settings(**changes):
    return decider_settings(**{"stale_after_s": 10.0} | changes)


def test_settings_say_when_a_worker_is_gone():
    failover = FailoverSettings(stall_after_s=20, failures=2, pause_s=3, longest_pause_s=9)
    rule = member_rule(settings(failover=failover, drain_s=100.0))
    assert (rule.stall_after_s, rule.lost_after_s) == (20.0, 20.0), "never lost before it stalls"
    assert rule.drain_s > 100.0, "Ray ends it first"
    assert (rule.breaker.failures, rule.breaker.pause_s, rule.breaker.longest_pause_s) == (2, 3, 9)
    assert member_rule(settings()).lost_after_s == 10.0


def test_deciders_have_a_log_and_a_first_worker_each():
    assert record_file(settings(), 0) is None
    assert record_file(settings(record="/x/log.jsonl"), 0) == "/x/log.jsonl"
    several = settings(record="/x/log.jsonl", replicas=2)
    assert [record_file(several, rank) for rank in (0, 1)] == ["/x/log-0.jsonl", "/x/log-1.jsonl"]
    firsts = [router_config(settings(replicas=4), rank).first for rank in range(5)]
    assert firsts == [0.0, 0.25, 0.5, 0.75, 0.0]


async def test_workers_are_known_once_what_they_hold_is(registry):
    live = live_router(settings())
    await live.members.known(0.05)
    registry.publish("d", {"a": announcement("a")})
    await live.members.known(0.05)
    assert not live.members.synced, "it is there, but its state is not known"
    live.members.get("a").subscriber.synced = True
    await live.members.known(5.0)
    assert live.members.synced
    await live.close()
    assert not live.members._closing
    registry.publish("d", {"b": announcement("b")})
    await asyncio.sleep(0.01)
    assert "b" not in live.router.workers, "it is informed of nothing any more"
