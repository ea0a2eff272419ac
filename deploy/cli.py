"""The command line `kappa`: a table of commands, each imported when it is used.

Installed entry points of `kappa.commands` are commands, too. A command whose packages are not
installed is listed all the same, and says which extra of `kappa-serve` brings them.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from deploy.commands.console import fail
from kappa.plugins import COMMANDS, installed, remedy_for

_COMMANDS = {
    name: EntryPoint(name, f"deploy.commands.{place}", COMMANDS)
    for name, place in {
        "serve": "serve:serve", "demo": "demo:demo", "profile": "profile:profile",
        "tables": "explain:tables", "explain": "explain:explain", "roofline": "roofline:roofline",
        "simulate": "simulate:simulate", "workload": "workload:workload",
        "replay": "replay:replay", "power": "power:power", "why": "why:why",
        "dashboards": "dashboards:dashboards", "doctor": "doctor:doctor", "keys": "keys:app",
        "lmcache": "lmcache:app", "route": "route:app",
    }.items()
}  # fmt: skip


class _Commands(TyperGroup):
    """Our commands, and those that are installed as entry points."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS, *installed(COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = _COMMANDS.get(cmd_name) or installed(COMMANDS).get(cmd_name)
        if entry is None:
            return None
        try:
            loaded = entry.load()
        except ModuleNotFoundError as error:
            return _absent(cmd_name, error)
        if not isinstance(loaded, typer.Typer):
            function, loaded = loaded, typer.Typer(add_completion=False)
            loaded.command()(function)
        command = typer.main.get_command(loaded)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            fail(f"kappa {ctx.invoked_subcommand}: {_remedy(error)}")


def _remedy(error: ModuleNotFoundError) -> str:
    """What to install; raises the error itself if no extra brings the module."""
    remedy = remedy_for(error.name or "")
    if not remedy:
        raise error
    return remedy


def _absent(name: str, error: ModuleNotFoundError) -> TyperCommand:
    """A command that says only what is missing for it."""
    remedy = _remedy(error)
    takes_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name,
        callback=lambda: fail(f"kappa {name}: {remedy}"),
        short_help=escape(f"Not installed: {remedy}"),
        context_settings=takes_anything,
        add_help_option=False,
    )


app = typer.Typer(
    name="kappa",
    cls=_Commands,
    help="LLM serving on unlike nodes: each request goes where its bytes and FLOPs are cheapest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _no_options() -> None:
    """A callback makes typer take an application without commands of its own for a group."""
