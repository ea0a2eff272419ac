"""Ray's own router with our notices: the private names that it needs, and failures kept inside."""

import inspect
from types import SimpleNamespace

import pytest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

import router.live.replica_registry
from router.ray_own import WatchedRayRouter

pytestmark = pytest.mark.ray


@pytest.fixture
def watched(monkeypatch):
    made = object.__new__(WatchedRayRouter)
    made._deployment_id = "d"
    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "update_replicas", lambda *_: None)
    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "on_replica_actor_died", lambda *_: None)
    return made


def replica(name, stats=None):
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def test_it_decides_nothing_itself():
    assert WatchedRayRouter.choose_replicas is PowerOfTwoChoicesRequestRouter.choose_replicas
    ours = {name for name in vars(WatchedRayRouter) if not name.startswith("__")}
    assert ours - {"_abc_impl"} == {"update_replicas", "on_replica_actor_died", "_kappa_registry"}
    for name in ("update_replicas", "on_replica_actor_died"):
        theirs = getattr(PowerOfTwoChoicesRequestRouter, name)
        assert list(inspect.signature(theirs).parameters) == list(
            inspect.signature(getattr(WatchedRayRouter, name)).parameters
        )


def test_replicas_and_deaths_are_published(watched, monkeypatch):
    calls = []
    registry = router.live.replica_registry.ReplicaRegistry()
    registry.subscribe(lambda deployment, known, died: calls.append((deployment, known, set(died))))
    monkeypatch.setattr(router.live.replica_registry, "REGISTRY", registry)
    watched.update_replicas([replica("a", {"kappa": {"worker": "a"}}), replica("b")])
    watched.on_replica_actor_died(SimpleNamespace(unique_id="a"))
    assert calls == [("d", {"a": {"worker": "a"}, "b": {}}, set()), ("d", {"b": {}}, {"a"})]


def test_a_registry_that_fails_does_not_stop_rays_router(watched, monkeypatch):
    class Broken:
        def publish(self, *_):
            raise RuntimeError("no")

        remove = publish

    monkeypatch.setattr(router.live.replica_registry, "REGISTRY", Broken())
    watched.update_replicas([replica("a")])
    watched.on_replica_actor_died(SimpleNamespace(unique_id="a"))
