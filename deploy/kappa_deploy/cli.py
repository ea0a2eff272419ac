"""The command line `kappa`: a table of commands, each imported when it is used.

Installed entry points of `kappa.commands` are commands, too. A command that lacks its packages is
listed all the same, and says which extra of `kappa-serve` brings them. `kappa --help` imports none:
it reads each command's description from its file.
"""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from kappa.host import COMMANDS, installed, lacking, remedy_for
from kappa_router.console import fail

# In brackets the extra without which it does nothing.
_COMMANDS = {
    name: EntryPoint(name, f"kappa_deploy.commands.{place}", COMMANDS)
    for name, place in {
        "serve": "serve:serve [serve]", "demo": "demo:demo", "profile": "profile:profile [serve]",
        "tables": "explain:tables", "explain": "explain:explain",
        "roofline": "roofline:roofline [loadtest]", "simulate": "simulate:simulate [loadtest]",
        "workload": "workload:workload [loadtest]", "replay": "replay:replay [loadtest]",
        "power": "power:power", "why": "why:why", "dashboards": "dashboards:dashboards [serve]",
        "heads": "heads:heads [serve]",
        "doctor": "doctor:doctor [serve]", "keys": "keys:app", "lmcache": "lmcache:app",
        "route": "route:app",
    }.items()
}  # fmt: skip


class _Commands(TyperGroup):
    """Our commands, and those that are installed as entry points."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS, *installed(COMMANDS)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands with their descriptions, without importing them."""
        self._is_listing = True
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = _COMMANDS.get(cmd_name) or installed(COMMANDS).get(cmd_name)
        if entry is None:
            return None
        if self._is_listing:
            missing = lacking(entry.extras)
            what = escape(f"Not installed: {missing}") if missing else summary(entry)
            return TyperCommand(cmd_name, help=what)
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


def summary(entry: EntryPoint) -> str:
    """A command's description: its docstring's first paragraph, or its group's `help`, or the
    docstring of the group's callback, there or in the module that it is imported from."""
    place = find_spec(entry.module)
    if place is None or place.origin is None:
        return ""
    body = ast.parse(Path(place.origin).read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and (
            node.name == entry.attr
            or any(ast.unparse(d).startswith(f"{entry.attr}.") for d in node.decorator_list)
        ):
            return (ast.get_docstring(node) or "").partition("\n\n")[0]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == entry.attr:
            for given in node.value.keywords if isinstance(node.value, ast.Call) else ():
                if given.arg == "help":
                    return str(ast.literal_eval(given.value))
    for node in body:
        if isinstance(node, ast.ImportFrom) and entry.attr in {name.name for name in node.names}:
            return summary(EntryPoint(entry.name, f"{node.module}:{entry.attr}", entry.group))
    return ""


def _remedy(error: ModuleNotFoundError) -> str:
    """What to install; raises the error itself if no extra brings the module."""
    remedy = remedy_for(error.name or "")
    if not remedy:
        raise error
    return remedy


def _absent(name: str, error: ModuleNotFoundError) -> TyperCommand:
    """A command that only names the packages that it lacks."""
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
