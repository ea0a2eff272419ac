"""Power in a worker's reports: measured, modelled, paced, or not known; energy adds up."""

from dataclasses import replace

import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.power import gpu_power
from kappa.protocol import Announcement, WorkerReport
from kappa.shapes import model_shape
from tests.workers.fake_nvml import FakeNvml
from workers.power_report import PowerReporter

LLAMA = model_shape("llama-3.1-8b")


def said(**changes):
    node = replace(node_profile("h100-pcie5"), **changes)
    return Announcement(
        "w", "m", node, step_model(LLAMA, node), 131072.0, "", "f", 32, 100, 100, 1024, 8192, "", ""
    )


def reports(teller, *moments):
    """(time, step seconds, tokens) -> reports with power."""
    return [
        teller(
            WorkerReport(
                "w", t_s, steps_total=i, step_seconds_total=step_s, step_tokens_total=tokens
            )
        )
        for i, (t_s, step_s, tokens) in enumerate(moments)
    ]


def test_without_nvml_an_idle_and_a_busy_second_are_modelled():
    h100, step = gpu_power("H100-SXM5-80GB"), said().step
    full = round(1 / step.token_s)
    first, idle, busy = reports(PowerReporter(said()), (0, 0, 0), (1, 0, 0), (2, 1.0, full))
    assert (first.power_source, first.power_w) == ("", 0.0)
    assert (idle.power_w, idle.power_cap_w, idle.power_source) == (h100.idle_w, 700.0, "model")
    assert busy.power_w == pytest.approx(h100.cap_w, rel=0.001)
    assert busy.energy_j_total == pytest.approx(h100.idle_w + h100.cap_w, rel=0.001)


def test_a_paced_node_uses_energy_in_its_own_time():
    announced = said(source="paced", dilation=10.0)
    *_, last = reports(
        PowerReporter(announced, FakeNvml([300.0], [[99.0]])), (0, 0, 0), (10, 10, 0)
    )
    idle, cap = gpu_power("H100-SXM5-80GB").idle_w, 700.0
    assert last.power_source == "paced"
    assert last.power_w == pytest.approx(idle + (cap - idle) / 2)
    assert last.energy_j_total == pytest.approx(last.power_w * 1.0)


def test_nvml_is_asked_once_a_second_and_only_of_this_workers_gpus():
    nvml = FakeNvml([700.0, 700.0], [[100.0], [250.0]])
    teller = PowerReporter(said(), nvml, gpus=[1])
    told = reports(teller, (0, 0, 0), (0.25, 0, 0), (0.5, 0, 0), (1.0, 0, 0), (1.25, 0, 0))
    assert [r.power_w for r in told] == [0, 0, 0, 250.0, 250.0]
    assert told[-1].power_cap_w == 700.0 and told[-1].power_source == "nvml"
    assert nvml.reads == 2
    teller.close()
    assert not nvml.open


def test_a_worker_that_does_not_know_its_gpus_has_its_share_of_all():
    nvml = FakeNvml([700.0] * 4, [[100.0], [200.0], [300.0], [400.0]])
    *_, last = reports(PowerReporter(said(), nvml, gpu_count=2), (0, 0, 0), (1, 0, 0))
    assert (last.power_w, last.power_cap_w) == (500.0, 1400.0)


def test_without_nvml_and_catalogue_nothing_is_told():
    *_, last = reports(PowerReporter(said(gpu="abacus"), FakeNvml([], [])), (0, 0, 0), (5, 1, 9))
    assert (last.power_w, last.power_source) == (0.0, "")


def test_an_engine_that_started_anew_uses_no_negative_energy():
    teller = PowerReporter(said())
    reports(teller, (0, 0, 0), (1, 1, 100))
    before = teller(WorkerReport("w", 2.0, steps_total=5, step_seconds_total=1.5)).energy_j_total
    teller(WorkerReport("w", 3.0, steps_total=0))
    after = teller(WorkerReport("w", 4.0, steps_total=1, step_seconds_total=0.1))
    assert before <= after.energy_j_total < before + 700


def test_a_report_with_power_survives_the_wire():
    *_, last = reports(PowerReporter(said()), (0, 0, 0), (1, 0, 0))
    assert WorkerReport.from_dict(last.to_dict()) == last
