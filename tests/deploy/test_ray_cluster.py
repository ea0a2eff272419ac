"""The Ray that is started here: when it does not come up, that is told with a remedy."""

import pytest

from deploy.app.model import StartError
from deploy.app.ray_cluster import OwnRay

pytestmark = pytest.mark.ray


def test_a_ray_that_does_not_come_up_is_told_with_its_logs(monkeypatch):
    import ray

    stopped = []

    def late(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    with pytest.raises(StartError, match=r"timed out during startup.*logs.*try again"):
        OwnRay(workers=2).start("WARNING")
    assert stopped, "what had started of it is stopped"
