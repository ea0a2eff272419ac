"""Recording rules and alerts in Prometheus' own checker, on series made for each of them."""

import subprocess
from pathlib import Path

import pytest
import yaml

from kappa import metrics as m
from kappa_dashboards import build
from kappa_deploy.prometheus import PrometheusError, configuration, tool
from kappa_router.live.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
RULES = [ROOT / "dashboards/kappa_dashboards/rules" / name for name in build.RULE_FILES]
CASES = Path(__file__).with_name("rules_test.yaml")


@pytest.fixture(scope="module")
def promtool():
    try:
        path = tool("promtool")
    except PrometheusError as error:
        pytest.skip(str(error))

    def run(*arguments, text=None):
        command = [path, *map(str, arguments)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("arguments", [("check", "rules", *RULES), ("test", "rules", CASES)])
def test_rules_are_valid_and_do_what_they_should(promtool, arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cases_notice_a_changed_rule(promtool, tmp_path):
    cases = yaml.safe_load(CASES.read_text())
    changed = []
    for path in RULES:
        changed.append(tmp_path / path.name)
        changed[-1].write_text(path.read_text().replace("> 1.5", "> 15"))
    cases["rule_files"] = [str(path) for path in changed]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yaml")
    assert done.returncode != 0
    assert "KappaLinkSlow" in done.stdout + done.stderr


def test_every_rule_has_a_case():
    text = CASES.read_text()
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert") or rule["record"].replace("rate1h", "rate5m").replace(
                    "rate6h", "rate5m"
                )
                if name != "node:kappa_ttft_error:p50_rate15m":  # by way of KappaPredictionOff
                    assert name in text, f"{name} has no case in {CASES.name}"


def test_our_own_metrics_are_well_named(promtool):
    metrics = RouterMetrics()
    for metric in m.ALL:
        labels = ["x"] * len(metric.labels)
        if metric.kind == "counter":
            metrics.inc(metric, *labels)
        elif metric.kind == "gauge":
            metrics.set(metric, *labels, to=1.0)
        else:
            metrics.observe(metric, *labels, value=0.1)
    done = promtool("check", "metrics", text=metrics.exposition().decode())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_is_told_what_to_scrape_and_which_rules():
    made = yaml.safe_load(configuration({"kappa": ["127.0.0.1:8000"]}, RULES, interval_s=0.5))
    assert made["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert made["global"]["scrape_interval"] == "500ms"
    assert [Path(path).name for path in made["rule_files"]] == list(build.RULE_FILES)
