"""Fixtures of the decider's tests; what they need is imported only where they are used."""

import pytest


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    from tests.router.scripted import tiny_renderer

    return tiny_renderer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def serve(renderer, monkeypatch):
    from tests.router.scripted import Scene

    scene = Scene(renderer, monkeypatch)
    yield scene
    await scene.close()


@pytest.fixture
def registry(monkeypatch):
    """A registry of replicas of the test's own, which live routers follow."""
    import kappa_router.live.live_router
    from kappa_router.live.replica_registry import ReplicaRegistry

    made = ReplicaRegistry()
    monkeypatch.setattr(kappa_router.live.live_router, "REGISTRY", made)
    return made


@pytest.fixture
def worker(tmp_path):
    """Makes workers that only a report stream and a test's hands are behind."""
    from tests.router.stream_worker import StreamWorker

    made = []

    def make(name="w"):
        made.append(StreamWorker(name, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()
