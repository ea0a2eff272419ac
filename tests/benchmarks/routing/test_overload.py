"""`kappa bench overload`: its rows, and what it refuses."""

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.routing.overload import measure, overload
from kappa.shapes import model_shape
from simulator.clusters import cluster_named
from simulator.run import SimulationConfig
from workload.catalogue import workload_named

app = typer.Typer()
app.command()(overload)
runner = CliRunner()


def test_each_load_is_measured_with_admission_and_without():
    config = SimulationConfig(
        cluster=cluster_named("small"), workload=workload_named("sharegpt"),
        shape=model_shape("llama-3.1-8b"), load=1.0, capacity_rps=160.0,
    )  # fmt: skip
    rows = measure(config, (0.5, 4.0), seconds=0.8)
    assert [(row["admission"], row["load"]) for row in rows] == [
        (False, 0.5), (False, 4.0), (True, 0.5), (True, 4.0),
    ]  # fmt: skip
    off, on = rows[:2], rows[2:]
    assert [row["tries"] for row in off] == [1.0, 1.0] and on[1]["tries"] > 1.0
    assert all(row["let_in"] == 1.0 for row in off) and on[1]["let_in"] < 1.0
    for column in (off, on):
        assert max(row["of_peak"] for row in column) == 1.0
    assert on[1]["met_of_let_in"] > off[1]["met_of_let_in"]


@pytest.mark.parametrize("options", [["--trace", "nowhere"], ["--cluster", "x"], ["--loads", "x"],
                                     ["--policy", "x"], ["--seconds", "0"], ["--retry", "x"],
                                     ["--patience", "0"]])  # fmt: skip
def test_a_wrong_option_is_refused(options):
    done = runner.invoke(app, options)
    assert done.exit_code == 2 and "Traceback" not in done.output
