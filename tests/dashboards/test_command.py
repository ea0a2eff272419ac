"""`kappa dashboards` and the fetching of Prometheus, where they must refuse and say why."""

import pytest
import typer
from typer.testing import CliRunner

from kappa_deploy.commands.dashboards import dashboards
from kappa_deploy.prometheus import PrometheusError, prometheus, tool


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(dashboards)
    return lambda *arguments: CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without Prometheus, and without anything to fetch it with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path / "home"))
    return programs


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("seconds", ["1", "-5", "soon"])
def test_too_short_a_time_is_refused(run, seconds):
    assert run("--for", seconds).exit_code == 2


def test_command_without_prometheus_fails_before_ray_starts(run, bare):
    done = run()
    assert done.exit_code == 1
    assert "PATH" in done.output
    assert "Ray" not in done.output


@pytest.mark.parametrize(
    ("apt", "dpkg", "why"),
    [
        ("echo 'E: no network' >&2; exit 100", "exit 0", r"E: no network.*PATH"),
        (": > prometheus_1.deb", "/bin/mkdir unpacked", "holds no promtool"),
    ],
)
def test_tool_says_why_it_could_not_be_fetched(bare, apt, dpkg, why):
    program(bare, "apt-get", apt)
    program(bare, "dpkg-deb", dpkg)
    with pytest.raises(PrometheusError, match=why):
        tool("promtool")


def test_a_program_on_the_path_is_taken(bare):
    program(bare, "promtool", "exit 0")
    assert tool("promtool") == bare / "promtool"


def test_a_server_that_ends_at_once_says_what_it_said(bare, monkeypatch):
    program(bare, "prometheus", "echo 'no room left' >&2; exit 3")
    with pytest.raises(PrometheusError, match="no room left"), prometheus({}):
        pass
