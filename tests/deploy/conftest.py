from types import SimpleNamespace

import pytest


@pytest.fixture
def no_ray_starts(monkeypatch):
    """To describe a deployment, Ray Serve LLM asks for the runtime environment, and Ray starts."""
    import ray

    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
