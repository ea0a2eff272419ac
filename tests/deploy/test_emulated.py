"""`kappa demo --emulated`: what it prints of simulated runs, and that it calls them so."""

from types import SimpleNamespace

import numpy as np
from typer.testing import CliRunner

from kappa.cost import TokenCounts, idle_cost
from kappa.shapes import model_shape
from kappa_deploy.cli import app
from kappa_deploy.commands.demo_rows import print_compared
from kappa_deploy.commands.emulated import decisions, worth
from kappa_simulator.clusters import KINDS, SimulatedCluster

SHAPE = model_shape("llama-3.1-8b")
CLUSTER = SimulatedCluster("two", (KINDS["gh200"], KINDS["h100"]))


def outcome_of(arrivals_s, sessions, cached_tokens):
    """Requests on the H100, the first of them not measured and the last not completed."""
    count = len(arrivals_s)
    ones = np.ones(count, dtype=np.int64)
    records = SimpleNamespace(
        arrival_s=np.array(arrivals_s), session=np.array(sessions),
        measured=np.arange(count) > 0, e2e_s=np.where(np.arange(count) < count - 1, 1.0, np.nan),
        node=ones, device_tokens=2 * ones, new_tokens=4 * ones,
        cached_tokens=np.array(cached_tokens),
        kind=np.full(count, "load"), predicted_s=np.full(count, 0.5), ttft_s=np.full(count, 0.25),
    )  # fmt: skip
    return SimpleNamespace(records=records)


def test_decisions_list_measured_requests_by_arrival_and_bound():
    outcome = outcome_of([0.0, 9.0, 5.0, 7.0, 8.0], [0, 0, 0, 1, 1], [0, 9000, 10, 8000, 0])
    config = SimpleNamespace(shape=SHAPE, cluster=CLUSTER)
    rows = decisions(outcome, config, 16)
    cost = idle_cost(TokenCounts(2, 10, 4), SHAPE, KINDS["h100"].profile)
    assert [(row["session"], row["turn"], row["bound"]) for row in rows] == [
        ("0", 2, "compute"), ("1", 0, "memory"), ("0", 1, "memory"),
    ]  # fmt: skip
    assert rows[0] == {
        "session": "0", "turn": 2, "node": "h100", "device_tokens": 2, "cached_tokens": 10,
        "new_tokens": 4, "ratio": 2.5, "kappa_crit": cost.kappa_crit, "bound": "compute",
        "reason": "load", "error": None, "predicted_ttft_s": 0.5, "ttft_s": 0.25,
    }  # fmt: skip
    assert [row["turn"] for row in decisions(outcome, config, 2)] == [2, 1]


def test_the_comparison_has_a_row_of_figures_for_each_policy(capsys):
    summary = {"ttft_s": {"p50": 0.2, "p99": 8.0}, "goodput_rps": 1.25, "completed": 1600}
    print_compared("title", [worth("ours", summary)])
    row = capsys.readouterr().out.splitlines()[-2]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "ours", "1,600", "200 ms", "8 s", "1.25/s",
    ]  # fmt: skip


def test_the_emulated_demo_has_options_of_its_own():
    done = CliRunner().invoke(app, ["demo", "--emulated", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 2 and "--emulated" in done.stderr


def test_emulated_demo_names_what_brings_the_other_policies(monkeypatch):
    monkeypatch.setattr("kappa.host.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["demo", "--emulated"])
    assert done.exit_code == 1
    assert "kappa demo --emulated: needs " in done.stderr
    assert "pip install 'kappa-serve[loadtest]'" in done.stderr


def test_emulated_demo_says_so_and_compares_policies(monkeypatch):
    monkeypatch.setattr("kappa_deploy.commands.emulated._REQUESTS", 150)
    done = CliRunner().invoke(app, ["demo", "--emulated"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("EMULATED: no engine runs") and "150 requests" in done.stdout
    table = done.stdout[done.stdout.index("What the choice was worth (EMULATED") :]
    for word in ("priced (ours)", "round robin", "prefix affinity", "goodput", "TTFT p50"):
        assert word in table
    assert "gh200" in done.stdout and "h100" in done.stdout
