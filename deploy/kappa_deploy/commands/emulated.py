"""`kappa demo --emulated`: the router's decisions on two unlike nodes, without any engine.

The router is the one that runs live. Its nodes are simulated: a GH200 and an H100, with steps and
loads as long as `kappa.cost` says, in simulated seconds. It needs no GPU, model or cluster.
"""

from __future__ import annotations

import numpy as np

from kappa.cost import TokenCounts, idle_cost
from kappa.shapes import model_shape
from kappa_deploy.commands.console import print_json, print_text
from kappa_deploy.commands.demo_rows import HEADER, OTHERS, TOKENS, Row, Worth, line, print_compared
from kappa_simulator.clusters import KINDS, SimulatedCluster
from kappa_simulator.outcome import Outcome
from kappa_simulator.run import SimulationConfig, simulate, traffic_of
from kappa_workload.catalogue import workload_named

OURS = "priced"

_MODEL = "llama-3.1-8b"
_RATE_RPS = 1.2
_REQUESTS = 600
_SHOWN = 16


def show_emulated(json_output: bool) -> None:
    """Decide the same requests under every policy, and print decisions and what they came to."""
    cluster = SimulatedCluster("two emulated nodes", (KINDS["gh200"], KINDS["h100"]))
    config = SimulationConfig(
        cluster=cluster,
        workload=workload_named("mooncake"),
        shape=model_shape(_MODEL),
        rate_rps=_RATE_RPS,
        requests=_REQUESTS,
    )
    nodes = " and ".join(f"{n.name} ({n.profile.link_name})" for n in cluster.nodes)
    title = (
        f"EMULATED: no engine runs. {nodes} are simulated nodes with {_MODEL}; the router is the "
        f"real one.\n{_REQUESTS} requests of a recorded trace (Mooncake), {_RATE_RPS:g} a second; "
        "all seconds are simulated. mostly: what the predicted TTFT is mostly made of"
    )
    traffic = traffic_of(config)
    if not json_output:
        print_text(f"{title}\n{HEADER.replace('reason', 'mostly')}")
    ours = simulate(config.replaced(policy=OURS), traffic=traffic)
    rows = decisions(ours, config, _SHOWN)
    if not json_output:
        print_text("\n".join(map(line, rows)))
    summaries = {OURS: ours.summary()}
    for policy in OTHERS:
        summaries[policy] = simulate(config.replaced(policy=policy), traffic=traffic).summary()
    if json_output:
        print_json({"emulated": True, "title": title, "requests": rows, "policies": summaries})
        return
    compared = [
        worth({OURS: "priced (ours)", **OTHERS}[name], found) for name, found in summaries.items()
    ]
    print_compared("What the choice was worth (EMULATED; goodput: within the SLO)", compared)


def decisions(outcome: Outcome, config: SimulationConfig, count: int) -> list[Row]:
    """`count` measured requests, evenly over the run, as `demo_rows.line` takes them."""
    records, nodes = outcome.records, config.cluster.nodes
    done = np.flatnonzero(records.measured & ~np.isnan(records.e2e_s))
    by_arrival = done[np.argsort(records.arrival_s[done], kind="stable")]
    chosen = by_arrival[np.linspace(0, len(by_arrival) - 1, min(count, len(by_arrival)), dtype=int)]
    first = {int(s): int(np.argmax(records.session == s)) for s in records.session[chosen]}
    rows = []
    for k in map(int, chosen):
        session, node = int(records.session[k]), nodes[records.node[k]]
        tokens = {name: int(getattr(records, name)[k]) for name in TOKENS}
        counts = TokenCounts(**tokens)
        cost = idle_cost(counts, config.shape, node.profile)
        rows.append({
            "session": str(session), "turn": k - first[session], "node": node.name,
            **tokens, "ratio": counts.ratio, "kappa_crit": cost.kappa_crit, "bound": cost.bound,
            "reason": str(records.kind[k]), "error": None,
            "predicted_ttft_s": float(records.predicted_s[k]),
            "ttft_s": float(records.ttft_s[k]),
        })  # fmt: skip
    return rows


def worth(policy: str, summary: Row) -> Worth:
    """What requests got under a policy, as `kappa_deploy.commands.demo.worth`, of a simulation's
    summary; goodput counts those that met their SLO."""
    ttft_s = summary["ttft_s"]
    count, goodput_rps = summary["completed"], summary["goodput_rps"]
    return Worth(policy, count, ttft_s["p50"], ttft_s["p99"], goodput_rps)
