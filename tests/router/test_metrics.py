"""What workers report is taken over as it is; labels that could multiply are bounded."""

from kappa import metrics as m
from kappa.protocol import WorkerReport
from kappa_router.live.metrics import RouterMetrics


def test_tenants_beyond_the_bound_share_one_label():
    metrics = RouterMetrics()
    labels = {metrics.tenant(f"t{i}") for i in range(1000)}
    assert len(labels) == 257 and "other" in labels
    assert metrics.tenant("t0") == "t0", "one that had a label keeps it"
    for i in range(1000):
        metrics.inc(m.TENANT_REQUESTS, metrics.tenant(f"t{i}"), "answered")
    text = metrics.exposition().decode()
    assert 'kappa_tenant_requests_total{outcome="answered",tenant="other"} 744.0' in text


def test_scheduler_figures_of_a_new_life_add_to_the_old():
    metrics = RouterMetrics()
    for worker, passed, waiting in (("w", 3, 9), ("w", 5, 2), ("w", 1, 4), ("v", 10, 7)):
        report = WorkerReport(
            worker, 1.0, passed_total={"vram": passed}, budget_fill_sum=passed / 2, waiting=waiting
        )
        metrics.reported(report, "n", paced=True)
    lines = metrics.exposition().decode().splitlines()
    assert 'kappa_scheduler_passed_total{node="n",reason="vram"} 16.0' in lines
    assert 'kappa_scheduler_fill_total{node="n",resource="budget"} 8.0' in lines
    assert 'kappa_engine_requests{node="n",state="waiting",worker="v"} 7.0' in lines


def test_gauges_of_a_gone_node_go_and_its_counters_stay():
    metrics = RouterMetrics()
    told = {"power_w": 300.0, "power_source": "model", "h2d_bytes_per_s": 1e9, "steps_total": 3}
    for node in ("n", "o"):
        metrics.reported(WorkerReport(f"w-{node}", 1.0, **told), node, paced=False)
        for gauge in (m.LINK_SCALE, m.COMPUTE_SCALE, m.OVERHEAD, m.BREAKER_OPEN):
            metrics.set(gauge, node, f"w-{node}", to=1.0)
    metrics.forget("worker", "w-n")
    left = [line for line in metrics.exposition().decode().splitlines() if 'node="n"' in line]
    assert left and all("_total{" in line or "_created{" in line for line in left)
    lines = metrics.exposition().decode().splitlines()
    assert f'{m.LINK_SCALE.name}{{node="o",worker="w-o"}} 1.0' in lines
    assert 'kappa_engine_steps_total{node="n",paced="false"} 3.0' in lines


def test_gauges_of_workers_on_one_node_stand_side_by_side():
    metrics = RouterMetrics()
    for worker, waiting in (("a", 2), ("b", 5)):
        metrics.reported(WorkerReport(worker, 1.0, waiting=waiting), "h100", paced=False)
    lines = metrics.exposition().decode().splitlines()
    assert 'kappa_engine_requests{node="h100",state="waiting",worker="a"} 2.0' in lines
    assert 'kappa_engine_requests{node="h100",state="waiting",worker="b"} 5.0' in lines
    metrics.forget("worker", "a")
    text = metrics.exposition().decode()
    assert 'worker="b"' in text and 'worker="a"' not in text


def test_totals_of_workers_that_left_are_kept_for_some():
    metrics = RouterMetrics()
    for i in range(200):
        metrics.reported(WorkerReport(f"w{i}", 1.0, steps_total=1), "n", paced=False)
        metrics.left(f"w{i}")
    assert len(metrics._totals) == 64
    steps = 'kappa_engine_steps_total{node="n",paced="false"} '
    # One that comes back counts only its new steps: 200 steps of all, then 4 more of the last.
    metrics.reported(WorkerReport("w199", 2.0, steps_total=5), "n", paced=False)
    assert f"{steps}204.0" in metrics.exposition().decode()
    for i in range(200, 300):
        metrics.left(f"w{i}")
    assert "w199" in metrics._totals, "it is here again"


def test_power_has_its_source_and_energy_adds_up_over_restarts():
    metrics = RouterMetrics()
    told = {"power_w": 300.0, "power_cap_w": 700.0, "power_source": "model"}
    for worker, joules in (("w1", 100.0), ("w1", 150.0), ("w2", 20.0), ("w2", 30.0)):
        report = WorkerReport(worker, 1.0, energy_j_total=joules, **told)
        metrics.reported(report, "pcie", paced=False)
    text = metrics.exposition().decode()
    assert 'kappa_node_power_watts{node="pcie",source="model",worker="w1"} 300.0' in text
    assert 'kappa_node_power_cap_watts{node="pcie",source="model",worker="w2"} 700.0' in text
    assert 'kappa_energy_joules_total{node="pcie",source="model"} 180.0' in text


def test_worker_without_figures_has_no_power_series():
    metrics = RouterMetrics()
    metrics.reported(WorkerReport("w", 1.0), "pcie", paced=False)
    assert "kappa_node_power_watts{" not in metrics.exposition().decode()


def test_metrics_without_counting_are_empty_and_fail_nothing():
    metrics = RouterMetrics(counting=False)
    metrics.inc(m.REQUESTS, "200")
    metrics.observe(m.TOKENIZE_SECONDS, value=0.1)
    metrics.reported(WorkerReport("w", 1.0, steps_total=5), "pcie", paced=True)
    metrics.total(m.STEPS, "pcie", "true", to=3)
    metrics.forget("worker", "w")
    assert metrics.exposition() == b""
