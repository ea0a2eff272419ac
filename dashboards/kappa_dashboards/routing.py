"""The dashboard "Routing and fairness": reasons of decisions, and tenants' shares.

The ratio against the critical ratio first, then decisions and the quality of their forecast,
tenants, and how full iterations and steps are. Its panels use our metrics only.
"""

from __future__ import annotations

from kappa import metrics as m
from kappa_dashboards.panels import (
    NODE,
    RARE,
    Dashboard,
    Panel,
    PanelRow,
    Query,
    gauge,
    gauge_by_node,
    gauges,
    mean,
    quantile,
    rate,
    rate_by_node,
    rates,
    spread,
)

_PACED = "of nodes whose engines measured themselves, which paced ones do not"

RATIOS = PanelRow(
    "Ratio against critical ratio",
    (
        Panel("Ratio of the requests, and the node's critical ratio", "Cached over new tokens of "
              "the requests that a node got, and the ratio from which one of 128 new tokens is "
              "memory-bound there. Well above the line the link decides, well below it the GPU.",
              "none",
              (Query(quantile(0.5, m.RATIO, ("node",), NODE), "{{node}} P50"),
               Query(quantile(0.9, m.RATIO, ("node",), NODE), "{{node}} P90"),
               gauge_by_node(m.CRITICAL_RATIO, "{{node}} critical")), width=10),
        Panel("Memory-bound or compute-bound", "Decisions per second by what bounds the request on "
              "its node.", "reqps", rates(m.DECISIONS, "bound", where=NODE), width=7,
              stacked=True),
        Panel("Share of decisions by node", "Where requests go.", "percentunit",
              (Query(f"{rate(m.DECISIONS, ('node',), NODE)} / on () group_left () "
               f"{rate(m.DECISIONS)}", "{{node}}"),), width=7, stacked=True, top=1.0),
    ),
)  # fmt: skip

DECISIONS = PanelRow(
    "Decisions",
    (
        Panel("Decisions by reason", "What set the chosen node apart: a shorter queue, a faster "
              "load, less to compute, less harm to others, or nothing (tie).", "reqps",
              rates(m.DECISIONS, "reason", where=NODE), stacked=True),
        Panel("Predicted and real time to first token", "Means over the requests that a node "
              "served.", "s", (Query(mean(m.PREDICTED_TTFT, ("node",), NODE), "{{node}} predicted"),
               Query(mean(m.TTFT, ("node",), NODE), "{{node}} real"))),
        Panel("Error of the prediction", "Absolute error as a share of the real time to first "
              "token, by what the request waited for.", "percentunit",
              tuple(Query(quantile(q, m.TTFT_ERROR, ("kind",), NODE), f"{{{{kind}}}} P{100 * q:g}")
               for q in (0.5, 0.9))),
        Panel("Time of a decision", "Seconds that one decision takes, on the request's path.", "s",
              spread(m.DECISION_SECONDS), width=6),
        Panel("Link backlog", "Seconds of loads that are queued on a node's link.", "s",
              (gauge_by_node(m.LINK_BACKLOG),), width=6),
        Panel("GPU backlog", "Seconds of prompts that are queued on a node's GPU.", "s",
              (gauge_by_node(m.GPU_BACKLOG),), width=6),
        Panel("Bandwidth of loads", "Host to device, as the last loads went; and as announced: of "
              "every further byte of a transfer, as the engine measured its own copies at its "
              "start, or (paced nodes) the profile's.", "Bps",
              (gauge_by_node(m.LOAD_BANDWIDTH), Query(
               gauge(m.ANNOUNCED_BANDWIDTH, "max", ("node", "direction"), NODE),
               "{{node}} announced {{direction}}")), width=6),
        Panel("Calibration", "Learnt over announced seconds: 1 is what the profile promised, "
              "above is slower.", "none", (gauge_by_node(m.LINK_SCALE, "{{node}} link"),
               gauge_by_node(m.COMPUTE_SCALE, "{{node}} compute"))),
        Panel("Certainty of predictions", "Standard deviation of the logarithm of a TTFT about its "
              "prediction, and whether a worker's reports agree with its first tokens (1, else 0).",
              "none", (gauge_by_node(m.CALIBRATION_SD, "{{node}} deviation"),
               gauge_by_node(m.CALIBRATION_BELIEVED, "{{node}} reports believed"))),
        Panel("Fit of the measured steps", "R² of the constants that an engine fitted to its own "
              "steps; below 0.98 predictions start out poor.", "none",
              (gauge_by_node(m.STEP_FIT),), top=1.0, absent=_PACED),
        Panel("Age of the measurement", "Since a node was measured; it is measured again when "
              "hardware, versions or settings change.", "s", (gauge_by_node(m.PROFILE_AGE),),
              absent=_PACED),
        Panel("Cost beside the engine", "Seconds of a request outside its engine, as learnt.", "s",
              (gauge_by_node(m.OVERHEAD),)),
        Panel("Blind spots", "Blocks per second that the prefix index could not place, and gaps in "
              "the workers' event streams, and floods that were dropped: what the router does not "
              "know. Restarts of what follows them, and entries that the router's record lost.",
              "cps",
              (Query(rate(m.INDEX_LOSSES, ("why",)), "lost: {{why}}"),
               Query(f"{rate(m.STREAM_GAPS)} or vector(0)", "gaps"),
               Query(f"{rate(m.STREAM_FLOODS)} or vector(0)", "floods"),
               Query(rate(m.TASK_RESTARTS, ("task",)), "restarted: {{task}}"),
               Query(rate(m.RECORD_DROPPED), "not recorded"),
               Query(rate(m.ENDS_LOST), "ends not heard")), absent=RARE),
    ),
)  # fmt: skip

_CHARGE = f"max by (tenant) ({rate(m.TENANT_CHARGE, ('tenant', 'resource'))})"
_WEIGHED = f"({_CHARGE} / on (tenant) max by (tenant) ({m.TENANT_WEIGHT.name}))"
_POSITIVE = f"({_WEIGHED} > 0)"

TENANTS = PanelRow(
    "Tenants",
    (
        Panel("Requests by tenant", "Requests per second by tenant and outcome.", "reqps",
              rates(m.TENANT_REQUESTS, "tenant", "outcome"), stacked=True),
        Panel("Charged by tenant", "Seconds of the whole resource per second that a tenant was "
              "charged, of the resource it used most.", "none", (Query(_CHARGE, "{{tenant}}"),),
              stacked=True),
        Panel("Charged by resource", "Seconds of vram, gpu and link charged per second.", "none",
              rates(m.TENANT_CHARGE, "resource")),
        Panel("Jain's index of the charges", "1: the tenants that were served were charged alike, "
              "by weight; 1/n: one of n had it all. Demand is not taken into account.", "none",
              (Query(f"sum({_POSITIVE}) ^ 2 / (count({_POSITIVE}) * sum({_POSITIVE} ^ 2))",
               "Jain's index"),), top=1.0),
        Panel("Credit by tenant", "Seconds of service, by weight, that a tenant is behind the mean "
              "of all that were charged (below 0: ahead of it).", "s",
              gauges(m.TENANT_CREDIT, "tenant", how="max")),
        Panel("Oldest wait by tenant", "How long a tenant's oldest request has waited for an "
              "engine to admit it.", "s", gauges(m.TENANT_OLDEST, "tenant", how="max")),
        Panel("Passed over, by reason", "Waiting requests per second that the rule looked at and "
              "left, by why.", "cps", rates(m.PASSED, "reason", where=NODE), stacked=True,
              absent="a request is passed over only when the engine is short of something"),
        Panel("Failures of the rule", "Iterations per second in which the scheduling rule failed "
              "and arrival order took over.", "cps", (rate_by_node(m.RULE_ERRORS),)),
    ),
)  # fmt: skip


def _fill(resource: str) -> str:
    return (
        f"{rate(m.FILL, ('node',), f'resource={chr(34)}{resource}{chr(34)}, {NODE}')}"
        f" / {rate(m.QUEUED_ITERATIONS, ('node',), NODE)}"
    )


FILL = PanelRow(
    "Fill and pace",
    (
        Panel("Budget fill", "Share of the token budget in use, over iterations with requests that "
              "wait.", "percentunit", (Query(_fill("budget"), "{{node}}"),), top=1.0),
        Panel("VRAM fill", "Share of the device's blocks in use, over iterations with requests "
              "that wait.", "percentunit", (Query(_fill("vram"), "{{node}}"),), top=1.0),
        Panel("Iterations", "Iterations of the engines' schedulers per second, and those with "
              "requests that wait.", "cps", (rate_by_node(m.ITERATIONS),
               rate_by_node(m.QUEUED_ITERATIONS, "{{node}} waiting"))),
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

_POWER_NONE = "told of GPUs that NVML or the catalogue knows"

POWER = PanelRow(
    "Power and energy",
    (
        Panel("Power", "What a node's GPUs draw and may draw; source: nvml is measured, model and "
              "paced are the catalogue's.", "watt",
              (Query(gauge(m.POWER, "sum", ("node", "source"), NODE), "{{node}} {{source}}"),
               Query(gauge(m.POWER_CAP, "sum", ("node",), NODE), "{{node}} cap")),
              absent=_POWER_NONE),
        Panel("Energy per token", "Joules for each token that a node's engine computed.", "joule",
              (Query(f"{rate(m.ENERGY, ('node',), NODE)} / {rate(m.STEP_TOKENS, ('node',), NODE)}",
               "{{node}}"),), absent=_POWER_NONE),
        Panel("Watts below the caps", "What the nodes may draw and do not: headroom of the rack.",
              "watt",
              (Query(f"{gauge(m.POWER_CAP, 'sum', (), NODE)} - {gauge(m.POWER, 'sum', (), NODE)}",
               "headroom"),), absent=_POWER_NONE),
    ),
)  # fmt: skip

FAILOVER = PanelRow(
    "Failures and several deciders",
    (
        Panel("Circuit breakers", "0: closed, 0.5: half open (a trial is under way), 1: open, the "
              "node gets nothing.", "none", (gauge_by_node(m.BREAKER_OPEN),), top=1.0),
        Panel("Breakers opened", "How often per second a node's breaker opened, by why.", "cps",
              rates(m.BREAKER_OPENED, "node", "why", where=NODE), absent=RARE),
        Panel("Tried elsewhere", "Requests per second that a node failed before their first token "
              "and another served, by why.", "reqps", rates(m.RETRIES, "node", "why", where=NODE),
              absent=RARE),
        Panel("Sent by other deciders", "Requests in flight that other decider replicas sent.",
              "none", (Query(gauge(m.OTHERS_RESERVATIONS, "max"), "in flight"),), width=6),
        Panel("Silence of other routers", "Since another kappa route last told of its requests.",
              "s", gauges(m.PEER_AGE, "peer", how="max"), width=6, absent="kappa route --peer"),
        Panel("Prompts by where they were computed", "With prefill workers: handed over, kept by "
              "the decoding worker, or failed.", "reqps",
              rates(m.PREFILLS, "where"), stacked=True, width=6,
              absent="counted where there are prefill workers"),
        Panel("Failures of the host tier's server", "What an LMCache server failed to do, per "
              "second; each is followed by computing the tokens.", "cps",
              rates(m.TIER_FAILURES, "node", "why", where=NODE), absent=RARE, width=6),
        Panel("File of keys", "Reads per second of the file of API keys, by outcome.", "cps",
              rates(m.KEY_FILE_READS, "outcome"), width=6),
    ),
)  # fmt: skip

_AGREED = 'agreed="true"'
_SHADOW_NONE = "counted where Ray's rule steers some requests (router.mode shadow or canary)"

ROLLOUT = PanelRow(
    "Rollout",
    (
        Panel("Who steers", "Requests per second by whose rule chose their worker.", "reqps",
              rates(m.ROLLOUT_REQUESTS, "arm"), stacked=True),
        Panel("Time to first token by who steered", "P50 and P90 of the real time.", "s",
              tuple(Query(quantile(q, m.ROLLOUT_TTFT, ("arm",)), f"{{{{arm}}}} P{100 * q:g}")
               for q in (0.5, 0.9))),
        Panel("Shadow", "Of the requests that Ray's rule steered: the share where ours would have "
              "chosen the same worker.", "percentunit",
              (Query(f"{rate(m.SHADOWS, (), _AGREED)} / {rate(m.SHADOWS)}", "agreed"),), top=1.0,
              absent=_SHADOW_NONE, width=4),
        Panel("Predicted saving", "Seconds to the first token that ours would have saved, per "
              "second, as foreseen.", "none", (Query(rate(m.SHADOW_SAVING), "saved"),),
              absent=_SHADOW_NONE, width=4),
    ),
)  # fmt: skip

ROUTING = Dashboard(
    "kappa-routing",
    "kappa-serve: Routing and fairness",
    "Why requests went where they went, how good the forecast was, and who got how much.",
    (RATIOS, DECISIONS, TENANTS, FILL, FAILOVER, POWER, ROLLOUT),
)
