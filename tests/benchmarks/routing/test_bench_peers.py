"""`kappa bench peers`: what it refuses before anything is started."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.routing.bench_peers import EMULATED, peers
from benchmarks.routing.peers.routers import OURS, routers
from benchmarks.routing.peers.venvs import peers_dir


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command where no peer can be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    app = typer.Typer()
    app.command()(peers)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nobody"], "no router 'nobody'"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--workload", "nothing"], "nothing"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--scale", "3"], "does not divide"),
        (["--load", "0"], "load"),
        (["--dilation", "0.5"], "dilation"),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(run, arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_a_peer_that_cannot_be_made_is_listed_as_not_run_with_the_remedy(run):
    done = run("--only", "dynamo", "--seconds", "5", "--repeats", "1", "--json")
    assert done.exit_code == 0
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["rows"] == []
    (lost,) = result["not_run"]
    assert lost["router"] == "dynamo" and "PIP_INDEX_URL" in lost["why"]
    assert result["emulated"] is True and result["header"] == EMULATED
    assert not list(peers_dir().glob("ai-dynamo-runtime-*/bin"))


def test_ours_and_every_peer_can_be_chosen():
    assert OURS in routers()
    assert {"dynamo", "sglang", "ray-prefix", "ray-pow2"} < set(routers())
