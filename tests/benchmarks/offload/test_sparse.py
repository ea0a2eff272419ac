"""The bench of sparse decoding: one small run end to end, and what it refuses."""

import json

import pytest

from benchmarks.offload import __main__ as command
from benchmarks.offload.goals import judge
from benchmarks.offload.needs import GIB, sparse_needs
from benchmarks.offload.run import Options, run
from benchmarks.offload.settings import SETTINGS


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "rows.json"
    done = run(["clo-cpu-smallest"], Options(out=out))
    assert json.loads(out.read_text())["rows"] == json.loads(json.dumps(done["rows"]))
    return done


def by_policy(result):
    return {row["policy"]: row for row in result["rows"]}


def test_every_row_says_what_its_hit_rate_is(result):
    rows = by_policy(result)
    assert "injected" in result["hit_rates"]
    assert rows["prefetch-all"]["hits"] == 0.0 and rows["clo-100"]["hits"] == 1.0
    assert rows["clo-79"]["hits"] == pytest.approx(0.79, abs=0.05)
    for row in rows.values():
        copy = row["policy"].endswith("alone")
        assert (row["hits_are"] is None) == copy
        assert row["repeats"] == 5 and row["latency_s"] > 0
        assert copy or row["tokens_per_s"] == pytest.approx(2 / row["latency_s"])


def test_only_misses_cross_the_link_as_many_as_were_injected(result):
    rows = by_policy(result)
    # Two layers of three, two heads, two sequences of 256 tokens, a tenth chosen; 16 elements.
    choice = 2 * 2 * 2 * 26 * 2 * 16 * 4
    assert rows["prefetch-all"]["bytes_h2d"] == choice
    assert rows["clo-79"]["bytes_h2d"] == pytest.approx((1 - rows["clo-79"]["hits"]) * choice)
    assert rows["clo-79-waited"]["bytes_h2d"] == rows["clo-79"]["bytes_h2d"]
    assert rows["clo-100"]["bytes_h2d"] == rows["choose-only"]["bytes_h2d"] == 0
    assert rows["gather-alone"]["bytes_h2d"] == rows["copy-alone"]["bytes_h2d"] == choice / 2


def test_predictions_stand_beside_and_speed_ups_are_over_loading_the_whole_choice(result):
    rows = by_policy(result)
    for name in ("prefetch-all", "clo-79", "clo-79-waited"):
        row = rows[name]
        expected = row["predicted_s"] / row["latency_s"] - 1
        assert row["predicted_error"] == pytest.approx(expected)
    assert rows["clo-79-waited"]["predicted_s"] > rows["clo-79"]["predicted_s"]
    assert rows["clo-79"]["baseline"] == "prefetch-all"
    assert rows["prefetch-all"]["speedup"] == 1.0


def test_published_figures_are_judged_on_a_gpu_alone(result):
    rows = result["rows"]
    assert [goal["goal"] for goal in judge(rows, "cpu")] == ["predicted within 15 % of measured"]
    named = [goal["goal"] for goal in judge(rows, "cuda")]
    assert sum("1.16 times" in name for name in named) == 1
    assert sum("90 % of a plain copy" in name for name in named) == 1


def test_settings_for_a_gpu_fit_the_machine_they_are_for():
    sparse = [setting for setting in SETTINGS.values() if setting.is_sparse]
    assert len(sparse) == 7
    for setting in sparse:
        for cell in setting.groups[0].sparse:
            wanted = sparse_needs(setting, setting.groups[0], cell)
            assert wanted.host_bytes < 100 * GIB, (setting.name, cell.name)
            assert wanted.device_bytes <= setting.cap_bytes, (setting.name, cell.name)


def test_what_does_not_fit_is_left_out_with_both_numbers(monkeypatch):
    monkeypatch.setattr("benchmarks.offload.needs.free_host_bytes", lambda: 1000)
    done = run(["clo-cpu-smallest"], Options())
    assert not done["rows"] and "are free: choose clo-cpu" in done["left_out"][0]["why"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--setting", "none"], "no setting named 'none'"),
        (["--setting", "clo-cpu-smallest", "--only", "9x"], "no cell has any of 9x"),
        (["--setting", "clo-cpu-smallest", "--repeats", "2"], "2 repeats say too little"),
    ],
)
def test_what_is_not_there_is_refused_with_status_2(capsys, arguments, why):
    assert command.main(arguments) == 2
    assert why in capsys.readouterr().err
