"""`kappa why`: the picture of a request, and plain errors where there is none to be had."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import typer
from typer.testing import CliRunner

from kappa_deploy.commands import why as module
from kappa_deploy.commands.why import why

APP = typer.Typer()
APP.command()(why)


def picture(account, **options):
    return list(module.picture(account, **options))


def span(name, start_s, seconds, parent="decider", derived=False, **attributes):
    return {
        "name": name, "start_s": start_s, "end_s": start_s + seconds, "seconds": seconds,
        "parent": parent, "derived": derived, "attributes": attributes,
    }  # fmt: skip


def account(**changes):
    spans = [
        span("decider", 0.0, 4.0, parent=""),
        span("tokenize", 0.0, 0.002, tokens=500),
        span("decide", 0.002, 0.0001),
        span("first_token", 0.0021, 2.0, **{"kappa.node": "pcie"}),
        span("queue", 0.0021, 0.2, "first_token", True),
        span("load", 0.2021, 1.5, "first_token", True, tokens=4096),
        span("prefill", 1.7021, 0.3, "first_token", True, tokens=64),
        span("stream", 2.0021, 1.9979),
    ]
    parts = {"queue_s": 0.1, "load_s": 1.4, "compute_s": 0.3, "ttft_s": 1.8}
    return {
        "request_id": "r-1", "tenant": "alice", "node": "pcie", "paced": True, "end": "done",
        "policy": "priced", "reason": "load", "ratio": 64.0, "kappa_crit": 20.0, "bound": "memory",
        "predicted": parts, "actual": {**parts, "queue_s": 0.2, "load_s": 1.5, "ttft_s": 2.0},
        "shadow": None, "steered": "ray",
        "timeline": {"spans": spans, "status": 200, "end": "done"}, **changes,
    }  # fmt: skip


def test_the_picture_has_a_bar_for_each_span_in_its_place():
    lines = picture(account(), width=40)
    assert lines[0] == "r-1 of alice on pcie (paced): done, 200"
    assert "memory-bound" in lines[1] and "predicted 1.8 s, real 2 s" in lines[2]
    drawn = {line.split("│")[0].strip().rstrip("*").rsplit(" ", 2)[0].strip(): line.split("│")[1]
             for line in lines if "│" in line}  # fmt: skip
    assert len(drawn) == 8
    assert all(len(bar) == 40 for bar in drawn.values())
    assert drawn["whole request"] == "█" * 40
    load = drawn["load*"]
    assert load.index("█") == 2 and load.count("█") == 15, "from 0.2 s of 4, for 1.5 s"
    assert drawn["decide"].strip(), "what lasted is never nothing"
    assert drawn["stream"].rstrip().endswith("█") and drawn["stream"].startswith(" " * 20)
    assert lines[-1] == "Until the first token, 75% of 2 s went to loading its cached prefix."
    assert any("4,096 tokens" in line for line in lines)


def test_a_request_under_way_and_one_that_was_refused():
    under_way = account(timeline={"spans": [], "status": 0, "end": ""}, end="")
    assert picture(under_way)[-1] == "no spans: it is still under way"
    assert picture(account(timeline=None))[-1] == "no spans: this decider kept no timeline of it"
    refused = {
        "request_id": "r", "timeline": {
            "spans": [span("decider", 0.0, 0.01, parent="")], "status": 429, "end": "queue_full",
        },
    }  # fmt: skip
    assert picture(refused)[0] == "r, no worker: queue_full, 429"
    assert picture(refused)[-1] == "It ended before anything was done for it."


def test_the_shadows_choice_is_shown():
    shadow = {"chosen_node": "c2c", "predicted_ttft_s": 0.5}
    assert any("ours would have taken c2c (500 ms predicted)" in x
               for x in picture(account(shadow=shadow)))  # fmt: skip


def test_a_request_of_no_time_is_drawn_too():
    flat = [span("decider", 1.0, 0.0, parent=""), span("tokenize", 1.0, 0.0)]
    assert picture(account(timeline={"spans": flat, "status": 200, "end": "done"}))


@contextmanager
def endpoint(status, body):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("authorization")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def run(*arguments):
    return CliRunner().invoke(APP, list(arguments))


def test_the_command_asks_for_that_request_with_the_key():
    with endpoint(200, json.dumps(account()).encode()) as (url, seen):
        shown = run("a/b c", "--url", url + "/", "--key", "k")
        as_json = run("r-1", "--url", url, "--json")
    assert shown.exit_code == 0 and "loading its cached prefix" in shown.output
    assert seen[0] == ("/v1/decisions/a%2Fb%20c", "Bearer k")
    assert json.loads(as_json.stdout) == account()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, json.dumps({"error": {"message": "No request 'x'"}}).encode(), "No request 'x'"),
        (200, b"<html>", "does not answer as a kappa-serve endpoint"),
        (500, b"{}", "500"),
    ],
)
def test_what_cannot_be_shown_is_an_error_in_plain_words(status, body, message):
    with endpoint(status, body) as (url, _):
        done = run("x", "--url", url)
    assert done.exit_code == 1 and message in done.stderr.replace("\n", "")


def test_a_cluster_that_is_not_there():
    done = run("x", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1 and "kappa serve" in done.stderr
