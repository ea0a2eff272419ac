"""`kappa bench clients`: who is run, what is said of those that cannot be, and the result."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.routing.peers.venvs import PeerError, peers_dir
from benchmarks.serving import bench_clients
from benchmarks.serving.clients import ours
from benchmarks.serving.clients.common import ClientError

APP = typer.Typer()
APP.command()(bench_clients.clients)
QUICK = ["--requests", "10", "--rounds", "1", "--tokens", "3", "--words", "5", "--ttft-s", "0.02",
         "--gap-s", "0.005", "--json"]  # fmt: skip


def test_our_client_alone_against_the_stub():
    done = CliRunner().invoke(
        APP, [*QUICK, "--only", "kappa replay", "--concurrency", "4", "--rate", "100"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["is_stub"] and "STUB" in result["endpoint"]
    assert [mode["mode"] for mode in result["modes"]] == [
        "4 open at once", "100 requests/s, evenly",
    ]  # fmt: skip
    for mode in result["modes"]:
        row = mode["clients"][0]
        assert (row["client"], row["requests"], row["failed"]) == ("kappa replay", 10, 0)
        # No client can see less than what the stub waits; a busy one reads several chunks at once.
        assert row["ttft_s"]["median"] >= 0.02
        assert row["tpot_s"]["median"] is not None
        assert mode["ratios"] == []


def test_an_environment_that_cannot_be_made_is_told_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(APP, [*QUICK, "--only", "aiperf", "--rate", "0"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [row["client"] for row in result["modes"][0]["clients"]] == ["kappa replay"]
    (missing,) = result["not_run"]
    assert missing["client"] == "aiperf"
    assert "could not be installed" in missing["why"] and "PIP_INDEX_URL" in missing["why"]
    assert not list(peers_dir().glob("aiperf*/bin"))


def test_a_client_that_fails_is_left_out_and_ours_failing_is_an_error(monkeypatch):
    def fails(*_):
        raise ClientError("kappa replay ended with code 1: so it goes")

    monkeypatch.setitem(bench_clients._CLIENTS, ours.NAME, fails)
    done = CliRunner().invoke(APP, [*QUICK, "--only", "kappa replay", "--rate", "0"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["not_run"][0]["why"].endswith("so it goes")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "wrk"], "no client 'wrk'"),
        (["--concurrency", "0", "--rate", "0"], "nothing to run"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, said):
    done = CliRunner().invoke(APP, options)
    assert done.exit_code == 2
    assert said in done.output


def test_peer_errors_name_the_remedy(monkeypatch):
    def cannot(*_):
        raise PeerError("no room")

    monkeypatch.setattr(bench_clients, "peer_python", cannot)
    found, not_run = bench_clients._pythons(["aiperf", "vllm bench"], lambda _: None)
    assert list(found) == ["vllm bench"]
    assert not_run == [{"client": "aiperf", "why": "no room"}]
