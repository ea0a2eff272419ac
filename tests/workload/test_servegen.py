"""Reading ServeGen's client rates."""

import polars as pl
import pytest

from kappa_workload.arrivals import ClientRate, read_rates, shipped_rates
from kappa_workload.reading import WorkloadError
from tests.workload.checks import check_refused

ROW = {
    "client": 0,
    "window_s": 600,
    "rate_rps": 2.0,
    "cv": 1.5,
    "pattern": "Gamma",
    "arg1": 0.4,
    "arg2": 1.25,
}


def written(tmp_path, *changes):
    path = tmp_path / "rates.parquet"
    pl.DataFrame([{**ROW, **change} for change in changes]).write_parquet(path)
    return path


def test_windows_come_in_order_with_the_idle_ones(tmp_path):
    day = read_rates(written(tmp_path, {"window_s": 1800, "pattern": "Weibull"}, {}, {"client": 1}))

    gamma = ClientRate(2.0, "Gamma", 0.4)
    assert day.windows == ((gamma, gamma), (), (ClientRate(2.0, "Weibull", 0.4),))
    assert day.mean_rps == 2.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window_s": 601}, "row 2: Expected `int` that's a multiple of 600 - at `$.window_s`"),
        ({"pattern": "Pareto"}, "row 2: Invalid enum value 'Pareto' - at `$.pattern`"),
        ({"arg1": 0.0}, "row 2: Expected `float` > 0.0 - at `$.arg1`"),
        ({"rate_rps": -1.0}, "row 2: Expected `float` >= 0.0 - at `$.rate_rps`"),
        ({"rate_rps": None}, "row 2: Expected `float`, got `null` - at `$.rate_rps`"),
    ],
)
def test_a_bad_row_is_named(tmp_path, change, reason):
    path = written(tmp_path, {}, change)
    check_refused(read_rates, path, ": ", reason)


def test_rates_of_nothing_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match="every rate in column 'rate_rps' is zero"):
        read_rates(written(tmp_path, {"rate_rps": 0.0}))


def test_the_shipped_day_is_whole():
    day = shipped_rates()

    assert len(day.windows) == 144
    assert all(day.windows)
    assert day.mean_rps == pytest.approx(1220.1, abs=0.1)
