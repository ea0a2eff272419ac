import json
import re
from html.parser import HTMLParser

import msgspec
import polars as pl
import pytest

from kappa_loadtest import report
from kappa_loadtest.report import slowest_lines, write_report
from kappa_loadtest.run_folder import RunFolderError
from tests.loadtest.replay_records import failed, foreign, many, reported


def written(folder, records, run=None, tail=""):
    folder.mkdir(exist_ok=True)
    lines = "".join(msgspec.json.encode(record).decode() + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines + tail)
    (folder / "run.json").write_text(json.dumps(run or {"workload": "w", "command": "kappa <x>"}))
    return folder


def page_of(*args, **options):
    folder = written(*args, **options)
    write_report(folder)
    return (folder / "report.html").read_text()


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
    """A page with all its pictures, of requests with hostile names, drawn once."""
    names = {"tenant": "<script>x</script>", "node": '"><img src=http://x>$\\frac$'}
    records = [*many(300), reported(**names), failed(session="f", **names)]
    return page_of(tmp_path_factory.mktemp("drawn") / "run", records)


def test_a_report_is_one_page_without_network_or_script(drawn):
    page = Page(drawn)
    assert page.outside == []
    assert not {"script", "link", "img"} & set(page.tags)
    assert page.tags.count("svg") == 4
    assert "url(http" not in page.text and "@import" not in page.text
    assert "queue &lt;full&gt;" in drawn and "kappa &lt;x&gt;" in drawn


def test_pictures_take_the_colours_of_the_page(drawn):
    pictures = "".join(re.findall(r"<svg.*?</svg>", drawn, flags=re.S))
    assert "currentColor" in pictures
    assert "#010203" not in pictures and "#000000" not in pictures
    assert "prefers-color-scheme: dark" in drawn


def test_the_page_answers_which_requests_were_slow_and_why(tmp_path, no_pictures):
    slow = reported(
        session="agent-7", turn=3, first_token_s=4.93,
        actual={**reported().actual, "ttft_s": 3.9},
    )  # fmt: skip
    text = " ".join(Page(page_of(tmp_path, [reported(), slow])).text.split())
    assert "agent-7, 3" in text
    assert "waited 3.1 of 3.9 s in the queue of node pcie (paced); predicted 50 ms" in text
    assert "4.0 / 23.4" in text and "shorter_queue" in text
    assert "Cached tokens: 3,200 expected with an unlimited cache, 3,200 found (100.0 %)" in text
    assert "Predicted TTFT: off by" in text and "over 2 requests; by 5.6 % of what the" in text


def test_the_table_holds_every_record_and_its_split(tmp_path, no_pictures):
    again = foreign(session="g", attempt=2, retried=["503", "cut"])
    page_of(tmp_path, [reported(), failed(session="f"), again])
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


def test_the_summary_is_json_and_holds_what_was_run(tmp_path, no_pictures):
    run = {"workload": "w", "objective": {"ttft_s": 1.0, "share": 0.5}}
    returned = write_report(written(tmp_path, [reported()], run))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    assert summary["run"] == run
    assert summary["slo"]["passed"] is True
    assert next(iter(slowest_lines(summary))).startswith("0.93 s  s, turn 0: ")


def test_an_empty_run_and_one_that_only_failed_have_reports(tmp_path):
    empty = Page(page_of(tmp_path / "a", []))
    assert "No request was made" in empty.text
    assert pl.read_parquet(tmp_path / "a" / "records.parquet").height == 0
    only_failed = Page(page_of(tmp_path / "b", [failed()]))
    assert "queue <full>" in only_failed.text
    assert "svg" in only_failed.tags


@pytest.mark.parametrize(
    ("run", "tail", "words"),
    [
        ({"interrupted": True}, "", "Partial: the run was stopped"),
        ({"interrupted": False, "end": None}, "", "Partial: the run has not come to its end"),
        ({}, '{"session": "s", "tu', "last line was cut off"),
        ({"client": {"held_back": 7}, "max_streams": 3}, "", "7 requests were held back: the"),
        (
            {"nodes": [{"node": "pcie", "paced": True}, {"node": "real", "paced": False}]}, "",
            "emulated: pcie spend time",
        ),
    ],
)  # fmt: skip
def test_what_a_reader_must_know_stands_on_the_page(run, tail, words, tmp_path, no_pictures):
    records = [reported(), reported(session="r", node="real", paced=False)]
    assert words in Page(page_of(tmp_path, records, {"workload": "w", **run}, tail)).text
    assert json.loads((tmp_path / "summary.json").read_text())["requests"] == 2


def test_the_endpoints_own_objective_is_not_reported_as_missed(tmp_path, no_pictures):
    late = reported(session="late", first_token_s=90.0, last_token_s=91.0, ended_s=91.0)
    own = page_of(tmp_path / "own", [reported(), late])
    assert "2 requests; predicted objective: 50.0 % met" in own
    assert "missed" not in own and "<h1 class='bad'" not in own
    run = {"workload": "w", "objective": {"share": 0.9}}
    required = page_of(tmp_path / "required", [reported(), late], run)
    assert "<h1 class='bad'>SLO missed: 50.0 % of 2 requests within it, 90.0 % required" in required


@pytest.mark.parametrize("options", [{"closed": 3}, {"closed": None, "arrivals": "closed:3"}])
def test_a_closed_loop_has_no_rate_of_its_own(options, tmp_path, no_pictures):
    records = [reported(session=str(i), scheduled_s=1.0 + i * 1e-6) for i in range(3)]
    summary = write_report(written(tmp_path, records, {"workload": "w", "asked": options}))
    assert summary["rate_rps"] == pytest.approx(3 / summary["duration_s"])


def test_report_uses_and_keeps_the_decisions_of_a_killed_run(tmp_path, no_pictures):
    folder = written(tmp_path, [reported(predicted=None, actual=None)])
    decision = {"request_id": "id", "predicted": reported().predicted, "actual": reported().actual}
    (folder / "decisions.jsonl").write_text(json.dumps(decision) + "\n" + '{"request_id": "i')
    assert write_report(folder)["slowest"][0]["actual"]["source"] == "derived"
    assert (folder / "decisions.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"session": "s", "turn": 1, "scheduled_s": "soon"}', "got `str` - at `$.scheduled_s`"),
        ('{"session": "s", "turn": 1, "gaps_s": [true]}', "gaps_s"),
        ('{"session": "s", "turn": 1, "node": null}', "got `null` - at `$.node`"),
        ('{"session": "s", "turn": 1, "colour": 1}', "colour"),
        ("[1]", ""),
        ("{", ""),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, message):
    folder = written(tmp_path, [reported()], tail=line + "\n")
    with pytest.raises(RunFolderError, match=rf"records\.jsonl:2: .*{re.escape(message)}"):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("run", "message"),
    [(None, "run.json"), ("{", "run.json"), ("[]", "object"), ('{"objective": {"x": 1}}', "'x'")],
)
def test_a_bad_run_file_is_named(tmp_path, run, message):
    if run is not None:
        (tmp_path / "run.json").write_text(run)
    with pytest.raises(RunFolderError, match=message):
        write_report(tmp_path)
