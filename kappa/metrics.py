"""Every metric's name, kind, labels and meaning: the only place where a metric is named.

Names begin with `kappa_`, carry their unit, and never hold a colon. `docs/metrics.md` and the
dashboards are made from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MICROSECONDS = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 10e-3, 50e-3)
_RATIOS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
_ERRORS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Counters are exposed with `_total` appended."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


DECISIONS = Metric(
    "kappa_decisions", "counter", "routing decisions", ("node", "policy", "reason", "bound")
)
REQUESTS = Metric("kappa_requests", "counter", "requests by HTTP status", ("status",))
RATIO = Metric(
    "kappa_request_ratio", "histogram", "cached-to-new ratio on the chosen node", ("node",), _RATIOS
)
CRITICAL_RATIO = Metric("kappa_critical_ratio", "gauge", "critical ratio of a node", ("node",))
PREDICTED_TTFT = Metric(
    "kappa_predicted_ttft_seconds",
    "histogram",
    "predicted time to first token",
    ("node",),
    _SECONDS,
)
TTFT = Metric("kappa_ttft_seconds", "histogram", "real time to first token", ("node",), _SECONDS)
TTFT_ERROR = Metric(
    "kappa_ttft_error_ratio",
    "histogram",
    "absolute error of the predicted time to first token, as a share of the real one",
    ("node", "kind"),
    _ERRORS,
)
DECISION_SECONDS = Metric(
    "kappa_decision_seconds", "histogram", "time taken by one decision", (), _MICROSECONDS
)
TOKENIZE_SECONDS = Metric(
    "kappa_tokenize_seconds", "histogram", "time to render and tokenize one prompt", (), _SECONDS
)
RESERVATIONS = Metric("kappa_reservations", "gauge", "requests in flight", ("node",))
LINK_BACKLOG = Metric("kappa_link_backlog_seconds", "gauge", "queued loads", ("node",))
GPU_BACKLOG = Metric("kappa_gpu_backlog_seconds", "gauge", "queued prompts", ("node",))
INDEX_BLOCKS = Metric("kappa_index_blocks", "gauge", "entries of the prefix index")
INDEX_LOSSES = Metric(
    "kappa_index_losses",
    "counter",
    "blocks that the prefix index could not place, by why",
    ("why",),
)
STREAM_GAPS = Metric("kappa_stream_gaps", "counter", "gaps in a worker's event stream", ("node",))
PROMPT_TOKENS = Metric(
    "kappa_prompt_tokens", "counter", "prompt tokens by where they came from", ("node", "source")
)
OUTPUT_TOKENS = Metric("kappa_output_tokens", "counter", "tokens generated", ("node",))
STEPS = Metric("kappa_engine_steps", "counter", "engine steps", ("node", "paced"))
STEP_TOKENS = Metric("kappa_engine_step_tokens", "counter", "tokens that they computed", ("node",))
OVERRUNS = Metric(
    "kappa_paced_overruns", "counter", "steps of a paced node that took longer than their pace",
    ("node",),
)  # fmt: skip
LOAD_BYTES = Metric("kappa_load_bytes", "counter", "bytes moved host to device", ("node",))
STORE_BYTES = Metric("kappa_store_bytes", "counter", "bytes moved device to host", ("node",))
LOAD_BANDWIDTH = Metric(
    "kappa_load_bytes_per_second", "gauge", "measured host-to-device bandwidth", ("node",)
)
LINK_SCALE = Metric(
    "kappa_calibration_link_ratio", "gauge", "measured over announced seconds of loads", ("node",)
)
COMPUTE_SCALE = Metric(
    "kappa_calibration_compute_ratio", "gauge", "measured over announced compute", ("node",)
)
OVERHEAD = Metric(
    "kappa_calibration_overhead_seconds", "gauge", "what a request costs besides the engine",
    ("node",),
)  # fmt: skip
TENANT_REQUESTS = Metric(
    "kappa_tenant_requests", "counter",
    "requests by tenant and outcome: answered, or the error's code", ("tenant", "outcome"),
)  # fmt: skip
KEY_FILE_READS = Metric(
    "kappa_key_file_reads", "counter",
    "times that the file of API keys was read anew, by outcome: read, or failed", ("outcome",),
)  # fmt: skip
TENANT_CHARGE = Metric(
    "kappa_tenant_charge_seconds", "counter",
    "seconds of the whole resource (vram, gpu, link) that workers charged a tenant",
    ("tenant", "resource"),
)  # fmt: skip
ENGINE_REQUESTS = Metric(
    "kappa_engine_requests", "gauge", "requests in an engine's last iteration, by state",
    ("node", "state"),
)  # fmt: skip
ITERATIONS = Metric(
    "kappa_scheduler_iterations", "counter", "iterations of the engine's scheduler", ("node",)
)
QUEUED_ITERATIONS = Metric(
    "kappa_scheduler_queued_iterations", "counter", "iterations with requests that wait", ("node",)
)
FILL = Metric(
    "kappa_scheduler_fill", "counter",
    "share of budget and of vram in use, summed over iterations with requests that wait",
    ("node", "resource"),
)  # fmt: skip
PASSED = Metric(
    "kappa_scheduler_passed", "counter", "waiting requests looked at and left, by reason",
    ("node", "reason"),
)  # fmt: skip
RULE_ERRORS = Metric(
    "kappa_scheduler_rule_errors", "counter", "iterations in which the scheduling rule failed",
    ("node",),
)  # fmt: skip
PREEMPTIONS = Metric(
    "kappa_scheduler_preemptions", "counter", "running requests that lost their blocks", ("node",)
)
STORES_DROPPED = Metric(
    "kappa_stores_dropped", "counter", "stores to the host tier that were given up", ("node",)
)
TIER_FAILURES = Metric(
    "kappa_tier_failures", "counter",
    "what an LMCache server failed to do, by what: absent, lookup, load, store", ("node", "why"),
)  # fmt: skip
FAILED_LOADS = Metric(
    "kappa_failed_loads", "counter",
    "loads that did not arrive, each followed by computing its tokens (engines of kind torch, and "
    "LMCache as host tier)",
    ("node",),
)  # fmt: skip
MISUSED_BLOCKS = Metric(
    "kappa_misused_blocks", "counter",
    "blocks freed twice, unknown, or of a wrong length: a fault of the engine (of kind torch)",
    ("node",),
)  # fmt: skip
TENANT_CREDIT = Metric(
    "kappa_tenant_credit_seconds", "gauge",
    "seconds of service, by weight, that a tenant is behind (below 0: ahead of) the mean",
    ("tenant",),
)  # fmt: skip
TENANT_OLDEST = Metric(
    "kappa_tenant_oldest_wait_seconds", "gauge",
    "how long a tenant's oldest request has waited for an engine to admit it", ("tenant",),
)  # fmt: skip
TENANT_WEIGHT = Metric("kappa_tenant_weight", "gauge", "a tenant's share", ("tenant",))
POWER = Metric(
    "kappa_node_power_watts", "gauge",
    "what a node's GPUs draw; source: nvml, model, or paced (modelled, as the node it is paced as)",
    ("node", "source"),
)  # fmt: skip
POWER_CAP = Metric("kappa_node_power_cap_watts", "gauge", "what they may draw", ("node", "source"))
ENERGY = Metric(
    "kappa_energy_joules", "counter",
    "energy that a node's GPUs used; of a paced node in its own, undilated time",
    ("node", "source"),
)  # fmt: skip
PREFILLS = Metric(
    "kappa_prefills", "counter",
    "prompts by where they were computed (handed_over, failed, kept, memory_bound), where there "
    "are prefill workers",
    ("where",),
)  # fmt: skip
ROLLOUT_REQUESTS = Metric(
    "kappa_rollout_requests", "counter", "requests by who steered them (kappa, ray)", ("arm",)
)
ROLLOUT_TTFT = Metric(
    "kappa_rollout_ttft_seconds", "histogram", "real time to first token, by who steered",
    ("arm",), _SECONDS,
)  # fmt: skip
SHADOWS = Metric(
    "kappa_shadow_decisions", "counter",
    "requests that Ray's router steered, by whether ours would have chosen the same worker",
    ("agreed",),
)  # fmt: skip
SHADOW_SAVING = Metric(
    "kappa_shadow_saving_seconds", "counter",
    "predicted time to first token that our choice would have saved, where it would have",
)  # fmt: skip
OTHERS_RESERVATIONS = Metric(
    "kappa_others_reservations", "gauge", "requests in flight that other ingresses sent"
)
RETRIES = Metric(
    "kappa_retries", "counter", "requests tried elsewhere, by the node that failed them and why",
    ("node", "why"),
)  # fmt: skip
BREAKER_OPEN = Metric(
    "kappa_breaker_open", "gauge", "circuit breaker of a node: 0 closed, 0.5 half open, 1 open",
    ("node",),
)  # fmt: skip
BREAKER_OPENED = Metric(
    "kappa_breaker_opened", "counter", "times that a node's circuit breaker opened, by why",
    ("node", "why"),
)  # fmt: skip
TASK_RESTARTS = Metric(
    "kappa_task_restarts", "counter", "tasks that failed and were started again: what follows a "
    "worker's stream (feed), its connection (line), or watches over all workers (watch)", ("task",),
)  # fmt: skip
RECORD_DROPPED = Metric(
    "kappa_record_dropped", "counter", "entries that router.record lost, its file having ended"
)
WORKERS = Metric("kappa_workers", "gauge", "workers known, by whether they are paced", ("paced",))

ALL: tuple[Metric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Metric))

ADDING: frozenset[str] = frozenset(
    metric.name
    for metric in (
        DECISIONS, REQUESTS, RATIO, PREDICTED_TTFT, TTFT, TTFT_ERROR, DECISION_SECONDS,
        TOKENIZE_SECONDS, RESERVATIONS, STREAM_GAPS, OUTPUT_TOKENS, TENANT_REQUESTS,
        KEY_FILE_READS, PREFILLS, ROLLOUT_REQUESTS, ROLLOUT_TTFT, SHADOWS, SHADOW_SAVING, RETRIES,
        BREAKER_OPENED, TASK_RESTARTS, RECORD_DROPPED,
    )
)  # fmt: skip
"""What each of several ingresses counts of its own requests; the rest all hear from workers."""


def document() -> str:
    """`docs/metrics.md`: every metric with kind, labels and meaning."""
    rows = [
        f"| `{m.name}{'_total' if m.kind == 'counter' else ''}` | {m.kind} "
        f"| {', '.join(m.labels) or '–'} | {m.meaning} |"
        for m in ALL
    ]
    head = (
        "# Metrics\n\n"
        "`GET /metrics` on the ingress, in Prometheus' text form. Made from `kappa/metrics.py` by\n"
        "`.venv/bin/python -c \"from kappa import metrics; print(metrics.document(), end='')\"`;\n"
        "a test keeps the two equal. Seconds of a paced node are real ones, dilated.\n\n"
        "| name | kind | labels | meaning |\n|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"
