import json
import re
from html.parser import HTMLParser

import msgspec
import polars as pl
import pytest

from loadtest import report
from loadtest.journal import JournalError
from loadtest.report import slowest_lines, write_report
from tests.loadtest.replay_records import failed, foreign, many, reported


def page_of(folder):
    write_report(folder)
    return (folder / "report.html").read_text()


def written(folder, records, run=None, tail=""):
    folder.mkdir(exist_ok=True)
    lines = "".join(msgspec.json.encode(record).decode() + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines + tail)
    (folder / "run.json").write_text(json.dumps(run or {"workload": "w", "command": "kappa <x>"}))
    return folder


@pytest.fixture
def no_pictures(monkeypatch):
    """For tests of words: drawing takes most of a report's time."""
    monkeypatch.setattr(report, "drawn", lambda *_: {})


class Page(HTMLParser):
    """What a browser would fetch, run and show."""

    def __init__(self, text):
        super().__init__()
        self.outside, self.tags, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(value)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A page with all its pictures, drawn once."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    return page_of(written(folder, [*many(300), failed()]))


def test_a_report_is_one_page_without_network_or_script(drawn):
    page = Page(drawn)
    assert page.outside == []
    assert "script" not in page.tags and "link" not in page.tags
    assert page.tags.count("svg") == 6
    assert "url(http" not in page.text and "@import" not in page.text


def test_the_page_answers_which_requests_were_slow_and_why(tmp_path, no_pictures):
    slow = reported(
        session="agent-7", turn=3, first_token_s=4.93,
        actual={**reported().actual, "ttft_s": 3.9},
    )  # fmt: skip
    text = Page(page_of(written(tmp_path, [reported(), slow]))).text
    assert "agent-7, 3" in text
    assert "waited 3.1 of 3.9 s in the queue of node pcie (paced); predicted 50 ms" in text
    assert "4.0 / 23.4" in text and "shorter_queue" in text
    assert "paced" in text and "emulated" in text


def test_what_comes_from_outside_is_escaped(tmp_path):
    names = {"tenant": "<script>x</script>", "node": '"><img src=http://x>$\\frac$'}
    records = [reported(**names), failed(session="f", **names)]
    raw = page_of(written(tmp_path, records))
    page = Page(raw)
    assert "script" not in page.tags and "img" not in page.tags
    assert "queue &lt;full&gt;" in raw and "kappa &lt;x&gt;" in raw


def test_pictures_take_the_colours_of_the_page(drawn):
    pictures = "".join(re.findall(r"<svg.*?</svg>", drawn, flags=re.S))
    assert "currentColor" in pictures
    assert "#010203" not in pictures and "#000000" not in pictures
    assert "prefers-color-scheme: dark" in drawn


def test_the_table_holds_every_record_and_its_split(tmp_path, no_pictures):
    again = foreign(session="g", attempt=2, retried=["503", "cut"])
    write_report(written(tmp_path, [reported(), failed(session="f"), again]))
    table = pl.read_parquet(tmp_path / "records.parquet")
    assert table.height == 3
    first = table.row(0, named=True)
    assert first["ttft_s"] == pytest.approx(0.93)
    assert first["actual_queue_s"] == pytest.approx(0.1)
    assert first["predicted_load_s"] == pytest.approx(0.3)
    assert first["gaps_s"] == pytest.approx([0.1] * 4)
    assert table["split"].to_list() == ["derived", None, "none"]
    assert table["error"].to_list() == ["", "429", ""]
    assert table["retried"].to_list() == [[], [], ["503", "cut"]]


def test_the_summary_is_json_and_says_what_was_run(tmp_path, no_pictures):
    run = {"workload": "w", "objective": {"ttft_s": 1.0, "share": 0.5}}
    write_report(written(tmp_path, [reported()], run))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"] == run
    assert summary["slo"]["passed"] is True
    assert next(iter(slowest_lines(summary))).startswith("0.93 s  s, turn 0: ")


def test_an_empty_run_and_one_that_only_failed_have_reports(tmp_path):
    empty = Page(page_of(written(tmp_path / "a", [])))
    assert "No request was made" in empty.text
    assert pl.read_parquet(tmp_path / "a" / "records.parquet").height == 0
    only_failed = Page(page_of(written(tmp_path / "b", [failed()])))
    assert "queue <full>" in only_failed.text
    assert "svg" in only_failed.tags


def test_a_partial_run_says_so(tmp_path, no_pictures):
    run = {"workload": "w", "interrupted": True}
    assert "Partial" in Page(page_of(written(tmp_path, [reported()], run))).text


def test_the_endpoints_own_objective_is_not_reported_as_missed(tmp_path, no_pictures):
    records = [
        reported(),
        reported(session="late", first_token_s=90.0, last_token_s=91.0, ended_s=91.0),
    ]
    own = page_of(written(tmp_path / "own", records))
    assert "2 requests; predicted objective: 50.0 % met" in own
    assert "missed" not in own and "<h1 class='bad'" not in own
    run = {"workload": "w", "objective": {"share": 0.9}}
    asked = page_of(written(tmp_path / "asked", records, run))
    assert "<h1 class='bad'>SLO missed: 50.0 % of 2 requests within it, 90.0 % required" in asked


def test_a_closed_loop_has_no_rate_of_its_own(tmp_path, no_pictures):
    records = [reported(session=str(i), scheduled_s=1.0 + i * 1e-6) for i in range(3)]
    for asked in ({"closed": 3}, {"closed": None, "arrivals": "closed:3"}):
        folder = written(tmp_path, records, {"workload": "w", "asked": asked})
        write_report(folder)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["rate_rps"] == pytest.approx(3 / summary["duration_s"])


def test_a_journal_cut_in_its_last_line_is_read_up_to_there(tmp_path, no_pictures):
    folder = written(tmp_path, [reported()], tail='{"session": "s", "tu')
    assert "cut off" in Page(page_of(folder)).text
    assert json.loads((folder / "summary.json").read_text())["requests"] == 1


def test_decisions_of_a_killed_run_are_used_and_left_where_they_are(tmp_path, no_pictures):
    record = reported(predicted=None, actual=None)
    folder = written(tmp_path, [record])
    decision = {"request_id": "id", "predicted": reported().predicted, "actual": reported().actual}
    (folder / "decisions.jsonl").write_text(json.dumps(decision) + "\n" + '{"request_id": "i')
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["slowest"][0]["actual"]["source"] == "derived"
    assert (folder / "decisions.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"session": "s", "turn": 1, "scheduled_s": "soon"}',
            "`float`, got `str` - at `$.scheduled_s`",
        ),
        ('{"session": "s", "turn": 1, "gaps_s": [true]}', "gaps_s"),
        ('{"session": "s", "turn": 1, "node": null}', "got `null` - at `$.node`"),
        ('{"session": "s", "turn": 1, "colour": 1}', "colour"),
        ("[1]", ""),
        ("{", ""),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, said):
    folder = written(tmp_path, [reported()], tail=line + "\n")
    with pytest.raises(JournalError, match=rf"records\.jsonl:2: .*{re.escape(said)}"):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("run", "said"),
    [(None, "run.json"), ("{", "run.json"), ("[]", "object"), ('{"objective": {"x": 1}}', "'x'")],
)
def test_a_bad_run_file_is_named(tmp_path, run, said):
    if run is not None:
        (tmp_path / "run.json").write_text(run)
    with pytest.raises(JournalError, match=said):
        write_report(tmp_path)


def test_only_paced_nodes_are_said_to_be_emulated(tmp_path, no_pictures):
    rows = [{"node": "pcie", "paced": True}, {"node": "real", "paced": False}]
    records = [reported(), reported(session="r", node="real", paced=False)]
    folder = written(tmp_path, records, {"workload": "w", "nodes": rows})
    assert "emulated: pcie spend time" in Page(page_of(folder)).text
