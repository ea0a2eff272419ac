"""Power sampling: the arithmetic on an NVML-shaped fake, and a machine without NVML for real."""

import json
import subprocess
import sys

import pytest

from tests.workers.fake_nvml import FakeNvml
from workers.power import NoNvmlError, PowerMeter, sample_power, summary


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


def test_a_gpu_that_does_not_tell_is_no_zero():
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
