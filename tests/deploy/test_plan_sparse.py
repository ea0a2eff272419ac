"""What workers are told of approximate answers; head importance is read before a start."""

import json

import numpy as np
import pytest

from deploy.app.model import Model, StartError
from deploy.app.plan import worker_plan
from kappa.plans.clo import FORMAT
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

MODEL = Model("nowhere", model_shape("llama-3.1-8b"), "")


def planned(tmp_path, engine):
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"engine": engine}))
    settings = load_settings(path)
    return worker_plan(settings, settings.all_pools[0], MODEL, "")


def heads(tmp_path, layers):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"format": FORMAT, "importance": [[0.25] * 32] * layers}))
    return str(path)


def test_the_settings_arrive_at_the_worker_with_the_scores_themselves(tmp_path):
    sparse = {"share": 0.2, "lanes": 7, "max_age": 5, "heads": heads(tmp_path, 32)}
    plan = planned(tmp_path, {"kind": "torch", "approx": "ask", "sparse": sparse})
    assert (plan.approx, plan.sparse.settings.slots, plan.sparse.settings.max_age) == ("ask", 7, 5)
    assert plan.sparse.settings.clo.share == 0.2 and plan.sparse.settings.clo.eta == 0.8
    assert np.array_equal(plan.sparse.heads.importance, np.full((32, 32), 0.25))


def test_without_leave_no_file_is_read(tmp_path):
    plan = planned(tmp_path, {"kind": "torch", "sparse": {"heads": "/nowhere"}})
    assert plan.approx == "never" and plan.sparse.heads is None


def test_scores_of_another_model_stop_the_start(tmp_path):
    sparse = {"heads": heads(tmp_path, 3)}
    with pytest.raises(StartError, match=r"engine\.sparse\.heads: .*give 32 layers of 32"):
        planned(tmp_path, {"kind": "torch", "approx": "always", "sparse": sparse})
