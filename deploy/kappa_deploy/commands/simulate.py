"""`kappa simulate`: a workload on a simulated cluster, decided by the live router and scheduler.

Prints the results, for people or as one JSON object. Durations are simulated seconds; only
`decision_us` is measured on this machine. `--nodes` takes more nodes of the cluster's mix: a
thousand nodes and a million requests is `--trace mooncake --nodes 1000 --requests 1000000`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress

from kappa.checks import unknown_name
from kappa.power import capped
from kappa.shapes import model_shape
from kappa.silicon import silicon_table
from kappa_deploy.commands import console
from kappa_router.console import warn
from kappa_router.policy import policy_named
from kappa_scheduler.catalogue import SCHEDULERS
from kappa_simulator.clusters import cluster_named, scaled
from kappa_simulator.faults import (
    RESOURCES,
    Faults,
    Resource,
    drawn_failures,
    drawn_stragglers,
    misprofiled_third,
    random_faults,
)
from kappa_simulator.run import SimulationConfig, capacity_of, traffic_of
from kappa_simulator.run import simulate as run
from kappa_simulator.traffic import Clients, Retry
from kappa_workload.catalogue import workload_named

MISPROFILES: dict[str, tuple[Resource, ...]] = {
    "none": (), "link": ("link",), "compute": ("compute",), "both": RESOURCES,
}  # fmt: skip
_WRONG_FACTOR = 3.0
_DOWN_S = 60.0


@dataclass(frozen=True)
class Options:
    """The simulation; each annotated field is an option of the command."""

    cluster: console.ClusterName = "mixed"
    trace: Annotated[str, typer.Option(help="A built-in workload or a trace file.")] = "narrativeqa"
    model: console.ModelName = "llama-3.1-8b"
    kv_dtype: console.KvDtype = "auto"
    policy: Annotated[str, typer.Option(help="Who decides; name:key=value,… for some.")] = "priced"
    scheduler: Annotated[str, typer.Option(help=f"In every node: {', '.join(SCHEDULERS)}.")] = (
        "fcfs"
    )
    load: Annotated[
        float | None, typer.Option(help="Fraction of the capacity bound; 0.8 if no rate is given.")
    ] = None
    rate: Annotated[float | None, typer.Option(help="Requests a second, instead of load.")] = None
    requests: Annotated[int, typer.Option(help="Requests to send; the first fifth warms up.")] = (
        25_000
    )
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="Documents and histories in host tiers at first.")
    ] = True
    misprofile: Annotated[
        str, typer.Option(help="A third of the nodes announces 3x wrong: none, link, compute, both")
    ] = "none"
    failures: Annotated[int, typer.Option(min=0, help="Nodes that die, and return after 60 s.")] = 0
    stragglers: Annotated[int, typer.Option(min=0, help="Nodes 3x slow a fifth of the time.")] = 0
    trouble: Annotated[
        int, typer.Option(min=0, help="Instead: faults of every kind, drawn at random.")
    ] = 0
    noise: Annotated[float, typer.Option(min=0.0, help="Sigma of the log of durations.")] = 0.03
    admission: Annotated[
        bool, typer.Option("--admission", help="Refuse what would start too late.")
    ] = False
    retry: console.RefusedClients = "never"
    patience: console.Patience = math.inf
    nodes: Annotated[
        int | None, typer.Option(min=1, help="As many nodes of the cluster's mix.")
    ] = None

    routers: Annotated[int, typer.Option(min=1, help="Routers, drawn for each request.")] = 1
    share_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between what routers tell each other; 0: never.")
    ] = 0.0
    cap_w: Annotated[
        float | None,
        typer.Option(help="Cap each node's watts, emulated: computing slows as the clock would."),
    ] = None

    def config(self) -> SimulationConfig:
        """The simulation that these options ask for, without its faults.

        Raises:
            ValueError: a name that is not known, a file that cannot be read, or one router that is
                to share.
        """
        if self.share_s and self.routers == 1:
            raise ValueError("--share-s: one router shares with no other; give --routers above 1")
        where = cluster_named(self.cluster)
        if (cap_w := self.cap_w) is not None:
            nodes = (replace(n, profile=capped(n.profile, n.watts, cap_w)) for n in where.nodes)
            where = replace(where, nodes=tuple(nodes))
        config = SimulationConfig(
            cluster=where if self.nodes is None else scaled(where, self.nodes),
            workload=workload_named(self.trace),
            shape=model_shape(self.model, self.kv_dtype),
            policy=self.policy,
            scheduler=self.scheduler,
            load=0.8 if self.load is None and self.rate is None else self.load,
            rate_rps=self.rate,
            requests=self.requests,
            seed=self.seed,
            warm=self.warm,
            admission=self.admission,
            clients=Clients(cast(Retry, self.retry), self.patience),
            routers=self.routers,
            share_s=self.share_s,
        )
        return config if config.load is None else config.replaced(capacity_rps=capacity_of(config))

    def faults(self, nodes: int, horizon_s: float) -> Faults:
        """Faults of the cluster's nodes until the last planned arrival."""
        if self.trouble:
            return random_faults(nodes, horizon_s, self.trouble, self.seed, self.noise)
        wrong = MISPROFILES[self.misprofile]
        return Faults(
            noise_sigma=self.noise,
            misprofiles=misprofiled_third(nodes, wrong, _WRONG_FACTOR, self.seed) if wrong else (),
            failures=drawn_failures(nodes, self.failures, horizon_s, _DOWN_S, self.seed),
            stragglers=drawn_stragglers(
                nodes, self.stragglers, horizon_s, _WRONG_FACTOR, self.seed
            ),
        )


@console.with_options(Options)
def simulate(options: Options, json_output: console.Json = False) -> None:
    """Play a workload on a simulated cluster and measure it."""
    with console.bad_parameter():
        for what, name, names in (
            ("scheduler", options.scheduler, SCHEDULERS),
            ("misprofile", options.misprofile, MISPROFILES),
        ):
            if name not in names:
                raise unknown_name(what, name, names, "choose one of these")
        policy_named(options.policy, seed=options.seed)
        config = options.config()
        traffic = traffic_of(config)
        faults = options.faults(len(config.cluster.nodes), float(traffic.planned_s.max()))
        terminal = Console(stderr=True)
        with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
            task = bar.add_task("requests", total=traffic.requests)
            outcome = run(
                config.replaced(faults=faults),
                traffic=traffic,
                timer=time.perf_counter,
                progress=lambda ended, _: bar.update(task, completed=ended),
            )
        summary = outcome.summary()
        for name in sorted({node.profile.silicon for node in config.cluster.nodes} - {""}):
            if parts := " and ".join(sorted(silicon_table(name).beyond)):
                warn(f"{name} does not reach as far: {parts} continued as the law has them")
    if options.cap_w is not None:
        law = {node.profile.reference for node in config.cluster.nodes}
        summary["cap"] = sorted(law)
        warn("\n".join(sorted(law)))
    if json_output:
        console.print_json(summary)
    else:
        _print(summary)


def _print(summary: dict[str, Any]) -> None:
    load = "" if summary["load"] is None else f", load {summary['load']:g}"
    console.print_text(
        f"{summary['trace']} on {summary['cluster']}: {summary['policy']}, "
        f"{summary['scheduler']}, {summary['rate_rps']:.4g} requests/s{load}, "
        f"seed {summary['seed']}\n"
        f"{summary['completed']:,} of {summary['requests']:,} measured requests completed, "
        f"{summary['rejected']:,} rejected; {summary['slo']['met']:.1%} within the SLO, "
        f"goodput {summary['goodput_rps']:.4g} requests/s"
    )
    times = [
        (key.removesuffix("_s").upper(), *map(console.seconds, summary[key].values()))
        for key in ("ttft_s", "tpot_s", "e2e_s")
    ]
    console.print_table(None, ("", "mean", "p50", "p90", "p99"), times)
    keys = (
        "cost_per_mtok", "energy_j_per_tok", "budget_fill", "scheduled_tokens", "vram_fill",
        "max_wait_s", "max_skips", "jain",
    )  # fmt: skip
    p50, p99 = (console.number(summary["decision_us"][q]) for q in ("p50", "p99"))
    decision = ("decision_us p50, p99", f"{p50}, {p99} (on this machine)")
    figures = [*((key, console.number(summary[key])) for key in keys), decision]
    console.print_table(None, ("figure", "value"), figures)
    columns = ("node", "requests", "gpu busy", "link busy", "device", "cached", "new tokens", "κ")
    counts = ("device_tokens", "cached_tokens", "new_tokens")
    shares = [
        (
            node["name"], f"{node['requests']:,}", console.percent(node["gpu_busy"], 0),
            console.percent(node["link_busy"], 0), *(f"{node[key]:,}" for key in counts),
            console.number(node["kappa_p50"]),
        )
        for node in summary["nodes"]
    ]  # fmt: skip
    console.print_table(None, columns, shares)
