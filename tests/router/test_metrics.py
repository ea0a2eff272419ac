"""What workers report is taken over as it is; labels that could multiply are bounded."""

from kappa import metrics as m
from kappa.report import WorkerReport
from router.metrics import RouterMetrics


def test_tenants_beyond_the_bound_share_one_label():
    metrics = RouterMetrics()
    labels = {metrics.tenant(f"t{i}") for i in range(1000)}
    assert len(labels) == 257 and "other" in labels
    assert metrics.tenant("t0") == "t0", "one that had a label keeps it"
    for i in range(1000):
        metrics.inc(m.TENANT_REQUESTS, metrics.tenant(f"t{i}"), "answered")
    text = metrics.exposition().decode()
    assert 'kappa_tenant_requests_total{outcome="answered",tenant="other"} 744.0' in text


def test_a_workers_scheduler_is_taken_over_and_a_new_life_adds_to_the_old():
    metrics = RouterMetrics()
    for worker, passed, waiting in (("w", 3, 9), ("w", 5, 2), ("w", 1, 4), ("v", 10, 7)):
        report = WorkerReport(
            worker, 1.0, passed_total={"vram": passed}, budget_fill_sum=passed / 2, waiting=waiting
        )
        metrics.reported(report, "n", paced=True)
    lines = metrics.exposition().decode().splitlines()
    assert 'kappa_scheduler_passed_total{node="n",reason="vram"} 16.0' in lines
    assert 'kappa_scheduler_fill_total{node="n",resource="budget"} 8.0' in lines
    assert 'kappa_engine_requests{node="n",state="waiting"} 7.0' in lines
    metrics.forget(m.ENGINE_REQUESTS, "n", "waiting")
    assert 'state="waiting"' not in metrics.exposition().decode()
