"""`kappa doctor` over HTTP: what a real decider answers is what its checks read."""

import json

import pytest
from typer.testing import CliRunner

from kappa_deploy.cli import app

pytestmark = pytest.mark.ray


def diagnosed(*options):
    done = CliRunner().invoke(app, ["doctor", "--json", *options])
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return done.exit_code, {row["check"]: row for row in found["checks"]}


def test_an_idle_cluster_is_found_well(stack):
    code, rows = diagnosed("--url", stack.url)
    of_cluster = {name: rows[name] for name in list(rows)[4:]}
    # The engines here emulate steps of microseconds, which no process keeps up with.
    del of_cluster["rates"], of_cluster["prediction"]
    assert {r["check"]: r for r in of_cluster.values() if r["status"] in ("warn", "fail")} == {}
    passed = {name for name, row in of_cluster.items() if row["status"] == "pass"}
    assert {"workers", "clock", "kv events", "index", "steering"} <= passed
    assert code == (1 if any(row["status"] == "fail" for row in rows.values()) else 0)


def test_without_a_probe_nothing_is_sent(stack):
    def sent():  # what became of them may yet be reported
        found = stack.http.get("/v1/decisions").json()["decisions"]
        return [decision["request_id"] for decision in found]

    before = sent()
    _, rows = diagnosed("--url", stack.url, "--no-probe")
    assert rows["hashes"]["status"] == "skip"
    assert sent() == before
