"""The live check, against a real Prometheus that knows nothing but itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kappa_dashboards import build, check
from kappa_deploy.prometheus import PrometheusError, prometheus, ray_targets

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    try:
        with prometheus({"nobody": ["127.0.0.1:1"]}, interval_s=0.2) as running:
            yield running
    except PrometheusError as error:
        pytest.skip(str(error))


def with_expression(tmp_path, expr):
    """The dashboards, the first panel's query replaced."""
    for built in build.DASHBOARDS:
        board = json.loads((build.FOLDER / f"{built.uid}.json").read_text())
        next(check.panels_of(board))["targets"][0]["expr"] = expr
        (tmp_path / f"{built.uid}.json").write_text(json.dumps(board))
    return tmp_path


def test_a_prometheus_without_our_metrics_fails_the_check(server, capsys):
    assert check.main(["--prometheus", server, "--window", "10"]) == 1
    said = capsys.readouterr().out
    assert "Goodput: MISSING" in said
    assert "GPU power: may be empty: NVML" in said


def test_a_query_with_data_is_not_missing(server, tmp_path):
    folder = with_expression(tmp_path, "vector($slo_target) + 0 * time()")
    answers = check.ask(server, 10.0, 5.0, time.time(), folder)
    assert not answers[0].is_missing
    assert answers[0].values[0] == 0.95
    assert answers[1].is_missing


def test_a_query_of_nothing_but_nan_is_missing(server, tmp_path):
    answers = check.ask(server, 10.0, 5.0, time.time(), with_expression(tmp_path, "vector(0/0)"))
    assert answers[0].is_missing


def test_a_refused_query_is_an_error(server, tmp_path):
    with pytest.raises(check.CheckError, match="sum by"):
        check.ask(server, 10.0, 5.0, time.time(), with_expression(tmp_path, "sum by (a"))


def test_nobody_there_is_an_error(capsys):
    assert check.main(["--prometheus", "http://127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_no_window_is_refused(capsys):
    with pytest.raises(SystemExit):
        check.main(["--prometheus", "http://127.0.0.1:1", "--window", "0"])
    assert "--window" in capsys.readouterr().err


def test_variables_are_filled_in_longest_name_first():
    assert check.fill("a[$__rate_interval] $slo $slo_target", {
        "__rate_interval": "30s", "slo": "1", "slo_target": "0.9",
    }) == "a[30s] 1 0.9"  # fmt: skip


def test_the_server_ends_with_whoever_started_it(server, tmp_path):
    program = (
        "import time\nfrom kappa_deploy.prometheus import prometheus\n"
        "with prometheus({}) as url:\n    print(url, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    port = process.stdout.readline().strip().rsplit(":", 1)[1]
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("prometheus" in child.name() for child in family), port
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=15.0)
    assert not alive


def test_rays_ports_are_read_from_the_session_of_a_process(tmp_path):
    for pid, port in ((7, 1), (7, 2), (8, 3)):
        folder = tmp_path / f"session_2026_{pid}"
        folder.mkdir(exist_ok=True)
        (folder / f"metrics_export_port_{port}").write_text(f"{port}\n")
    assert ray_targets(7, tmp_path) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert ray_targets(9, tmp_path) == []
