"""The pure parts of `kappa bench serve`."""

import asyncio
import itertools
import json
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
from kappa_benchmarks.serving.cluster import one_node, with_room
from kappa_benchmarks.serving.prompts import most_tokens, opening, prompt_text
from kappa_benchmarks.serving.serve import Answer, Bench, Round, delta_of, has_token, summarize
from kappa_benchmarks.serving.stock import stock_app
from kappa_deploy.app.model import Model


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
    assert has_token(delta_of(line)) is expected


def test_prompts_differ_from_their_first_word_on():
    random = Random(1)
    texts = [prompt_text("1k", random) for _ in range(50)]
    assert len({text.split()[0] for text in texts}) == 50
    assert len(prompt_text("short", random)) < 100


@pytest.mark.parametrize("gpus", [0, 2])
def test_stock_engine_has_our_place_and_limits(monkeypatch, gpus):
    import ray.serve.llm

    made = []
    monkeypatch.setattr(ray.serve.llm, "build_openai_app", lambda asked: made.append(asked))
    pool = {"name": "a", "profile": "pcie", "replicas": 3, "paced": not gpus,
            "placement": {"gpus": gpus, "resources": {"rack": 1}},
            "engine": {"max_context_tokens": 1024}}  # fmt: skip
    settings = one_node(load_settings(None, pools=[pool], engine={"extra": {"seed": 7}}))
    (only,) = settings.all_pools
    assert (only.most, only.paced) == (1, False)
    stock_app(settings, Model("/models/x", model_shape("llama-3.1-8b"), ""), {})
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


def test_direct_streaming_has_no_ingress_to_configure(monkeypatch):
    import ray.serve.llm

    made = []
    monkeypatch.setattr(ray.serve.llm, "build_openai_app", lambda asked: made.append(asked))
    settings = one_node(load_settings(None))
    stock_app(settings, Model("/models/x", model_shape("llama-3.1-8b"), ""), {}, direct=True)
    assert list(made[0]) == ["llm_configs"]


def test_opening_ends_with_a_user_and_has_its_names_length():
    messages = opening("8k", Random(1))
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2 + ["user"]
    assert 8_000 <= sum(len(one["content"].split()) for one in messages) < 8_100
    assert most_tokens("8k", 10) > 9_000 and most_tokens("short", 10) == 0


def test_what_the_engine_computed_is_taken_off_every_system():
    rounds = [played("kappa", [0.5]), played("vllm", [0.9])]
    first, second = summarize(rounds)["rows"]
    assert first["beyond_engine_s"] is None and second["beyond_engine_s"] is None
    rounds[1] = Round("vllm", "short", 8, 2.0, rounds[1].answers, engine_s=0.4)
    first, second = summarize(rounds)["rows"]
    assert first["beyond_engine_s"] == pytest.approx(0.1)
    assert second["beyond_engine_s"] == pytest.approx(0.5)


def test_a_model_and_an_engine_get_room_for_a_long_conversation(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 100}')
    made = Model(str(model), model_shape("llama-3.1-8b"), "")
    monkeypatch.setattr("kappa_benchmarks.serving.cluster.prepare_model", lambda settings: made)
    settings = one_node(load_settings(None))
    assert with_room(settings, 8_000, tmp_path) is settings
    roomy = with_room(settings, 40_000, tmp_path / "copies")
    assert roomy.engine.max_context_tokens == 40_000
    assert roomy.engine.device_blocks * 32 > 40_000
    config = json.loads((tmp_path / "copies" / "model" / "config.json").read_text())
    assert config == {"max_position_embeddings": 40_000}
    assert roomy.model.source == str(tmp_path / "copies" / "model")


def test_conversations_grow_by_answers_and_are_measured_apart():
    asked = []

    async def chat(request):
        asked.append((await request.json())["messages"])
        return web.Response(
            text='data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n',
            content_type="text/event-stream",
        )

    async def metrics(_):
        name = "vllm:request_prefill_time_seconds"
        seen = f'{name}_sum{{a="b"}} {len(asked) / 2}\n{name}_count{{a="b"}} {len(asked)}.0\n'
        return web.Response(text=seen)

    async def play():
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/metrics", metrics)])
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            bench = Bench({"vllm": url}, {}, "m", 3, Random(1))
            return await bench.play([("8k", 1)], 1)

    first, later = asyncio.run(play())
    assert (first.prompt, len(first.answers)) == ("8k first", 1)
    assert (later.prompt, len(later.answers)) == ("8k follow-up", 3)
    assert first.engine_s == later.engine_s == pytest.approx(0.5)
    talks = asked[-4:]
    for before, after in itertools.pairwise(talks):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": "x"}
