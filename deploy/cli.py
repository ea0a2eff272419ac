"""The command line `kappa`: one typer application, one file per group of commands.

Installed entry points of `kappa.commands` are commands, too; each is imported when it is used.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from deploy.commands import (
    dashboards,
    demo,
    doctor,
    explain,
    keys,
    lmcache,
    power,
    profile,
    replay,
    roofline,
    serve,
    simulate,
    why,
    workload,
)
from kappa.plugins import COMMANDS, installed


class _WithInstalled(TyperGroup):
    """Our commands, and those that are installed as entry points: typer applications by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *installed(COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own, entry = super().get_command(ctx, cmd_name), installed(COMMANDS).get(cmd_name)
        if own is not None or entry is None:
            return own
        command = typer.main.get_command(entry.load())
        command.name = cmd_name
        return command


app = typer.Typer(
    name="kappa",
    cls=_WithInstalled,
    help="LLM serving on unlike nodes: each request goes where its bytes and FLOPs are cheapest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _command in (
    serve.serve, demo.demo, profile.profile, explain.tables, explain.explain, roofline.roofline,
    simulate.simulate, workload.workload, replay.replay, power.power, why.why,
    dashboards.dashboards, doctor.doctor,
):  # fmt: skip
    app.command()(_command)
app.add_typer(keys.app, name="keys")
app.add_typer(lmcache.app, name="lmcache")
