"""`kappa doctor` on a real cluster: what does not depend on the machine's speed is well there."""

import json

import pytest
from typer.testing import CliRunner

from kappa_deploy.cli import app

pytestmark = pytest.mark.live

# Others' tests on this cluster harm it, and a busy machine is slow: neither is asked here.
SOUND = (
    "versions", "workers", "clock", "kv events", "hashes", "profile", "host tier", "scheduler",
    "steering", "rule errors", "misused blocks", "event gaps",
)  # fmt: skip


def test_the_doctor_finds_the_cluster_well(idle):
    done = CliRunner().invoke(app, ["doctor", "--url", idle.url, "--json"])
    found = json.loads(done.stdout)
    rows = {row["check"]: row for row in found["checks"]}
    assert {name: rows[name] for name in SOUND if rows[name]["status"] != "pass"} == {}
    assert done.exit_code == (1 if found["fail"] else 0)
    assert rows["cuda graphs"]["figure"] == "no worker on a GPU"
