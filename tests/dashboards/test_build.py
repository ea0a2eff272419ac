"""The committed dashboards: up to date, in Grafana's order, and only of metrics that exist."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from kappa import metrics as m
from kappa_dashboards import build, names
from kappa_dashboards.check import fill, panels_of, variables_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards/kappa_dashboards"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = [(uid, panel) for uid, board in BOARDS.items() for panel in panels_of(board)]
IDS = [f"{uid}: {panel['title']}" for uid, panel in PANELS]
each_panel = pytest.mark.parametrize(("uid", "panel"), PANELS, ids=IDS)


def expressions(uid, panel):
    variables = variables_of(BOARDS[uid], 60.0)
    return [fill(target["expr"], variables) for target in panel["targets"]]


def selectors(node, rated=False):
    """(series name, is it inside a rate) for every selector below an expression's node."""
    if isinstance(node, promql_parser.VectorSelector):
        return [(node.name, rated)]
    if isinstance(node, promql_parser.MatrixSelector):
        return selectors(node.vector_selector, rated)
    if isinstance(node, promql_parser.Call):
        inside = rated or node.func.name in ("rate", "increase")
        return [pair for arg in node.args for pair in selectors(arg, inside)]
    if isinstance(node, promql_parser.AggregateExpr):
        return selectors(node.expr, rated) + (selectors(node.param, rated) if node.param else [])
    if isinstance(node, promql_parser.BinaryExpr):
        return selectors(node.lhs, rated) + selectors(node.rhs, rated)
    if isinstance(node, (promql_parser.ParenExpr, promql_parser.UnaryExpr)):
        return selectors(node.expr, rated)
    if isinstance(node, promql_parser.SubqueryExpr):
        return selectors(node.expr, rated)
    assert isinstance(node, (promql_parser.NumberLiteral, promql_parser.StringLiteral)), node
    return []


def test_the_committed_files_are_what_the_code_makes(capsys):
    is_stale = build.main(["--check"])
    assert not is_stale, f"run python -m kappa_dashboards.build\n{capsys.readouterr().out}"


def test_a_changed_file_is_noticed(tmp_path, monkeypatch, capsys):
    texts = {tmp_path / path.name: text for path, text in build.outputs().items()}
    for path, text in texts.items():
        path.write_text(text)
    monkeypatch.setattr(build, "outputs", lambda: texts)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert build.main(["--check"]) == 0
    changed = next(iter(texts))
    changed.write_text(texts[changed].replace("First token", "Last token"))
    assert build.main(["--check"]) == 1
    assert changed.name in capsys.readouterr().out


@each_panel
def test_query_is_promql_of_known_metrics_and_rates_counters(uid, panel):
    known = names.series()
    for expr in expressions(uid, panel):
        found = selectors(promql_parser.parse(expr))
        assert found, f"{expr} asks for nothing"
        for name, is_rated in found:
            assert name in known, f"{name}: neither in kappa.metrics nor in kappa_dashboards.names"
            counts = known[name] == "counter" or name.endswith(("_bucket", "_sum", "_count"))
            assert counts == is_rated, f"{name} in {expr}: rate counters, and only counters"


def test_a_query_that_is_no_promql_would_be_refused():
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (node (rate(kappa_requests_total[1m]))")


@each_panel
def test_panel_has_a_unit_a_description_and_the_chosen_source(uid, panel):
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(panel["description"]) > 15
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["legendFormat"]
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters)


@each_panel
def test_every_panel_links_to_a_line_of_the_docs(uid, panel):
    url = panel["links"][0]["url"]
    page, row = re.fullmatch(r"\$\{docs\}/(\w+\.md)#:~:text=(\w+)", url).groups()
    text = (ROOT / "docs" / page).read_text()
    assert f"| `{row}` |" in text, f"docs/{page} has no line on {row}"
    assert any(row in expr for expr in expressions(uid, panel))


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(uid):
    panels = BOARDS[uid]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} overlaps"
        taken |= cells


@pytest.mark.parametrize("uid", BOARDS)
def test_every_variable_of_a_query_exists(uid):
    defined = {variable["name"] for variable in BOARDS[uid]["templating"]["list"]}
    text = json.dumps(BOARDS[uid]["panels"])
    used = set(re.findall(r"\$\{?([a-z_]+)", text)) - {"__rate_interval"}
    assert used <= defined
    assert "datasource" in defined


def test_the_first_row_of_the_cluster_is_the_objective():
    rows = [p["title"] for p in BOARDS["kappa-cluster"]["panels"] if p["type"] == "row"]
    assert rows[0] == "Service objective"


def test_objectives_to_choose_from_are_bounds_of_the_histogram():
    board = BOARDS["kappa-cluster"]
    slo = next(v for v in board["templating"]["list"] if v["name"] == "ttft_slo")
    offered = [float(option["value"]) for option in slo["options"]]
    assert offered == list(m.TTFT.buckets)
    # Exposition writes whole bounds with their decimal.
    assert slo["current"]["value"] == "1.0"


def test_overview_comes_first_with_12_panels_on_one_screen():
    assert build.DASHBOARDS[0].uid == "kappa-overview"
    panels = list(panels_of(BOARDS["kappa-overview"]))
    assert len(panels) == 12
    assert max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) <= 24


def test_the_dashboards_show_every_metric_of_ours():
    text = "".join(json.dumps(board) for board in BOARDS.values())
    assert not [metric.name for metric in m.ALL if metric.name not in text]


def test_foreign_metrics_are_listed_in_the_docs():
    assert names.document() in (ROOT / "docs" / "dashboards.md").read_text()


def test_rules_and_alerts_name_known_metrics_or_each_other():
    recorded, found = set(), set()
    for file in build.RULE_FILES:
        for group in yaml.safe_load((FOLDER / "rules" / file).read_text())["groups"]:
            for rule in group["rules"]:
                recorded.add(rule.get("record"))
                found |= {name for name, _ in selectors(promql_parser.parse(rule["expr"]))}
                if "alert" in rule:
                    assert rule["labels"]["severity"] in ("warning", "critical")
                    assert rule["annotations"].keys() == {"summary", "description"}
    assert not found - set(names.series()) - recorded
