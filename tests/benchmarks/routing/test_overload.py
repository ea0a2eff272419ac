"""`kappa bench overload`: its rows."""

from kappa.shapes import model_shape
from kappa_benchmarks.routing.overload import measure
from kappa_simulator.clusters import cluster_named
from kappa_simulator.run import SimulationConfig
from kappa_workload.catalogue import workload_named


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
