"""Power: sampled through an NVML-shaped fake, without NVML for real, and in a worker's reports."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.power import GPUS
from kappa.protocol import Announcement, WorkerReport
from kappa.shapes import model_shape
from tests.workers.fake_nvml import FakeNvml
from workers.power import (
    Gpu,
    NoNvmlError,
    PowerMeter,
    PowerReporter,
    gpus_and_driver,
    power_reporter,
    sample_power,
    summary,
    visible_gpus,
)


class Clock:
    """Time that passes when slept, and `busy_s` at every look."""

    def __init__(self, busy_s=0.0):
        self.now, self.busy_s = 100.0, busy_s

    def __call__(self):
        self.now += self.busy_s
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def sampled(nvml, seconds, interval_s=0.2, busy_s=0.0):
    rows, clock = [], Clock(busy_s)
    with PowerMeter(nvml) as meter:
        sample_power(meter, seconds, rows.append, interval_s, clock, clock.sleep)
        return meter.gpus, rows


def test_mean_most_and_share_of_the_limit():
    nvml = FakeNvml([700.0, 700.0], [[100.0, 300.0], [150.0, 152.0]])
    gpus, rows = sampled(nvml, 0.6)
    assert [row.t_s for row in rows] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert [row.watts for row in rows] == [(100, 150), (300, 152), (100, 150), (300, 152)]
    first, second = summary(gpus, rows)
    assert (first["mean_w"], first["max_w"]) == (200.0, 300.0)
    assert first["share_of_limit"] == pytest.approx(200 / 700)
    assert (second["name"], second["mean_w"], second["samples"]) == ("GPU 1", 151.0, 4)
    assert not nvml.open


def test_a_gpu_without_figures_is_no_zero():
    gpus, rows = sampled(FakeNvml([None, 700.0], [[None], [None, 200.0]]), 0.6)
    silent, half = summary(gpus, rows)
    assert silent["mean_w"] is silent["max_w"] is silent["share_of_limit"] is None
    assert (half["mean_w"], half["samples"], half["untold"]) == (200.0, 2, 2)


def test_missed_slots_stay_empty_and_sampling_still_ends():
    """Reading takes longer than the interval: fewer rows, no catching up."""
    _, rows = sampled(FakeNvml([700.0], [[100.0]]), 2.0, busy_s=0.15)
    times = [row.t_s for row in rows]
    assert 2 <= len(rows) < 11
    assert times == sorted(times) and times[-1] < 3.0


@pytest.mark.parametrize(("seconds", "interval_s"), [(0, 0.2), (1, 0), (-1, 0.2)])
def test_no_time_is_refused(seconds, interval_s):
    with pytest.raises(ValueError, match="above zero"):
        sampled(FakeNvml([700.0], [[100.0]]), seconds, interval_s)


def test_no_gpu_is_an_error_and_nvml_is_ended():
    nvml = FakeNvml([], [])
    with pytest.raises(NoNvmlError, match="no GPU"), PowerMeter(nvml):
        pass
    assert not nvml.open


def test_nvml_is_ended_after_ctrl_c():
    nvml = FakeNvml([700.0], [[100.0]])
    with pytest.raises(KeyboardInterrupt), PowerMeter(nvml):
        raise KeyboardInterrupt
    assert not nvml.open


def nvml_here():
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(nvml_here(), reason="this machine has NVML")
def test_without_nvml_the_command_says_so_and_nothing_else():
    program = "import typer; from deploy.commands.power import power; typer.run(power)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--seconds", "1", "--json"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no NVML on this machine")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not nvml_here(), reason="needs NVML")
def test_with_nvml_the_command_gives_rows_of_watts():
    program = "import typer; from deploy.commands.power import power; typer.run(power)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--seconds", "1", "--json"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert len(result["rows"]) >= 2
    assert all(len(row["watts"]) == len(result["gpus"]) for row in result["rows"])


# -- in a worker's reports -----------------------------------------------------------------------

LLAMA = model_shape("llama-3.1-8b")


def announced(**changes):
    node = replace(node_profile("h100-pcie5"), **changes)
    return Announcement(
        "w", "m", node, step_model(LLAMA, node), 131072.0, "", "f", 32, 100, 100, 1024, 8192, "", ""
    )


def reports(reporter, *moments):
    """(time, step seconds, tokens) -> reports with power."""
    return [
        reporter(
            WorkerReport(
                "w", t_s, steps_total=i, step_seconds_total=step_s, step_tokens_total=tokens
            )
        )
        for i, (t_s, step_s, tokens) in enumerate(moments)
    ]


def test_without_nvml_an_idle_and_a_busy_second_are_modelled():
    h100, step = GPUS["H100-SXM5-80GB"], announced().step
    full = round(1 / step.token_s)
    first, idle, busy = reports(PowerReporter(announced()), (0, 0, 0), (1, 0, 0), (2, 1.0, full))
    assert (first.power_source, first.power_w) == ("", 0.0)
    assert (idle.power_w, idle.power_cap_w, idle.power_source) == (h100.idle_w, 700.0, "model")
    assert busy.power_w == pytest.approx(h100.cap_w, rel=0.001)
    assert busy.energy_j_total == pytest.approx(h100.idle_w + h100.cap_w, rel=0.001)


def test_a_paced_node_uses_energy_in_its_own_time():
    node = announced(source="paced", dilation=10.0)
    *_, last = reports(PowerReporter(node, FakeNvml([300.0], [[99.0]])), (0, 0, 0), (10, 10, 0))
    idle, cap = GPUS["H100-SXM5-80GB"].idle_w, 700.0
    assert last.power_source == "paced"
    assert last.power_w == pytest.approx(idle + (cap - idle) / 2)
    assert last.energy_j_total == pytest.approx(last.power_w * 1.0)


@pytest.mark.parametrize("visible", ["1", " 1,", "GPU-1abcd", "GPU-1"])
def test_nvml_is_asked_once_a_second_and_only_of_this_workers_gpus(visible):
    nvml = FakeNvml([700.0, 700.0], [[100.0], [250.0]])
    teller = PowerReporter(announced(), nvml, visible)
    told = reports(teller, (0, 0, 0), (0.25, 0, 0), (0.5, 0, 0), (1.0, 0, 0), (1.25, 0, 0))
    assert [r.power_w for r in told] == [0, 0, 0, 250.0, 250.0]
    assert told[-1].power_cap_w == 700.0 and told[-1].power_source == "nvml"
    assert nvml.reads == 2


def test_a_worker_that_does_not_know_its_gpus_has_its_share_of_all():
    nvml = FakeNvml([700.0] * 4, [[100.0], [200.0], [300.0], [400.0]])
    teller = PowerReporter(announced(), nvml, "MIG-7", gpu_count=2)
    *_, last = reports(teller, (0, 0, 0), (1, 0, 0))
    assert (last.power_w, last.power_cap_w) == (500.0, 1400.0)


def test_without_nvml_and_catalogue_nothing_is_reported():
    *_, last = reports(
        PowerReporter(announced(gpu="abacus"), FakeNvml([], [])), (0, 0, 0), (5, 1, 9)
    )
    assert (last.power_w, last.power_source) == (0.0, "")


def test_an_engine_that_started_anew_uses_no_negative_energy():
    teller = PowerReporter(announced())
    reports(teller, (0, 0, 0), (1, 1, 100))
    before = teller(WorkerReport("w", 2.0, steps_total=5, step_seconds_total=1.5)).energy_j_total
    teller(WorkerReport("w", 3.0, steps_total=0))
    after = teller(WorkerReport("w", 4.0, steps_total=1, step_seconds_total=0.1))
    assert before <= after.energy_j_total < before + 700


def test_a_report_with_power_survives_the_wire():
    *_, last = reports(PowerReporter(announced()), (0, 0, 0), (1, 0, 0))
    assert WorkerReport.from_dict(last.to_dict()) == last


def test_a_replica_on_gpus_reads_those_that_the_environment_names(monkeypatch):
    nvml = FakeNvml([700.0, 400.0], [[100.0], [250.0]])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    *_, last = reports(power_reporter(announced(), gpus=1), (0, 0, 0), (1, 0, 0))
    assert (last.power_source, last.power_w, last.power_cap_w) == ("nvml", 250.0, 400.0)


def test_a_profile_is_of_gpus_by_name_and_driver_and_of_none_where_nvml_fails(monkeypatch):
    good = FakeNvml([700.0, 700.0], [[1.0], [1.0]])
    monkeypatch.setitem(sys.modules, "pynvml", good)
    assert gpus_and_driver.__wrapped__() == "GPU 0, GPU 1, driver 580.95.05" and not good.open
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], [], fault="no driver"))
    assert gpus_and_driver.__wrapped__() == ""


def test_a_driver_that_does_not_list_its_gpus_is_said_and_nvml_is_ended():
    nvml = FakeNvml([700.0], [[1.0]])
    nvml.nvmlDeviceGetCount = lambda: nvml._told(None)
    with pytest.raises(NoNvmlError, match="NVML does not list its GPUs: not supported"):
        PowerMeter(nvml).__enter__()
    assert not nvml.open


def test_a_replica_without_a_gpu_reports_modelled_power():
    reporter = power_reporter(announced(), gpus=0)
    *_, last = reports(reporter, (0, 0, 0), (1, 0, 0))
    assert last.power_source == "model"


@pytest.mark.parametrize(
    ("names", "found"),
    [("", []), ("0", [0]), ("2, 3", [2, 3]), ("GPU-2a,1", [2, 1]), ("GPU", []), ("MIG-1,9", [])],
)
def test_gpus_are_known_by_the_numbers_and_uuids_that_the_environment_names(names, found):
    gpus = [Gpu(n, "H100", 700.0, None, f"GPU-{n}abcd") for n in range(4)]
    assert [gpu.index for gpu in visible_gpus(gpus, names)] == found
