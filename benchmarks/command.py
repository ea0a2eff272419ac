"""`kappa bench`: one command for each question, each in a file `bench_NAME.py` of its theme."""

from __future__ import annotations

import typer

from benchmarks.offload import bench_offload, bench_overhead
from benchmarks.routing import (
    bench_overload,
    bench_peers,
    bench_regret,
    bench_router,
    bench_routing,
)
from benchmarks.scheduling import bench_packing, bench_scheduler, bench_tail
from benchmarks.serving import (
    bench_clients,
    bench_predict,
    bench_serve,
    bench_soak,
    bench_validate,
)

app = typer.Typer(help="Measure the running system.", no_args_is_help=True, add_completion=False)
app.command()(bench_router.router)
app.command(help=bench_predict.PREDICT_HELP)(bench_predict.predict)
app.command()(bench_serve.serve)
app.command()(bench_routing.routing)
app.command()(bench_scheduler.scheduler)
app.command()(bench_regret.regret)
app.command()(bench_peers.peers)
app.command()(bench_packing.packing)
app.command()(bench_soak.soak)
app.command()(bench_clients.clients)
app.command()(bench_validate.validate)
app.command("tail-recompute")(bench_tail.tail_recompute)
app.command("offload")(bench_offload.offload)
app.command("overload")(bench_overload.overload)
app.command("offload-overhead")(bench_overhead.offload_overhead)
