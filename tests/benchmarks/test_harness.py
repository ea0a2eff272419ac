"""The harness of all benches: order of arms, intervals worked out by hand, results, JSON lines."""

from __future__ import annotations

import gc
import io
import json
import math
from pathlib import Path

import pytest
import typer
from rich.console import Console

from kappa_benchmarks import harness


def test_alternate_reverses_the_arms_each_round() -> None:
    ran: list[str] = []
    arms = {name: (lambda name=name: ran.append(name) or len(ran)) for name in "ab"}
    samples = harness.alternate(arms, rounds=2)
    # Round -1 is the warm-up (b a), then rounds 0 (a b) and 1 (b a).
    assert "".join(ran) == "baabba"
    assert samples == {"a": [3, 6], "b": [4, 5]}


def test_garbage_collection_is_back_on_after_an_arm_that_raises() -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        harness.alternate({"a": fails}, rounds=1)
    assert gc.isenabled()


def test_paired_interval_is_students_t_on_the_logarithms() -> None:
    # Ratios e^0 and e^2: the logs' mean is 1, their deviation sqrt(2); the half is
    # t(0.975, 1) sqrt(2) / sqrt(2) = 12.7062.
    found = harness.paired([1.0, math.e**2], [1.0, 1.0])
    assert found.mean == pytest.approx(math.e)
    assert math.log(found.high) == pytest.approx(1 + 12.7062, abs=1e-4)
    assert math.log(found.low) == pytest.approx(1 - 12.7062, abs=1e-4)
    assert found.count == 2


def test_paired_interval_is_narrow_for_a_steady_ratio() -> None:
    scale = [1.0, 10.0, 100.0]
    found = harness.paired([0.9 * each for each in scale], scale)
    assert [found.mean, found.low, found.high] == pytest.approx([0.9, 0.9, 0.9])


def test_one_pair_has_a_mean_and_no_interval() -> None:
    found = harness.paired([3.0], [2.0])
    assert found.mean == pytest.approx(1.5)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        harness.paired([], [])


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "1,,2", "nan", "inf", "1e9"])
def test_numbers_refuse_a_text_without_any_above_0(text: str) -> None:
    with pytest.raises(ValueError, match=r"--loads is .* give numbers"):
        harness.numbers(text, "--loads")
    assert harness.numbers("0.5,2,0.5", "--loads") == (0.5, 2.0)


@pytest.mark.parametrize("text", ["c", "a,c", " , "])
def test_a_text_of_unknown_names_is_refused_with_those_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"--what: .*: choose of a, b"):
        harness.names(text, ["a", "b"], "--what")
    assert harness.names(" b,a,b", ["a", "b"], "--what") == ("b", "a")


def test_quantile_is_linear_and_none_of_nothing() -> None:
    # Five values: 0.9 lies at 3.6, so 4 + 0.6 (5 - 4).
    assert harness.quantile([5, 1, 4, 2, 3], 0.9) == pytest.approx(4.6)
    assert harness.quantile([], 0.5) is None


def test_spread_is_median_least_and_most() -> None:
    assert harness.spread([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "least": 1.0, "most": 4.0}


def test_a_result_says_command_machine_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/kappa", "bench", "x y"])
    found = harness.result(rows=[1])
    assert found["rows"] == [1]
    assert found["command"] == "kappa bench 'x y'"
    assert len(found["date"].split("-")) == 3
    assert "GiB" in found["machine"]
    assert len(found["load_average"]) == 3


def test_publish_prints_json_and_writes_the_same_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, path = {"rows": [1], "machine": "m", "command": "c"}, tmp_path / "made" / "result.json"
    harness.publish(facts, lambda console: console.print("shown"), json_output=True, out=path)
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text()) == facts


def test_publish_shows_a_reader_the_command_and_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {"machine": "m [2]", "command": "c", "load_average": [3.06, 2.0, 1.0]}
    harness.publish(
        facts, lambda console: console.print("shown"), json_output=False, remark="paced"
    )
    assert capsys.readouterr().out.splitlines() == [
        "shown",
        "c  on m [2], load average 3.1/2.0/1.0, paced",
    ]


def test_publish_writes_null_for_numbers_that_json_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness.publish({"x": [math.nan, -math.inf, 1.5]}, lambda _: None, json_output=True)
    assert json.loads(capsys.readouterr().out) == {"x": [None, None, 1.5]}


def test_json_line_cut_short_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.jsonl"
    assert harness.read_lines(path) == []
    harness.append_line(path, {"a": 1})
    harness.append_line(path, {"a": 2})
    path.write_text(path.read_text() + '{"a": ')
    assert harness.read_lines(path) == [{"a": 1}, {"a": 2}]
    harness.append_line(path, {"a": 3})
    assert path.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_broken_json_line_in_the_middle_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2"):
        harness.read_lines(path)


def test_rows_table_reads_inner_keys_and_marks_what_lacks() -> None:
    columns: dict[str, harness.Column] = {
        "name": "name", "p50": "ttft_s.p50:ms", "met": "met:.0%", "lost": "lost.p50:.1f",
        "twice": lambda row: 2 * str(row["name"]),
    }  # fmt: skip
    text = io.StringIO()
    rows = [{"name": "a", "ttft_s": {"p50": 0.25}, "met": 0.5, "lost": None}]
    Console(file=text, width=80).print(harness.rows_table("t", columns, rows))
    cells = next(line for line in text.getvalue().splitlines() if "250" in line)
    assert [cell.strip() for cell in cells.strip("│").split("│")] == ["a", "250", "50%", "-", "aa"]


def test_usage_errors_end_the_command_with_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, harness.usage_errors():
        raise ValueError("no such trace")
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error: no such trace\n"
