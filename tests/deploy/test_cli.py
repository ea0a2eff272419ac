"""The command line's edges: help, wrong settings, a port that is taken. No cluster is started."""

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from deploy.app.model import StartError, prepare_model
from deploy.app.plan import worker_nodes
from deploy.app.ray_cluster import check_port, free_port
from deploy.cli import app
from kappa.settings.cluster import load_settings
from kappa.settings.pools import ModelSettings


def test_help_names_every_command():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for command in ("serve", "demo", "profile", "tables", "explain", "bench"):
        assert command in done.stdout


def test_the_command_line_loads_no_framework():
    program = "import sys, deploy.cli; print(*({'ray', 'vllm', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_wrong_settings_exit_with_two_and_name_the_key(command, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("router: {policy: magic}\n")
    done = CliRunner().invoke(app, [command, "--config", str(config)])
    assert done.exit_code == 2
    assert "router.policy" in done.stderr and "c.yaml" in done.stderr.replace("\n", "")


def test_a_wrong_policy_on_the_command_line_exits_with_two():
    done = CliRunner().invoke(app, ["serve", "--policy", "magic"])
    assert done.exit_code == 2 and "router.policy" in done.stderr


def test_a_taken_port_is_refused_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_a_model_that_is_not_there_is_a_start_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = load_settings().model_copy(
        update={"model": ModelSettings(source=str(tmp_path / "none"))}
    )
    with pytest.raises(StartError, match=r"model\.source"):
        prepare_model(settings)


def test_nodes_are_paced_or_priors():
    settings = load_settings()
    paced, unpaced = worker_nodes(settings), worker_nodes(settings.unpaced())
    assert {(n.source, n.dilation) for n in paced} == {("paced", settings.dilation)}
    assert {(n.source, n.dilation) for n in unpaced} == {("catalogue", 1.0)}
    assert [n.name for n in paced] == [n.name for n in unpaced] == ["pcie", "c2c"]
