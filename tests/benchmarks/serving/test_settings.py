"""Which cluster a bench runs on."""

import httpx
import pytest
import typer

from kappa.settings.cluster import load_settings
from kappa_benchmarks.serving.client import served_model
from kappa_benchmarks.serving.settings import bench_model, bench_settings


def test_without_options_it_is_the_demo_on_a_free_port():
    settings = bench_settings(None, None, False)
    assert settings.http.port == 0 and settings.all_pools == load_settings().all_pools
    assert not any(pool.paced for pool in bench_settings(None, None, True).all_pools)


def test_model_alone_runs_on_two_unlike_nodes_of_this_machine():
    settings = bench_settings(None, "smollm2-135m", True)
    assert (settings.model.id, settings.model.source) == ("smollm2-135m", "smollm2-135m")
    one, other = (pool.engine_settings(settings.engine) for pool in settings.all_pools)
    assert one != other and not any(pool.paced for pool in settings.all_pools)
    for engine in (one, other):
        # A device cache that holds little more than one longest prompt: the rest spills.
        capacity = engine.device_blocks * engine.block_tokens
        assert engine.max_context_tokens < capacity < 2 * engine.max_context_tokens


def test_a_file_says_where_and_the_model_what(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: [{name: gpus, profile: h100-pcie5, placement: {gpus: 4}}]\n")
    settings = bench_settings(file, "/models/mixtral", True)
    assert (settings.model.id, settings.model.source) == ("mixtral", "/models/mixtral")
    assert [pool.placement.gpus for pool in settings.all_pools] == [4]


def test_a_model_that_is_not_there_is_a_message_and_no_traceback(capsys):
    with pytest.raises(typer.Exit):
        bench_model(bench_settings(None, "/no/such/model", True))
    assert "/no/such/model" in capsys.readouterr().err


def test_a_running_cluster_is_asked_what_it_serves(monkeypatch):
    def get(url, **_):
        assert url == "http://cluster/v1/models"
        request = httpx.Request("GET", url)
        return httpx.Response(200, json={"data": [{"id": "mixtral"}]}, request=request)

    monkeypatch.setattr(httpx, "get", get)
    assert served_model("http://cluster") == "mixtral"
