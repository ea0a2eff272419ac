"""What the bench of observing counts as a system's processor seconds, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.serving.bench_observing import SEEN, UNSEEN, Collector, cpu_seconds, seen, unseen
from deploy.cli import app
from kappa.settings.cluster import ClusterSettings

_BURN = """
import subprocess, sys, time
work = "import time; sum(range(10**7)); print(time.process_time(), flush=True); input()"
child = subprocess.Popen([sys.argv[1], "-c", work],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
childs_s = float(child.stdout.readline())
print(time.process_time(), childs_s, flush=True)
input()
child.communicate("\\n")
"""


def test_a_replicas_processor_seconds_count_with_those_of_its_children():
    # As Ray names the processes of replicas.
    title = "ray::ServeReplica:beside:EmulatedName"
    before_s = cpu_seconds(SEEN, UNSEEN)
    with subprocess.Popen(
        [title, "-c", _BURN, sys.executable],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as replica:
        own_s, childs_s = map(float, replica.stdout.readline().split())
        used_s = cpu_seconds(SEEN, UNSEEN) - before_s
        replica.communicate("\n")
    # The kernel counts in ticks of 10 ms, of user and system each.
    assert used_s >= own_s + childs_s - 0.05 and childs_s > 0.1
    assert own_s < childs_s


def test_the_two_differ_in_nothing_but_what_is_observed():
    plain = ClusterSettings()
    with Collector() as collector:
        all_of_it = seen(plain, Path("/tmp/log"), collector)
        assert seen(plain, Path("/tmp/log"), None).observing.otlp_endpoint is None
    nothing = unseen(plain)
    assert all_of_it.observing.metrics and all_of_it.observing.request_log
    assert all_of_it.observing.otlp_endpoint and not nothing.observing.otlp_endpoint
    assert not nothing.observing.metrics and not nothing.observing.request_log
    same = plain.observing
    assert all_of_it.model_copy(update={"observing": same}) == plain
    assert nothing.model_copy(update={"observing": same}) == plain


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--spans"], "--observing"), (["--observing", "--rounds", "1"], "give 2 or more")],
)
def test_what_could_show_nothing_is_refused(arguments, told):
    done = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert done.exit_code == 2
    # The message stands in a box, folded to the terminal's width.
    assert told in " ".join(done.stderr.replace("│", " ").split())
