"""`kappa lmcache`: installs LMCache's server in an environment of its own, and runs it.

Its packages contradict those of vLLM and Ray, so it never shares their environment on a machine
without a GPU. Workers with `engine.host_tier: lmcache` start a server each, unless the settings
name one that all share: `kappa lmcache server` runs such a one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kappa.settings.cluster import home
from kappa_router.console import fail
from kappa_workers.vllm.lmcache.server import (
    STAMP,
    LmcacheInstall,
    LmcacheMissingError,
    install_root,
    server_command,
)

app = typer.Typer(help="Install and run LMCache's server as a host tier.", no_args_is_help=True)

_LOCK = Path(__file__).parents[3] / "locks" / "lmcache-cpu.lock"
_TORCH = "https://download.pytorch.org/whl/cpu/torch/"
_INSTALL_TIMEOUT_S = 900.0


@app.command()
def setup(force: Annotated[bool, typer.Option("--force", help="Install again.")] = False) -> None:
    """Install LMCache under KAPPA_HOME (about a gigabyte); does nothing if it is there."""
    root = install_root(home())
    if (root / STAMP).exists() and not force:
        typer.echo(f"LMCache is installed in {root}")
        return
    if not _LOCK.exists():
        fail(f"error: {_LOCK} is missing: run this from a checkout of kappa-serve", 2)
    shutil.rmtree(root, ignore_errors=True)
    typer.echo(f"installing LMCache in {root}", err=True)
    try:
        install(root, _LOCK)
    except (OSError, subprocess.SubprocessError) as error:
        fail(
            f"error: installing {_LOCK.name} failed: {error}. Without internet access, set "
            "UV_FIND_LINKS to a folder with the torch wheel and UV_DEFAULT_INDEX to your mirror",
            2,
        )
    typer.echo(f"LMCache is installed in {root}")


@app.command()
def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where engines find it.")] = 5555,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Its own metrics.")] = 8089,
    size_gb: Annotated[float, typer.Option(min=0.01, help="Host memory that it takes.")] = 4.0,
    chunk_tokens: Annotated[
        int, typer.Option(min=16, help="A multiple of engine.block_tokens.")
    ] = 32,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Run a server in this process, for all workers with its address in engine.lmcache.server."""
    try:
        found = LmcacheInstall.find(home())
    except LmcacheMissingError as error:
        fail(f"error: {error}", 2)
    command = server_command(found, port, http_port, chunk_tokens, int(size_gb * 2**30), host)
    os.execve(command[0], command, {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": ""})


def install(root: Path, lock: Path) -> None:
    """Make the server's environment in `root`, from `lock`; the stamp comes last."""
    venv, client = root / "venv", root / "client"
    run = partial(subprocess.run, check=True, timeout=_INSTALL_TIMEOUT_S)
    run([sys.executable, "-m", "venv", str(venv)])
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or _TORCH
    uv = Path(sys.prefix) / "bin" / "uv"
    pip = [str(uv), "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    if not uv.exists():
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    run([*pip, "--no-deps", "--require-hashes", "--find-links", links, "-r", str(lock)])
    (package,) = venv.glob("lib/python3*/site-packages/lmcache")
    client.mkdir()
    (client / "lmcache").symlink_to(package)
    (root / STAMP).write_text("")
