"""`kappa bench offload-overhead`: what it refuses, and the order in which it asks."""

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.offload.bench_overhead import LIMITS, POINTS, offload_overhead
from benchmarks.offload.overhead.points import check_points, parse_points, rounds

app = typer.Typer()
app.command()(offload_overhead)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node", "pci"], "no node named 'pci'"),
        (["--node", "pcie", "--node", "pcie"], "name each once"),
        (["--points", "64:1024,64"], "'64': write NEW:CACHED"),
        (["--points", "0:1024"], "at least 1 new token"),
        (["--points", "64:1000"], "multiple of 512"),
        (["--points", "64:32768"], "context limit is 32768"),
        (["--points", "64:512,128:512,256:512,512:512"], "cannot tell the terms"),
        (["--model", "qwen3-30b-a3b"], "dense models"),
        (["--model", "gpt-5"], "no model named 'gpt-5'"),
        (["--requests", "1"], "--requests"),
        (["--dilation", "0.5"], "--dilation"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_the_default_points_fit():
    check_points(parse_points(POINTS), LIMITS)


class Recorder:
    """Notes what it is asked."""

    def __init__(self, name, asked):
        self.name, self._asked = name, asked

    async def ask(self, point, arm):
        self._asked.append((self.name, point, arm))
        return arm


async def test_arms_and_nodes_are_interleaved_and_device_hits_follow_host_hits():
    points = parse_points("64:512,128:1024")
    asked, heard = [], []
    nodes = [Recorder("a", asked), Recorder("b", asked)]
    await rounds(nodes, points, 20, 2, 0, lambda *what: heard.append(what))
    assert len(asked) == len(heard) == 22 * 2 * 3 * 2
    assert [number for _, number, _ in heard] == sorted(number for _, number, _ in heard)
    assert {number for _, number, _ in heard} == set(range(-2, 20))
    # Nodes take turns at the same request.
    assert [ask[1:] for ask in asked[::2]] == [ask[1:] for ask in asked[1::2]]
    mine = [ask[1:] for ask in asked[::2]]
    for i, (point, arm) in enumerate(mine):
        if arm == "device":
            assert mine[i - 1] == (point, "host")
    starts = {mine[i][1] for i in range(0, len(mine), 3)}
    firsts = {mine[i][0] for i in range(0, len(mine), 6)}
    assert starts == {"new", "host"} and firsts == set(points)


@pytest.mark.parametrize("option", ["--out", "--plot", "--records"])
def test_results_that_could_not_be_written_are_refused_before_anything_starts(tmp_path, option):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, [option, str(tmp_path / "file" / "result")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
