"""The dashboard "Routing and fairness": why requests went where they went, and who got how much.

The law first (ratio against critical ratio), then decisions and the quality of their forecast,
tenants, and how full iterations and steps are. Its panels use our metrics only.
"""

from __future__ import annotations

from dashboards.panels import (
    NODE,
    RARE,
    Dashboard,
    Panel,
    Query,
    Row,
    gauge,
    mean,
    quantile,
    rate,
    spread,
)
from kappa import metrics as m

LAW = Row(
    "Ratio against critical ratio",
    (
        Panel(
            "Ratio of the requests, and the node's critical ratio",
            "Cached over new tokens of the requests that a node got, and the ratio from which a "
            "request is memory-bound there. Above the line the link decides, below it the GPU.",
            "none",
            (Query(quantile(0.5, m.RATIO, ("node",), NODE), "{{node}} P50"),
             Query(quantile(0.9, m.RATIO, ("node",), NODE), "{{node}} P90"),
             Query(gauge(m.CRITICAL_RATIO, "max", ("node",), NODE), "{{node}} critical")),
            width=10,
        ),
        Panel(
            "Memory-bound or compute-bound",
            "Decisions per second by what bounds the request on its node.", "reqps",
            (Query(rate(m.DECISIONS, ("bound",), NODE), "{{bound}}"),), width=7, stacked=True,
        ),
        Panel(
            "Share of decisions by node", "Where requests go.", "percentunit",
            (Query(f"{rate(m.DECISIONS, ('node',), NODE)} / on () group_left () "
                   f"{rate(m.DECISIONS)}", "{{node}}"),), width=7, stacked=True, top=1.0,
        ),
    ),
)  # fmt: skip

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            "Decisions by reason",
            "What set the chosen node apart: a shorter queue, a faster load, less to compute, less "
            "harm to others, or nothing (tie).", "reqps",
            (Query(rate(m.DECISIONS, ("reason",), NODE), "{{reason}}"),), stacked=True,
        ),
        Panel(
            "Predicted and real time to first token", "Means over the requests that a node served.",
            "s",
            (Query(mean(m.PREDICTED_TTFT, ("node",), NODE), "{{node}} predicted"),
             Query(mean(m.TTFT, ("node",), NODE), "{{node}} real")),
        ),
        Panel(
            "Error of the prediction",
            "Absolute error as a share of the real time to first token, by what the request waited "
            "for.", "percentunit",
            tuple(Query(quantile(q, m.TTFT_ERROR, ("kind",), NODE), f"{{{{kind}}}} P{100 * q:g}")
                  for q in (0.5, 0.9)),
        ),
        Panel("Time of a decision", "Seconds that one decision takes, on the request's path.", "s",
              spread(m.DECISION_SECONDS), width=6),
        Panel("Link backlog", "Seconds of loads that are queued on a node's link.", "s",
              (Query(gauge(m.LINK_BACKLOG, "max", ("node",), NODE), "{{node}}"),), width=6),
        Panel("GPU backlog", "Seconds of prompts that are queued on a node's GPU.", "s",
              (Query(gauge(m.GPU_BACKLOG, "max", ("node",), NODE), "{{node}}"),), width=6),
        Panel("Measured bandwidth", "Host to device, as the last loads went.", "Bps",
              (Query(gauge(m.LOAD_BANDWIDTH, "max", ("node",), NODE), "{{node}}"),), width=6),
        Panel(
            "Calibration", "Measured over announced seconds: 1 is what the profile promised, above "
            "is slower.", "none",
            (Query(gauge(m.LINK_SCALE, "max", ("node",), NODE), "{{node}} link"),
             Query(gauge(m.COMPUTE_SCALE, "max", ("node",), NODE), "{{node}} compute")),
        ),
        Panel("Cost beside the engine", "Seconds of a request outside its engine, as learnt.", "s",
              (Query(gauge(m.OVERHEAD, "max", ("node",), NODE), "{{node}}"),)),
        Panel(
            "Blind spots",
            "Blocks per second that the prefix index could not place, and gaps in the workers' "
            "event streams: what the router does not know.", "cps",
            (Query(rate(m.INDEX_LOSSES, ("why",)), "lost: {{why}}"),
             Query(f"{rate(m.STREAM_GAPS)} or vector(0)", "gaps")), absent=RARE,
        ),
    ),
)  # fmt: skip

_CHARGE = f"max by (tenant) ({rate(m.TENANT_CHARGE, ('tenant', 'resource'))})"
_POSITIVE = f"({_CHARGE} > 0)"

TENANTS = Row(
    "Tenants",
    (
        Panel("Requests by tenant", "Requests per second by tenant and outcome.", "reqps",
              (Query(rate(m.TENANT_REQUESTS, ("tenant", "outcome")), "{{tenant}} {{outcome}}"),),
              stacked=True),
        Panel(
            "Charged by tenant",
            "Seconds of the whole resource per second that a tenant was charged, of the resource "
            "it used most.", "none", (Query(_CHARGE, "{{tenant}}"),), stacked=True,
        ),
        Panel("Charged by resource", "Seconds of vram, gpu and link charged per second.", "none",
              (Query(rate(m.TENANT_CHARGE, ("resource",)), "{{resource}}"),)),
        Panel(
            "Jain's index of the charges",
            "1: the tenants that were served were charged alike; 1/n: one of n had it all. Weights "
            "and demand are not taken into account.", "none",
            (Query(f"sum({_POSITIVE}) ^ 2 / (count({_POSITIVE}) * sum({_POSITIVE} ^ 2))",
                   "Jain's index"),), top=1.0,
        ),
        Panel(
            "Passed over, by reason", "Waiting requests per second that the rule looked at and "
            "left, by why.", "cps",
            (Query(rate(m.PASSED, ("reason",), NODE), "{{reason}}"),), stacked=True,
            absent="a request is passed over only when the engine is short of something",
        ),
        Panel("Failures of the rule", "Iterations per second in which the scheduling rule failed "
              "and arrival order took over.", "cps",
              (Query(rate(m.RULE_ERRORS, ("node",), NODE), "{{node}}"),)),
    ),
)  # fmt: skip


def _fill(resource: str) -> str:
    return (
        f"{rate(m.FILL, ('node',), f'resource={chr(34)}{resource}{chr(34)}, {NODE}')}"
        f" / {rate(m.QUEUED_ITERATIONS, ('node',), NODE)}"
    )


FILL = Row(
    "Fill and pace",
    (
        Panel("Budget fill", "Share of the token budget in use, over iterations with requests that "
              "wait.", "percentunit", (Query(_fill("budget"), "{{node}}"),), top=1.0),
        Panel("VRAM fill", "Share of the device's blocks in use, over iterations with requests "
              "that wait.", "percentunit", (Query(_fill("vram"), "{{node}}"),), top=1.0),
        Panel("Iterations", "Iterations of the engines' schedulers per second, and those with "
              "requests that wait.", "cps",
              (Query(rate(m.ITERATIONS, ("node",), NODE), "{{node}}"),
               Query(rate(m.QUEUED_ITERATIONS, ("node",), NODE), "{{node}} waiting"))),
        Panel("Steps", "Engine steps per second.", "cps",
              (Query(rate(m.STEPS, ("node", "paced"), NODE), "{{node}} paced: {{paced}}"),)),
        Panel("Tokens per step", "Tokens that a step computes: how full its batch is.", "none",
              (Query(f"{rate(m.STEP_TOKENS, ('node',), NODE)} / {rate(m.STEPS, ('node',), NODE)}",
                     "{{node}}"),)),
        Panel("Overrun pace", "Share of a paced node's steps that took longer than their pace: its "
              "figures are worth that much less.", "percentunit",
              (Query(f"{rate(m.OVERRUNS, ('node',), NODE)} / {rate(m.STEPS, ('node',), NODE)}",
                     "{{node}}"),), absent="only paced nodes can overrun"),
    ),
)  # fmt: skip

ROUTING = Dashboard(
    "kappa-routing",
    "kappa-serve: Routing and fairness",
    "Why requests went where they went, how good the forecast was, and who got how much.",
    (LAW, DECISIONS, TENANTS, FILL),
)
