"""The pure parts of `kappa bench serve`."""

from random import Random

import pytest

from benchmarks.serving.cluster import _stock_app, one_node
from benchmarks.serving.serve import Answer, Round, has_text, prompt_text, summarize
from deploy.app.model import Model
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape


def played(system, ttfts_s, seconds=2.0):
    answers = tuple(Answer(ttft_s, ttft_s / 2) for ttft_s in ttfts_s)
    return Round(system, "short", 8, seconds, answers)


def test_ours_is_set_beside_each_other_system():
    result = summarize([
        played("stock", [2.0, 4.0, 6.0], seconds=3.0), played("kappa", [1.0, 2.0, 3.0]),
        played("kappa", [2.0, 2.0, 2.0]), played("stock", [4.0, 4.0, 4.0], seconds=3.0),
    ])  # fmt: skip
    mine, stock = result["rows"]
    assert (mine["system"], mine["rounds"], mine["requests"]) == ("kappa", 2, 6)
    assert mine["ttft_s"]["p50"] == 2.0
    assert mine["ttft_s"]["spread"] == 0.0
    assert mine["rps"] == {"median": 1.5, "spread": 0.0}
    assert stock["ttft_s"]["p50"] == 4.0
    (ratio,) = result["ratio_p50"]
    assert (ratio["against"], ratio["ttft"], ratio["rps"]) == ("stock", 0.5, 1.5)


def test_spread_is_that_of_the_rounds_medians():
    result = summarize([played("kappa", [1.0]), played("kappa", [3.0])])
    assert result["rows"][0]["ttft_s"]["spread"] == pytest.approx(1.0)
    assert result["ratio_p50"] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ('data: {"choices":[{"delta":{"content":"a"}}]}', True),
        ('data: {"choices":[{"delta":{"content":""}}]}', True),
        ('data: {"choices":[],"usage":{}}', False),
    ],
)
def test_the_first_event_that_only_names_the_role_is_no_token(line, expected):
    assert has_text(line) is expected


def test_prompts_differ_from_their_first_word_on():
    random = Random(1)
    texts = [prompt_text("1k", random) for _ in range(50)]
    assert len({text.split()[0] for text in texts}) == 50
    assert len(prompt_text("short", random)) < 100


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_stock_engine_stands_where_ours_does_with_the_same_limits(monkeypatch, gpus):
    import ray.serve.llm

    made = []
    monkeypatch.setattr(ray.serve.llm, "build_openai_app", lambda asked: made.append(asked))
    pool = {"name": "a", "profile": "pcie", "replicas": 3, "paced": not gpus,
            "placement": {"gpus": gpus, "resources": {"rack": 1}},
            "engine": {"max_context_tokens": 1024}}  # fmt: skip
    settings = one_node(load_settings(None, pools=[pool], engine={"extra": {"seed": 7}}))
    (only,) = settings.all_pools
    assert (only.most, only.paced) == (1, False)
    _stock_app(settings, Model("/models/x", model_shape("llama-3.1-8b"), ""), {})
    (config,) = made[0]["llm_configs"]
    assert config.engine_kwargs["max_model_len"] == 1024 and config.engine_kwargs["seed"] == 7
    assert ("enforce_eager" in config.engine_kwargs) is (not gpus)
    assert config.engine_kwargs.get("tensor_parallel_size", 0) == gpus
    assert not {"worker_cls", "scheduler_cls", "kv_transfer_config"} & set(config.engine_kwargs)
    bundles = config.placement_group_config["bundles"]
    assert [bundle.get("GPU", 0) for bundle in bundles] == ([1, 1] if gpus else [0])
    assert config.deployment_config["ray_actor_options"]["resources"] == {"rack": 1}
    assert "request_router_config" not in config.deployment_config
    assert ("OMP_NUM_THREADS" in config.runtime_env["env_vars"]) is (not gpus)
