"""`kappa bench`: one command for each question."""

import typer

from kappa_benchmarks.offload.command import offload
from kappa_benchmarks.routing.capacity import capacity
from kappa_benchmarks.routing.overload import overload
from kappa_benchmarks.routing.peers.dynamo import dynamo_bench
from kappa_benchmarks.routing.regret import regret
from kappa_benchmarks.routing.router import router
from kappa_benchmarks.routing.routing import routing
from kappa_benchmarks.scheduling.scheduler import scheduler
from kappa_benchmarks.serving.predict import predict
from kappa_benchmarks.serving.route import route
from kappa_benchmarks.serving.route_proxy import route_proxy
from kappa_benchmarks.serving.serve import serve
from kappa_benchmarks.serving.validate import validate

app = typer.Typer(help="Measure the running system.", no_args_is_help=True, add_completion=False)
for command in (
    capacity, offload, overload, predict, regret, route, route_proxy, router, routing, scheduler,
    serve, validate,
):  # fmt: skip
    app.command()(command)
app.command("dynamo")(dynamo_bench)
