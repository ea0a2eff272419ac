"""The command line `kappa`: one typer application, one file per group of commands."""

from __future__ import annotations

import typer

from deploy.commands import (
    bench,
    bench_clients,
    bench_offload,
    bench_overhead,
    bench_overload,
    bench_packing,
    bench_peers,
    bench_regret,
    bench_routing,
    bench_scheduler,
    bench_soak,
    bench_tail,
    bench_validate,
    dashboards,
    demo,
    faults,
    keys,
    law,
    lmcache,
    power,
    profile,
    replay,
    serve,
    simulate,
    why,
    workload,
)

app = typer.Typer(
    name="kappa",
    help="LLM serving on unlike nodes: each request goes where its bytes and FLOPs are cheapest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(profile.profile)
app.command()(law.tables)
app.command()(law.explain)
app.command()(law.roofline)
app.command()(simulate.simulate)
app.command()(workload.workload)
app.command()(replay.replay)
app.command()(power.power)
app.command()(why.why)
app.command()(dashboards.dashboards)
app.command()(faults.faults)
app.add_typer(keys.app, name="keys")
app.add_typer(lmcache.app, name="lmcache")
bench.app.command()(bench_routing.routing)
bench.app.command()(bench_scheduler.scheduler)
bench.app.command()(bench_regret.regret)
bench.app.command()(bench_peers.peers)
bench.app.command()(bench_packing.packing)
bench.app.command()(bench_soak.soak)
bench.app.command()(bench_clients.clients)
bench.app.command()(bench_validate.validate)
bench.app.command("tail-recompute")(bench_tail.tail_recompute)
bench.app.command("offload")(bench_offload.offload)
bench.app.command("overload")(bench_overload.overload)
bench.app.command("offload-overhead")(bench_overhead.offload_overhead)
app.add_typer(bench.app, name="bench")
