from types import SimpleNamespace

import pytest

# Imported first in a test, it would log to that test's stderr, which is closed when others log.
import ray.serve.llm  # noqa: F401


@pytest.fixture
def no_ray_starts(monkeypatch):
    """To describe a deployment, Ray Serve LLM asks for the runtime environment, and Ray starts."""
    import ray

    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
