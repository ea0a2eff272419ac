"""What our request router publishes, and what it decides alone; replicas are made up."""

import logging
from types import SimpleNamespace

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

import kappa_router.live.replica_registry
import kappa_router.ray_router
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_router.ray_router import KappaRouter

pytestmark = pytest.mark.ray


class Ours(KappaRouter):
    """Without Ray's constructor, which needs a cluster."""

    def __init__(self):
        self._deployment_id = "d"
        self.initialize_state()


def replica(name, statistics=None):
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=statistics)


def pending(*args, method="__call__"):
    metadata = RequestMetadata(request_id="r", internal_request_id="i", call_method=method)
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


@pytest.fixture
def heard(monkeypatch):
    """Replicas heard of, without Ray's own part in it."""
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    monkeypatch.setattr(kappa_router.live.replica_registry, "REGISTRY", ReplicaRegistry())
    made = Ours()
    made.update_replicas([replica("a"), replica("b", {})])
    return made


@pytest.fixture
def warnings(monkeypatch):
    """What Serve's log is warned of."""
    said = []
    monkeypatch.setattr(logging.getLogger("ray.serve"), "warning", said.append)
    return said


def flights(made):
    return {name: len(state.flights) for name, state in made._kappa_alone._router.workers.items()}


async def test_request_is_reserved_from_its_choice_to_its_end(heard):
    request = pending(SimpleNamespace(prompt="x" * 400))
    a, b = replica("a"), replica("b")
    ranks = await heard.choose_replicas([a, b], request)
    assert sorted(rank[0].replica_id.unique_id for rank in ranks) == ["a", "b"]
    assert sum(flights(heard).values()) == 1
    # Its first choice was full, and the other one took it.
    first, second = (rank[0].replica_id for rank in ranks)
    heard.on_request_routed(request, second, None)
    heard.on_request_completed(first, "i")
    assert flights(heard) == {first.unique_id: 0, second.unique_id: 1}
    heard.on_request_completed(second, "i")
    assert sum(flights(heard).values()) == 0


async def test_router_that_is_shown_no_bodies_says_once_what_to_set(heard, warnings, monkeypatch):
    constants = kappa_router.ray_router.ray.serve._private.constants
    name = "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"
    without = pending()
    # Where bodies are shown there is nothing to say.
    await heard.choose_replicas([replica("a"), replica("b")], pending(SimpleNamespace()))
    assert warnings == []
    monkeypatch.setattr(constants, name, False)
    # A decider's own call, by which Ray makes its router, has no body.
    await heard.choose_replicas([replica("a")], pending(method="record_routing_stats"))
    assert warnings == []
    for _ in range(3):
        ranks = await heard.choose_replicas([replica("a"), replica("b")], without)
    assert len(ranks) == 2
    (said,) = warnings
    assert f"{name}=1" in said and "prefixes count for nothing" in said
    monkeypatch.setattr(constants, name, True)
    await Ours().choose_replicas([replica("a")], without)
    assert warnings == [said]


def test_bad_statistics_are_logged_and_announcements_published(heard, warnings):
    heard.update_replicas([replica("a", {"kappa": {"protocol": 99}}), replica("b", {"x": 1})])
    (said,) = warnings
    assert "replica a" in said and "protocol 99" in said
    received = []
    kappa_router.live.replica_registry.REGISTRY.subscribe(lambda *what: received.append(what[1]))
    assert received == [{"a": {"protocol": 99}, "b": {}}]


def test_death_is_told_as_one_and_a_disappearance_is_not(monkeypatch):
    registry, received = ReplicaRegistry(), []
    monkeypatch.setattr(kappa_router.live.replica_registry, "REGISTRY", registry)
    registry.subscribe(lambda deployment, posted, died: received.append((set(posted), set(died))))
    registry.publish("d", {"a": {}, "b": {}})
    registry.remove("d", "a")
    registry.publish("d", {})
    assert received == [({"a", "b"}, set()), ({"b"}, {"a"}), (set(), set())]


def test_unsubscribed_listener_is_called_no_more():
    registry, received = ReplicaRegistry(), []

    def listener(*what):
        received.append(what)

    registry.subscribe(listener)
    registry.unsubscribe(listener)
    registry.unsubscribe(listener)
    registry.publish("d", {"a": {}})
    assert received == []
