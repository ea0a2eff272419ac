"""`kappa power --url`: rows from nodes and decisions, and errors where there are none."""

import json

import httpx
import pytest
import typer
from typer.testing import CliRunner

from deploy.commands.power import cluster_power, node_rows, power, watch


def node(name, watts, source="paced", gpu="H100-SXM5-80GB", cap=700.0, **totals):
    metered = {"power_w": watts, "power_cap_w": cap, "power_source": source}
    return {
        "worker": f"w-{name}", "node": name, "paced": source == "paced", "profile": {"gpu": gpu},
        "totals": {**(metered if source else {}), **totals},
    }  # fmt: skip


def decision(name, queue, load, compute, **actual):
    predicted = {"queue_s": queue, "load_s": load, "compute_s": compute}
    return {"node": name, "predicted": predicted, "actual": actual}


MEMORY = [decision("pcie", 0.1, 1.0, 0.05)] * 20
COMPUTE = [decision("c2c", 0.1, 0.01, 1.0)] * 20


def test_a_memory_bound_node_gets_a_lower_cap_than_a_compute_bound_one():
    rows = {r["node"]: r for r in node_rows(
        [[node("pcie", 180.0), node("c2c", 400.0)], [node("pcie", 220.0), node("c2c", 420.0)]],
        MEMORY + COMPUTE, 0.02,
    )}  # fmt: skip
    pcie, c2c = rows["pcie"], rows["c2c"]
    assert (pcie["mean_w"], pcie["max_w"], pcie["samples"]) == (200.0, 220.0, 2)
    assert pcie["advice"]["cap_w"] < 450 < 650 < c2c["advice"]["cap_w"]
    assert pcie["freed_w"] == 700 - pcie["advice"]["cap_w"]
    assert pcie["advice"]["basis"] == "model", "a modelled peak proves nothing"


def test_a_measured_peak_makes_a_cap_that_changes_nothing():
    (row,) = node_rows([[node("c2c", 300.0, "nvml")], [node("c2c", 310.0, "nvml")]], COMPUTE, 0.0)
    assert row["advice"]["basis"] == "measured" and row["advice"]["cap_w"] == 330.0


def test_measured_parts_go_before_predicted_ones():
    measured = [decision("n", 9, 9, 9, queue_s=0.0, load_s=5.0, compute_s=0.1)]
    predicted = [decision("n", 0.0, 5.0, 0.1)]
    args = [[node("n", 100.0)]]
    assert node_rows(args, measured, 0.01) == node_rows(args, predicted, 0.01)


def test_gpus_of_one_node_count_together_and_unknown_ones_by_their_cap():
    four = node_rows([[node("n", 800.0, "nvml", cap=2800.0)]], [decision("n", 0, 9, 0)], 0.01)[0]
    assert four["advice"]["cap_w"] == 800.0, "the lowest that four of them take"
    other = node_rows([[node("n", 90.0, "nvml", "abacus", 300.0)]], [decision("n", 0, 9, 0)], 0.0)
    assert other[0]["advice"]["cap_w"] == 90.0


def test_without_requests_or_figures_there_is_no_advice():
    (quiet,) = node_rows([[node("n", 100.0)]], [], 0.01)
    assert quiet["advice"] is quiet["freed_w"] is None and quiet["cap_w"] == 700.0
    (dark,) = node_rows([[node("n", 0.0, "")]], [decision("n", 0, 1, 1)], 0.01)
    assert (dark["source"], dark["mean_w"], dark["cap_w"], dark["advice"]) == ("", None, None, None)
    (new,) = node_rows([[{**node("n", 0.0), "totals": None}]], [], 0.01)
    assert new["mean_w"] is None


def test_energy_per_token():
    metered = node("n", 1.0, energy_j_total=50.0, step_tokens_total=200)
    assert node_rows([[metered]], [], 0.01)[0]["j_per_token"] == 0.25


def client(answers):
    requests = []

    def handler(request):
        requests.append(request)
        return answers(request)

    return httpx.Client(base_url="http://c", transport=httpx.MockTransport(handler)), requests


def test_a_cluster_is_watched_for_the_time_given():
    clock = [0.0]

    def answers(request):
        nodes = request.url.path == "/v1/nodes"
        body = {"nodes": [node("pcie", 100.0 + clock[0])]} if nodes else {"decisions": MEMORY}
        return httpx.Response(200, json=body)

    cluster, requests = client(answers)
    samples, decisions = watch(
        cluster, 3.0, 1.0, lambda s: clock.__setitem__(0, clock[0] + s), lambda: clock[0]
    )
    assert [r.url.path for r in requests] == ["/v1/nodes"] * 4 + ["/v1/decisions"]
    result = cluster_power("http://c", samples, decisions, 0.02)
    assert result["nodes"][0]["max_w"] == 103.0
    assert result["freed_w"] == result["nodes"][0]["freed_w"] > 0
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(403, json={}), "403 Forbidden"),
        (httpx.Response(200, text="<html>"), "does not answer as a kappa-serve endpoint"),
        (httpx.Response(200, json={"nodes": [node("n", 0, "")], "decisions": []}), "no NVML"),
    ],
)
def test_a_cluster_without_figures_is_an_error(answer, message, monkeypatch):
    real, transport = httpx.Client, httpx.MockTransport(lambda _: answer)
    monkeypatch.setattr(httpx, "Client", lambda **options: real(**options, transport=transport))
    app = typer.Typer()
    app.command()(power)
    run = CliRunner().invoke(app, ["--url", "http://c", "--seconds", "0.1"])
    assert run.exit_code in (1, 2) and message in run.stderr.replace("\n", "")


def test_the_key_is_sent_and_the_rows_are_printed(monkeypatch):
    requests = []

    def answers(request):
        requests.append(request)
        nodes = request.url.path == "/v1/nodes"
        body = {"nodes": [node("pcie", 100.0)]} if nodes else {"decisions": MEMORY}
        return httpx.Response(200, json=body)

    real, transport = (
        httpx.Client,
        httpx.MockTransport(lambda r: (requests.append(r), answers(r))[1]),
    )
    monkeypatch.setattr(httpx, "Client", lambda **options: real(**options, transport=transport))
    app = typer.Typer()
    app.command()(power)
    run = CliRunner().invoke(app, ["--url", "http://c/", "--seconds", "0.1", "--key", "k"])
    assert run.exit_code == 0 and "pcie" in run.output and "W could be freed" in run.output
    assert all(r.headers["authorization"] == "Bearer k" for r in requests)
