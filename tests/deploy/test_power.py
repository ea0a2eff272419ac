"""`kappa power`: rows from nodes and decisions, and errors where there are none."""

import json

import httpx
import pytest
import typer
from typer.testing import CliRunner

from kappa_deploy.commands.power import node_rows, power


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


def test_node_rows_advise_a_lower_cap_for_a_memory_bound_node():
    rows = node_rows([node("pcie", 180.0), node("c2c", 400.0)], MEMORY + COMPUTE, 0.02)
    pcie, c2c = rows
    assert (pcie["w"], pcie["cap_w"], pcie["requests"]) == (180.0, 700.0, 20)
    assert pcie["advised_w"] < 450 < 650 < c2c["advised_w"]
    assert pcie["freed_w"] == 700 - pcie["advised_w"]


def test_measured_parts_go_before_predicted_ones():
    measured = [decision("n", 9, 9, 9, queue_s=0.0, load_s=5.0, compute_s=0.1)]
    predicted = [decision("n", 0.0, 5.0, 0.1)]
    nodes = [node("n", 100.0)]
    assert node_rows(nodes, measured, 0.01) == node_rows(nodes, predicted, 0.01)


def test_without_requests_or_figures_there_is_no_advice():
    (quiet,) = node_rows([node("n", 100.0)], [], 0.01)
    assert quiet["advised_w"] is quiet["freed_w"] is None and quiet["cap_w"] == 700.0
    (dark,) = node_rows([node("n", 0.0, "")], [decision("n", 0, 1, 1)], 0.01)
    assert (dark["source"], dark["w"], dark["cap_w"], dark["advised_w"]) == ("", None, None, None)
    (new,) = node_rows([{**node("n", 0.0), "totals": None}], [], 0.01)
    assert new["w"] is None
    (other,) = node_rows([node("n", 90.0, "nvml", "abacus")], [decision("n", 0, 9, 0)], 0.0)
    assert other["w"] == 90.0 and other["advised_w"] is None


def test_the_model_stands_beside_what_nvml_measures():
    metered = {"energy_j_total": 50.0, "modelled_j_total": 60.0}
    assert node_rows([node("n", 1.0, "nvml", **metered)], [], 0.01)[0]["model_off"] == (
        pytest.approx(0.2)
    )
    for source, totals in (("paced", metered), ("nvml", {"energy_j_total": 50.0}), ("nvml", {})):
        assert node_rows([node("n", 1.0, source, **totals)], [], 0.01)[0]["model_off"] is None


def test_energy_per_token():
    metered = node("n", 1.0, energy_j_total=50.0, step_tokens_total=200)
    assert node_rows([metered], [], 0.01)[0]["j_per_token"] == 0.25


@pytest.fixture
def run(monkeypatch):
    """Runs the command against a cluster that answers like this; notes the requests."""

    real = httpx.Client

    def of(answers, *options):
        transport = httpx.MockTransport(answers)
        monkeypatch.setattr(httpx, "Client", lambda **given: real(**given, transport=transport))
        app = typer.Typer()
        app.command()(power)
        return CliRunner().invoke(app, ["--url", "http://c/", *options])

    return of


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(403, json={}), "403 Forbidden"),
        (httpx.Response(200, text="<html>"), "does not answer as a kappa-serve endpoint"),
        (httpx.Response(200, json={"nodes": [node("n", 0, "")], "decisions": []}), "no NVML"),
    ],
)
def test_a_cluster_without_figures_is_an_error(answer, message, run):
    done = run(lambda _: answer)
    assert done.exit_code in (1, 2) and message in done.stderr.replace("\n", "")


def test_the_key_is_sent_and_the_rows_are_printed(run):
    requests = []

    def answers(request):
        requests.append(request)
        nodes = request.url.path == "/v1/nodes"
        metered = node("pcie", 100.0, step_tokens_total=8, energy_j_total=2.0)
        return httpx.Response(200, json={"nodes": [metered]} if nodes else {"decisions": MEMORY})

    done = run(answers, "--key", "k")
    assert done.exit_code == 0 and "pcie" in done.output and "W could be freed" in done.output
    assert "-11.1% to +6.2% off there" in done.output
    assert all(r.headers["authorization"] == "Bearer k" for r in requests)
    found = json.loads(run(answers, "--key", "k", "--json").output)
    assert found["freed_w"] == found["nodes"][0]["freed_w"] > 0
