"""Every metric's name, kind, labels and meaning: the only place where a metric is named.

Names begin with `kappa_`, carry their unit, and never hold a colon. `docs/metrics.md` and the
dashboards are made from this list.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    @property
    def exposed(self) -> str:
        """The metric's name in a scrape; parts of a histogram have further suffixes."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", meaning, labels)


def _worker_gauge(name: str, meaning: str, *labels: str) -> Metric:
    return _gauge(name, meaning, "node", "worker", *labels)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", meaning, labels, buckets)


DECISIONS = _counter("kappa_decisions", "routing decisions", "node", "policy", "reason", "bound")
REQUESTS = _counter("kappa_requests", "requests by HTTP status", "status")
REQUEST_SECONDS = _histogram(
    "kappa_request_seconds", "a request at the front door, its answer included", _SECONDS
)
RATIO = _histogram("kappa_request_ratio", "cached-to-new ratio on the chosen node", _RATIOS, "node")
CRITICAL_RATIO = _worker_gauge(
    "kappa_critical_ratio", "critical ratio of a node for 128 new tokens"
)
PREDICTED_TTFT = _histogram(
    "kappa_predicted_ttft_seconds", "predicted time to first token", _SECONDS, "node"
)
TTFT = _histogram("kappa_ttft_seconds", "real time to first token", _SECONDS, "node")
TTFT_ERROR = _histogram(
    "kappa_ttft_error_ratio",
    "absolute error of the predicted time to first token, as a share of the real one",
    _ERRORS, "node", "kind",
)  # fmt: skip
DECISION_SECONDS = _histogram("kappa_decision_seconds", "time taken by one decision", _MICROSECONDS)
TOKENIZE_SECONDS = _histogram(
    "kappa_tokenize_seconds", "time to render and tokenize one prompt", _SECONDS
)
RESERVATIONS = _worker_gauge("kappa_reservations", "requests in flight")
LINK_BACKLOG = _worker_gauge("kappa_link_backlog_seconds", "queued loads")
GPU_BACKLOG = _worker_gauge("kappa_gpu_backlog_seconds", "queued prompts")
INDEX_BLOCKS = _gauge("kappa_index_blocks", "entries of the prefix index")
CACHED_TOKENS = _worker_gauge(
    "kappa_cached_tokens",
    "tokens whose KV a node holds, by tier (device, host, disk), as the prefix index knows",
    "tier",
)
INDEX_LOSSES = _counter(
    "kappa_index_losses", "blocks that the prefix index could not place, by why", "why"
)
STREAM_GAPS = _counter("kappa_stream_gaps", "gaps in a worker's event stream", "node")
STREAM_FLOODS = _counter(
    "kappa_stream_floods",
    "times that a worker sent more events than are followed, and they were dropped",
    "node",
)
PROMPT_TOKENS = _counter(
    "kappa_prompt_tokens", "prompt tokens by where they came from", "node", "source"
)
OUTPUT_TOKENS = _counter("kappa_output_tokens", "tokens generated", "node")
STEPS = _counter("kappa_engine_steps", "engine steps", "node", "paced")
STEP_TOKENS = _counter("kappa_engine_step_tokens", "tokens that they computed", "node")
OVERRUNS = _counter(
    "kappa_paced_overruns", "steps of a paced node that took longer than their pace", "node"
)
LOAD_BYTES = _counter("kappa_load_bytes", "bytes moved host to device", "node")
STORE_BYTES = _counter("kappa_store_bytes", "bytes moved device to host", "node")
LOAD_BANDWIDTH = _worker_gauge("kappa_load_bytes_per_second", "measured host-to-device bandwidth")
ANNOUNCED_BANDWIDTH = _worker_gauge(
    "kappa_announced_bytes_per_second",
    "bandwidth that a node announced, by direction: load, store",
    "direction",
)
STEP_FIT = _worker_gauge(
    "kappa_step_fit_ratio", "R² of the constants fitted to a node's measured steps"
)
PROFILE_AGE = _worker_gauge("kappa_profile_age_seconds", "since a node was measured")
LINK_SCALE = _worker_gauge(
    "kappa_calibration_link_ratio", "learnt over announced seconds of a load of 2,048 tokens"
)
COMPUTE_SCALE = _worker_gauge(
    "kappa_calibration_compute_ratio", "learnt over announced seconds of a prompt of 2,048 tokens"
)
CALIBRATION_SD = _worker_gauge(
    "kappa_calibration_ttft_deviation",
    "how far a time to first token lies from its prediction (standard deviation of the logarithm)",
)
CALIBRATION_BELIEVED = _worker_gauge(
    "kappa_calibration_believed",
    "1 if the steps and loads that a worker reports agree with its first tokens, else 0",
)
OVERHEAD = _worker_gauge(
    "kappa_calibration_overhead_seconds", "what a request costs besides the engine"
)
TENANT_REQUESTS = _counter(
    "kappa_tenant_requests",
    "requests by tenant and outcome: answered, or the error's code",
    "tenant",
    "outcome",
)
KEY_FILE_READS = _counter(
    "kappa_key_file_reads",
    "times that the file of API keys was read again, by outcome: read, or failed",
    "outcome",
)
TENANT_CHARGE = _counter(
    "kappa_tenant_charge_seconds",
    "seconds of the whole resource (vram, gpu, link) that workers charged a tenant",
    "tenant",
    "resource",
)
ENGINE_REQUESTS = _worker_gauge(
    "kappa_engine_requests", "requests in an engine's last iteration, by state", "state"
)
ITERATIONS = _counter("kappa_scheduler_iterations", "iterations of the engine's scheduler", "node")
QUEUED_ITERATIONS = _counter(
    "kappa_scheduler_queued_iterations", "iterations with requests that wait", "node"
)
FILL = _counter(
    "kappa_scheduler_fill",
    "share of budget and of vram in use, summed over iterations with requests that wait",
    "node",
    "resource",
)
PASSED = _counter(
    "kappa_scheduler_passed", "waiting requests looked at and left, by reason", "node", "reason"
)
RULE_ERRORS = _counter(
    "kappa_scheduler_rule_errors", "iterations in which the scheduling rule failed", "node"
)
PREEMPTIONS = _counter(
    "kappa_scheduler_preemptions", "running requests that lost their blocks", "node"
)
STORES_DROPPED = _counter(
    "kappa_stores_dropped",
    "stores to host memory or to the disk behind it that were given up",
    "node",
)
TIER_FAILURES = _counter(
    "kappa_tier_failures",
    "what an LMCache server or a disk failed to do, by what: absent, lookup, load, store",
    "node",
    "why",
)
FAILED_LOADS = _counter(
    "kappa_failed_loads",
    "loads that did not arrive, each followed by computing its tokens (engines of kind torch,"
    " LMCache as host tier, disk tiers)",
    "node",
)
MISUSED_BLOCKS = _counter(
    "kappa_misused_blocks",
    "blocks freed twice, unknown, or of a wrong length: a fault of the engine (of kind torch)",
    "node",
)
TENANT_CREDIT = _gauge(
    "kappa_tenant_credit_seconds",
    "seconds of service, by weight, that a tenant is behind (below 0: ahead of) the mean",
    "tenant",
)
TENANT_OLDEST = _gauge(
    "kappa_tenant_oldest_wait_seconds",
    "how long a tenant's oldest request has waited for an engine to admit it",
    "tenant",
)
TENANT_WEIGHT = _gauge("kappa_tenant_weight", "a tenant's share", "tenant")
POWER = _worker_gauge(
    "kappa_node_power_watts",
    "what a node's GPUs draw; source: nvml, model, or paced (modelled, as the node it is paced as)",
    "source",
)
POWER_CAP = _worker_gauge("kappa_node_power_cap_watts", "what they may draw", "source")
ENERGY = _counter(
    "kappa_energy_joules",
    "energy that a node's GPUs used; of a paced node in its own, undilated time",
    "node",
    "source",
)
PREFILLS = _counter(
    "kappa_prefills",
    "prompts by where they were computed (handed_over, failed, kept, memory_bound), where "
    "there are prefill workers",
    "where",
)
ROLLOUT_REQUESTS = _counter(
    "kappa_rollout_requests", "requests by who steered them (kappa, ray, present)", "arm"
)
ROLLOUT_TTFT = _histogram(
    "kappa_rollout_ttft_seconds", "real time to first token, by who steered", _SECONDS, "arm"
)
SHADOWS = _counter(
    "kappa_shadow_decisions",
    "requests that Ray's router steered, by whether ours would have chosen the same worker",
    "agreed",
)
SHADOW_SAVING = _counter(
    "kappa_shadow_saving_seconds",
    "predicted time to first token that our choice would have saved, where it would have",
)
OTHERS_RESERVATIONS = _gauge(
    "kappa_others_reservations", "requests in flight that other deciders sent"
)
PEER_AGE = _gauge(
    "kappa_peer_age_seconds",
    "since another kappa route last told what it has in flight; from 2 s on that is forgotten",
    "peer",
)
RETRIES = _counter(
    "kappa_retries", "requests tried elsewhere, by the node that failed them and why", "node", "why"
)
ENDS_LOST = _counter(
    "kappa_request_ends_lost", "requests of which the front door said no more, and no end"
)
BREAKER_OPEN = _worker_gauge(
    "kappa_breaker_open", "circuit breaker of a node: 0 closed, 0.5 half open, 1 open"
)
BREAKER_OPENED = _counter(
    "kappa_breaker_opened", "times that a node's circuit breaker opened, by why", "node", "why"
)
TASK_RESTARTS = _counter(
    "kappa_task_restarts",
    "tasks that failed and were started again: what follows a worker's stream (feed), its "
    "connection (line), or watches over all workers (watch)",
    "task",
)
RECORD_DROPPED = _counter(
    "kappa_record_dropped", "entries that router.record lost, its file having ended"
)
WORKERS = _gauge("kappa_workers", "workers known, by whether they are paced", "paced")

ALL: tuple[Metric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Metric))

ADDING: frozenset[str] = frozenset(
    metric.name
    for metric in (
        DECISIONS, REQUESTS, REQUEST_SECONDS, RATIO, PREDICTED_TTFT, TTFT, TTFT_ERROR,
        DECISION_SECONDS, TOKENIZE_SECONDS, RESERVATIONS, STREAM_GAPS, STREAM_FLOODS,
        OUTPUT_TOKENS, TENANT_REQUESTS, KEY_FILE_READS, PREFILLS, ROLLOUT_REQUESTS,
        ROLLOUT_TTFT, SHADOWS, SHADOW_SAVING, RETRIES, ENDS_LOST, BREAKER_OPENED,
        TASK_RESTARTS, RECORD_DROPPED,
    )
)  # fmt: skip
"""What each of several deciders counts of its own requests; the rest is in workers' reports."""


def table(metrics: Iterable[Metric]) -> str:
    """A table in Markdown: metrics with kind, labels and meaning."""
    rows = (
        f"| `{m.exposed}` | {m.kind} | {', '.join(m.labels) or '–'} | {m.meaning} |\n"
        for m in metrics
    )
    return "".join(("| name | kind | labels | meaning |\n|---|---|---|---|\n", *rows))


def document() -> str:
    """`docs/metrics.md`: every metric of ours."""
    head = (
        "# Metrics\n\n"
        "`GET /metrics` on the decider, in Prometheus' text form. Made from `kappa.metrics` by\n"
        "`.venv/bin/python -c \"from kappa import metrics; print(metrics.document(), end='')\"`;\n"
        "a test keeps the two equal. Seconds of a paced node are real ones, dilated.\n\n"
    )
    return head + table(ALL)
