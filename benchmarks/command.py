"""`kappa bench`: one command for each question, each in a file `bench_NAME.py` of its theme."""

from __future__ import annotations

import typer

from benchmarks.offload import bench_offload
from benchmarks.routing import (
    bench_overload,
    bench_peers,
    bench_router,
    bench_routing,
    regret,
)
from benchmarks.scheduling import bench_scheduler
from benchmarks.serving import (
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
app.command()(regret.regret)
app.command()(bench_peers.peers)
app.command()(bench_soak.soak)
app.command()(bench_validate.validate)
app.command("offload")(bench_offload.offload)
app.command("overload")(bench_overload.overload)
