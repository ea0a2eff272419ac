"""Writes the dashboards' JSON, and the rules as a Kubernetes object, from this package.

Run `python -m kappa_dashboards.build` after a change of a panel, a rule or a metric; `--check`
fails if that was forgotten. Grafana's JSON is made with its own SDK. Panels link to the line of the
docs that explains their metric, below the address in the dashboard's variable `docs`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as queries

from kappa import metrics as m
from kappa_dashboards import names
from kappa_dashboards.cluster import CLUSTER
from kappa_dashboards.overview import OVERVIEW
from kappa_dashboards.panels import Dashboard, Panel
from kappa_dashboards.routing import ROUTING

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
DASHBOARDS = (OVERVIEW, CLUSTER, ROUTING)
RULE_FILES = ("recording.yaml", "alerts.yaml")
RULE_OBJECT = ROOT / "deploy/kappa_deploy/k8s/components" / "monitoring" / "prometheus-rule.yaml"

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Grafana serves files of its `public` folder; for docs published elsewhere set `docs`.
_DOCS = "/public/kappa-serve/docs"
_SERIES = re.compile(r"\b(?:kappa|ray)_[a-z0-9_]+")


def dashboard_json(dashboard: Dashboard) -> str:
    """Grafana's JSON of one dashboard; the same for the same panels."""
    built = (
        builders.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.description)
        .tags(["kappa-serve"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .variables(_variables())
        .links([_siblings()])
    )
    for row in dashboard.rows:
        built = built.with_row(builders.Row(row.title))
        for panel in row.panels:
            built = built.with_panel(_panel(panel))
    data = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    for number, panel_data in enumerate(data["panels"], start=1):
        panel_data["id"] = number
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def doc_link(panel: Panel) -> str:
    """The line of the docs that explains the panel's first metric, below the variable `docs`."""
    page, row = names.documented(_SERIES.findall(panel.queries[0].expr)[0])
    # A text fragment: the browser scrolls to the name, wherever the line has moved.
    return f"${{docs}}/{page}#:~:text={row}"


def _variables() -> list[Any]:
    objectives = [f"{bound:.1f}" if bound >= 1 else f"{bound:g}" for bound in m.TTFT.buckets]
    return [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        builders.QueryVariable("node")
        .label("Node")
        .datasource(DATASOURCE)
        .query(f"label_values({m.CRITICAL_RATIO.name}, node)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all")),
        _choice("ttft_slo", "First token within (s)", objectives, "1.0"),
        _choice("slo_target", "Target share", ["0.9", "0.95", "0.99", "0.999"], "0.95"),
        builders.TextBoxVariable("docs").label("Documentation").default_value(_DOCS),
    ]


def _choice(name: str, label: str, values: list[str], default: str) -> Any:
    return (
        builders.CustomVariable(name)
        .label(label)
        .values(",".join(values))
        .options([models.VariableOption(text=v, value=v, selected=v == default) for v in values])
        .current(models.VariableOption(text=default, value=default, selected=True))
    )


def _siblings() -> Any:
    return (
        builders.DashboardLink("kappa-serve")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["kappa-serve"])
        .include_vars(True)
        .keep_time(True)
    )


def _panel(panel: Panel) -> Any:
    built = (
        _empty_panel(panel)
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(DATASOURCE)
        .span(panel.width)
        .height(panel.height)
        .links([builders.DashboardLink("What the metric means").url(doc_link(panel))])
    )
    if panel.kind != "heatmap":
        built = built.min(0.0)
        if panel.top is not None:
            built = built.max(panel.top)
    if panel.thresholds:
        built = built.thresholds(_thresholds(panel))
    for letter, query in zip("ABCDEFGHIJKL", panel.queries, strict=False):
        target = (
            prometheus.Dataquery()
            .ref_id(letter)
            .datasource(DATASOURCE)
            .expr(query.expr)
            .legend_format(query.legend)
        )
        if panel.kind == "heatmap":
            target = target.format(queries.PromQueryFormat.HEATMAP)
        elif panel.kind == "bars":
            target = target.instant()
        built = built.with_target(target)
    return built


def _timeseries(panel: Panel) -> Any:
    legend = common.VizLegendOptions().display_mode(choices.LegendDisplayMode.LIST)
    legend = legend.placement(choices.LegendPlacement.BOTTOM).show_legend(True).calcs([])
    tooltip = common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI)
    built = timeseries.Panel().line_width(1).legend(legend).tooltip(tooltip)
    if panel.stacked:
        stack = common.StackingConfig().mode(choices.StackingMode.NORMAL)
        built = built.fill_opacity(30).stacking(stack)
    if panel.thresholds:
        style = common.GraphThresholdsStyleConfig().mode(choices.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds_style(style)
    return built


def _last_value() -> Any:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)


def _empty_panel(panel: Panel) -> Any:
    """A panel of the right kind, without queries."""
    if panel.kind == "stat":
        area = choices.BigValueGraphMode.AREA
        return stat.Panel().reduce_options(_last_value()).graph_mode(area)
    if panel.kind == "bars":
        across = choices.VizOrientation.HORIZONTAL
        return bargauge.Panel().reduce_options(_last_value()).orientation(across)
    if panel.kind == "heatmap":
        return heatmap.Panel()
    return _timeseries(panel)


def _thresholds(panel: Panel) -> Any:
    colours = ["red", "orange", "green"] if panel.falling else ["green", "orange", "red"]
    steps = zip((None, *panel.thresholds), colours, strict=True)
    return (
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def rule_object() -> str:
    """All rules as one `PrometheusRule` of the Prometheus operator, in YAML."""
    groups = [
        group
        for file in RULE_FILES
        for group in yaml.safe_load((FOLDER / "rules" / file).read_text(encoding="utf-8"))["groups"]
    ]
    data = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kappa-serve"},
        "spec": {"groups": groups},
    }
    head = (
        "# Made by `python -m kappa_dashboards.build` from dashboards/kappa_dashboards/rules; "
        "do not edit.\n"
    )
    return head + yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)


def outputs() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {FOLDER / f"{d.uid}.json": dashboard_json(d) for d in DASHBOARDS}
    return {**files, RULE_OBJECT: rule_object()}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with `--check` list those that are out of date."""
    parser = argparse.ArgumentParser(prog="python -m kappa_dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args(arguments).check
    stale = [
        path
        for path, text in outputs().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outputs()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
