"""NVML: GPUs and their power through a fake shaped like it, and in a worker's reports."""

import sys

import pytest

from kappa.protocol import WorkerReport
from kappa_workers.nvml import Gpu, NoNvmlError, Nvml, gpus_and_driver, power_reporter, visible_gpus
from tests.kappa.test_power import announced, reports
from tests.workers.fake_nvml import FakeNvml


@pytest.fixture
def nvml(monkeypatch):
    """Puts an NVML of two GPUs in place of the real one, or another; `visible`: to this worker."""

    def put(fake=None, visible=""):
        fake = fake or FakeNvml([700.0, 400.0], [[100.0], [250.0]])
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


@pytest.mark.parametrize(("gpus", "error"), [([], NoNvmlError), ([700.0], KeyboardInterrupt)])
def test_nvml_is_ended_without_a_gpu_and_after_ctrl_c(gpus, error):
    nvml = FakeNvml(gpus, [[100.0]] * len(gpus))
    with pytest.raises(error, match="no GPU" if not gpus else ""), Nvml(nvml):
        raise KeyboardInterrupt
    assert not nvml.open


def test_a_gpu_without_figures_counts_as_zero():
    with Nvml(FakeNvml([None, 700.0], [[None], [200.0]])) as found:
        assert found.power([0, 1], 2) == (200.0, 700.0)


def test_power_is_a_share_of_all_gpus_if_own_ones_are_unknown():
    nvml = FakeNvml([700.0] * 4, [[100.0], [200.0], [300.0], [400.0]])
    with Nvml(nvml) as found:
        assert found.power([], 2) == (500.0, 1400.0)


@pytest.mark.parametrize("visible", ["1", " 1,", "GPU-1abcd", "GPU-1"])
def test_power_is_read_once_a_second_from_own_gpus_only(nvml, visible):
    fake = nvml(visible=visible)
    times = (0.0, 0.25, 0.5, 1.0, 1.25)
    told = reports(power_reporter(announced(), gpus=1), *((t, 0, 0) for t in times))
    assert [r.power_w for r in told] == [0, 0, 0, 250.0, 250.0]
    assert told[-1].power_cap_w == 400.0 and told[-1].power_source == "nvml"
    assert told[-1].energy_j_total == 250.0
    # No steps: an H100's idle watts.
    assert told[-1].modelled_j_total == 153.6
    assert fake.reads == 1


@pytest.mark.parametrize(
    ("announcement", "gpus", "source"),
    [({}, 0, "model"), ({}, 1, "model"), ({"gpu": "abacus"}, 1, "")],
)
def test_power_without_nvml_is_modelled_if_the_gpu_is_known(nvml, announcement, gpus, source):
    nvml(FakeNvml([], []))
    *_, last = reports(power_reporter(announced(**announcement), gpus), (0, 0, 0), (5, 1, 9))
    assert last.power_source == source and bool(last.power_w) == bool(source)


def test_a_paced_replica_on_gpus_reports_what_it_stands_for(nvml):
    fake = nvml()
    reporter = power_reporter(announced(source="paced"), gpus=1)
    *_, last = reports(reporter, (0, 0, 0), (1, 0, 0))
    assert last.power_source == "paced" and fake.reads == 0


def test_a_report_with_power_survives_the_wire(nvml):
    nvml()
    *_, last = reports(power_reporter(announced(), gpus=2), (0, 0, 0), (1, 0, 0))
    assert last.power_w == 350.0 and WorkerReport.from_dict(last.to_dict()) == last


def test_gpus_and_driver_are_named_or_empty_when_nvml_fails(monkeypatch):
    good = FakeNvml([700.0, 700.0], [[1.0], [1.0]])
    monkeypatch.setitem(sys.modules, "pynvml", good)
    assert gpus_and_driver.__wrapped__() == "GPU 0, GPU 1, driver 580.95.05" and not good.open
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], [], fault="no driver"))
    assert gpus_and_driver.__wrapped__() == ""


def test_nvml_reports_an_unlistable_driver_and_shuts_down():
    nvml = FakeNvml([700.0], [[1.0]])
    nvml.nvmlDeviceGetCount = lambda: nvml._told(None)
    with pytest.raises(NoNvmlError, match="NVML does not list its GPUs: not supported"):
        Nvml(nvml).__enter__()
    assert not nvml.open


@pytest.mark.parametrize(
    ("names", "found"),
    [("", []), ("0", [0]), ("2, 3", [2, 3]), ("GPU-2a,1", [2, 1]), ("GPU", []), ("MIG-1,9", [])],
)
def test_visible_gpus_are_those_of_the_environment_by_any_name(names, found):
    gpus = [Gpu(n, "H100", None, f"GPU-{n}abcd") for n in range(4)]
    assert [gpu.index for gpu in visible_gpus(gpus, names)] == found
