"""What our request router does with the ingress' choice; replicas are made up."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest

import router.live.replica_registry
from router.live.replica_registry import PinGoneError, ReplicaRegistry
from router.ray_router import PIN_HEADER, KappaRouter

pytestmark = pytest.mark.ray


class Ours(KappaRouter):
    """Without Ray's constructor, which needs a cluster."""

    def __init__(self):
        self.forgotten = []
        self._deployment_id = "d"
        self.initialize_state()

    def _remove_pending_request_from_indices(self, pending_request):
        self.forgotten.append(pending_request)


def replica(name):
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def pending(pin):
    info = RawRequestInfo(headers={PIN_HEADER: pin} if pin else {})
    metadata = RequestMetadata(request_id="r", internal_request_id="i")
    return PendingRequest(args=[None, info], kwargs={}, metadata=metadata)


async def test_the_pinned_replica_is_the_only_candidate():
    a, b = replica("a"), replica("b")
    assert await Ours().choose_replicas([a, b], pending("b")) == [[b]]


async def test_a_pin_that_has_gone_fails_the_request_instead_of_sending_it_anywhere():
    made, request = Ours(), pending("gone")
    await made.choose_replicas([replica("a")], request)
    with pytest.raises(PinGoneError, match="gone"):
        await asyncio.wait_for(request.future, 5.0)
    assert made.forgotten == [request], "nothing of it is kept"
    await made.choose_replicas([replica("a")], request)  # looked at again before Ray drops it


def test_a_death_is_told_as_one_and_a_disappearance_is_not(monkeypatch):
    registry, received = ReplicaRegistry(), []
    monkeypatch.setattr(router.live.replica_registry, "REGISTRY", registry)
    registry.subscribe(lambda deployment, posted, died: received.append((set(posted), set(died))))
    registry.publish("d", {"a": {}, "b": {}})
    registry.remove("d", "a")
    registry.publish("d", {})
    assert received == [({"a", "b"}, set()), ({"b"}, {"a"}), (set(), set())]


def test_an_unsubscribed_listener_is_called_no_more():
    registry, received = ReplicaRegistry(), []

    def listener(*what):
        received.append(what)

    registry.subscribe(listener)
    registry.unsubscribe(listener)
    registry.unsubscribe(listener)
    registry.publish("d", {"a": {}})
    assert received == []
