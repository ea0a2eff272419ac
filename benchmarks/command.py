"""`kappa bench`: one command for each question."""

import typer

from benchmarks.offload.command import offload
from benchmarks.routing.capacity import capacity
from benchmarks.routing.overload import overload
from benchmarks.routing.peers.dynamo import dynamo_bench
from benchmarks.routing.regret import regret
from benchmarks.routing.router import router
from benchmarks.routing.routing import routing
from benchmarks.scheduling.scheduler import scheduler
from benchmarks.serving.predict import predict
from benchmarks.serving.route import route
from benchmarks.serving.route_proxy import route_proxy
from benchmarks.serving.serve import serve
from benchmarks.serving.validate import validate

app = typer.Typer(help="Measure the running system.", no_args_is_help=True, add_completion=False)
for command in (
    capacity, offload, overload, predict, regret, route, route_proxy, router, routing, scheduler,
    serve, validate,
):  # fmt: skip
    app.command()(command)
app.command("dynamo")(dynamo_bench)
