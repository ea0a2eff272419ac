"""`kappa route`, alone `kappa-router`: our router before OpenAI-compatible servers that exist."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kappa.compiled import COMPILES
from kappa.settings.base import settings_with
from kappa.settings.front import FrontSettings, backend_of
from kappa_router.console import fail, warn

app = typer.Typer(invoke_without_command=True, add_completion=False)
# A start that takes longer than this says why.
_LATE_S = 15.0


@app.callback()
def route(
    ctx: typer.Context,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            help="URL=PROFILE: a server and its node (a wrong name lists them all). Say it again "
            "for each.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Settings (YAML); see docs/route.md.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Listen beyond loopback without keys.")
    ] = False,
    mode: Annotated[
        str | None,
        typer.Option(help="Who steers: shadow (the present balancer), canary:N (percent) or on."),
    ] = None,
    present: Annotated[
        str | None,
        typer.Option(
            help="The present balancer, emulated: round-robin, least-connections or prefix-hash."
        ),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Write here what was decided and came of it.")
    ] = None,
    epp: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Pick servers for a gateway instead (ext-proc), at this port."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="URL of another kappa route before these servers, or of all of them."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Route requests among OpenAI-compatible servers, until Ctrl-C."""
    if ctx.invoked_subcommand is not None:
        return
    settings = front_settings_or_exit(
        backend or [], config,
        {"log_level": log_level, "present": present, "journal": str(journal) if journal else None},
        {
            "http": {"port": port, "host": host}, "epp": {"port": epp},
            "access": {"allow_open": allow_open or None}, "router": {"mode": mode},
            "peers": {"urls": peer or None},
        },
    )  # fmt: skip
    from kappa.logging import configure

    seen = settings.observing
    configure(seen.log_format, seen.log_file, settings.log_level)
    if COMPILES:
        rehearse(settings.router.policy)
    _serve(settings)
    sys.stderr.flush()


def _announce(settings: FrontSettings, url: str) -> None:
    pool = settings.epp.pool if settings.epp else None
    servers = pool.name if pool else ", ".join(one.url for one in settings.backends)
    what = "picking for a gateway" if settings.epp else f"routing {url}/v1"
    others = f", with {', '.join(settings.peers.urls)}" if settings.peers.urls else ""
    warn(f"{what} among {servers}{others}; watch it at {url}/", "dim")
    if not COMPILES:
        warn("each decision takes milliseconds; with kappa-router[fast] less than one", "dim")


def rehearse(policy: str) -> None:
    """Route a request that nobody sent, so that all loops are compiled, or loaded, before there is
    an event loop, in which probes and requests would wait for it. policy: the name of the policy
    that will decide."""
    from threading import Timer
    from types import SimpleNamespace

    from kappa_router.json_body import read_object
    from kappa_router.standalone import StandaloneRouter

    what = "compiling, which the first start of an installation does for a minute or more"
    late = Timer(_LATE_S, warn, (what, "dim"))
    late.daemon = True
    late.start()
    try:
        read_object(b"{}", ())
        router = StandaloneRouter(policy=policy)
        router.replicas({"one": {}, "other": {}})
        prompt = "All the world's a stage, and all the men and women merely players. " * 16
        router.rank(["one", "other"], [SimpleNamespace(prompt=prompt)], "")
        router.done("one", "")
    finally:
        late.cancel()


def _serve(settings: FrontSettings) -> None:
    import asyncio

    from uvicorn.loops.auto import auto_loop_factory

    from kappa_router.front.gateway import serve
    from kappa_router.gateway.process import EnvoyError

    try:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(serve(settings, partial(_announce, settings)))
    except (EnvoyError, OSError) as error:
        fail(str(error), 1)


def front_settings_or_exit(
    backends: list[str], config: Path | None, top: dict[str, str | None],
    given: dict[str, dict[str, Any]],
) -> FrontSettings:  # fmt: skip
    """Settings from file and options, on top level and by section; a fault ends it with 2."""
    if not backends and config is None:
        fail("give --backend URL=PROFILE, once for each server, or --config FILE", 2)
    try:
        changes: dict[str, Any] = {name: value for name, value in top.items() if value is not None}
        if backends:
            changes["backends"] = [backend_of(text) for text in backends]
        return settings_with(given, FrontSettings, config, **changes)
    except ValueError as error:
        fail(str(error), 2)
