"""Which metrics a panel may use: ours, and those of Ray and vLLM that are listed here by name.

Ray's metrics agent, one per Ray node, exposes its own metrics and Serve's, and vLLM's with `ray_`
before their names and `_` for the colon. Meanings are ours. Gauges of vLLM vanish from a scrape
some seconds after the last request, counters and histograms stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa import metrics as m
from kappa.metrics import Kind, Metric


@dataclass(frozen=True, slots=True)
class Foreign:
    """A metric that Ray or vLLM exports, under its name in a scrape (counters with `_total`)."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


FOREIGN: tuple[Foreign, ...] = (
    Foreign("ray_vllm_e2e_request_latency_seconds", "histogram", "a request, first to last"),
    Foreign("ray_vllm_inter_token_latency_seconds", "histogram", "between two tokens"),
    Foreign("ray_vllm_request_queue_time_seconds", "histogram", "a request, waiting in its engine"),
    Foreign("ray_vllm_request_prefill_time_seconds", "histogram", "a request, in prefill"),
    Foreign("ray_vllm_request_decode_time_seconds", "histogram", "a request, in decode"),
    Foreign("ray_vllm_request_prompt_tokens", "histogram", "prompt tokens of a request"),
    Foreign("ray_vllm_request_generation_tokens", "histogram", "generated tokens of a request"),
    Foreign("ray_vllm_request_max_num_generation_tokens", "histogram",
            "most tokens a request may get"),
    Foreign("ray_vllm_request_success_total", "counter",
            "ended requests", ("finished_reason", "model_name")),
    Foreign("ray_vllm_prefix_cache_queries_total", "counter", "tokens looked for on the device"),
    Foreign("ray_vllm_prefix_cache_hits_total", "counter", "tokens found on the device"),
    Foreign("ray_vllm_external_prefix_cache_queries_total", "counter", "tokens looked for in host"),
    Foreign("ray_vllm_external_prefix_cache_hits_total", "counter", "tokens found in host"),
    Foreign("ray_vllm_kv_cache_usage_perc", "gauge", "share of the device's blocks in use"),
    Foreign("ray_vllm_kv_offload_cpu_cache_usage_perc", "gauge", "share of the host tier in use"),
    Foreign("ray_vllm_num_requests_waiting_by_reason", "gauge",
            "waiting requests, by why", ("reason",)),
    Foreign("ray_serve_deployment_replica_healthy", "gauge",
            "1 if a replica passed its health check", ("deployment", "replica")),
    Foreign("ray_serve_autoscaling_target_replicas", "gauge", "replicas wanted", ("deployment",)),
    Foreign("ray_serve_deployment_queued_queries", "gauge",
            "requests queued before a deployment", ("deployment",)),
    Foreign("ray_serve_http_request_latency_ms", "histogram",
            "a request at Serve's proxy", ("route", "status_code")),
    Foreign("ray_node_cpu_utilization", "gauge", "percent of a machine's cores in use", ("ip",)),
    Foreign("ray_node_mem_used", "gauge", "bytes of memory in use on a machine", ("ip",)),
    Foreign("ray_node_mem_total", "gauge", "bytes of memory of a machine", ("ip",)),
    Foreign("ray_node_disk_usage", "gauge", "bytes of disk in use on a machine", ("ip",)),
    Foreign("ray_node_disk_free", "gauge", "bytes of disk free on a machine", ("ip",)),
    Foreign("ray_node_network_receive_speed", "gauge", "bytes received per second", ("ip",)),
    Foreign("ray_node_network_send_speed", "gauge", "bytes sent per second", ("ip",)),
    Foreign("ray_node_gpus_utilization", "gauge",
            "percent of a GPU's time in use", ("ip", "GpuIndex")),
    Foreign("ray_node_gram_used", "gauge", "MiB of a GPU's memory in use", ("ip", "GpuIndex")),
    Foreign("ray_node_gpu_power_milliwatts", "gauge", "what a GPU draws", ("ip", "GpuIndex")),
)  # fmt: skip

_ALL: tuple[Metric | Foreign, ...] = (*m.ALL, *FOREIGN)

NO_GPU = frozenset(
    {"ray_node_gpus_utilization", "ray_node_gram_used", "ray_node_gpu_power_milliwatts"}
)
"""Exported only where NVML finds a GPU."""

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def of(metric: Metric, part: str = "") -> str:
    """The series name of one of our metrics; `part` is `bucket`, `sum` or `count`."""
    if part:
        return f"{metric.name}_{part}"
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def _series_of(metric: Metric | Foreign) -> list[str]:
    # A foreign counter is listed under its name in a scrape, which has its suffix.
    if isinstance(metric, Foreign) and metric.kind == "counter":
        return [metric.name]
    return [metric.name + suffix for suffix in _SUFFIXES[metric.kind]]


def series() -> dict[str, Kind]:
    """Every series name that a scrape may hold, and the kind of its metric."""
    return {name: metric.kind for metric in _ALL for name in _series_of(metric)}


def documented(name: str) -> tuple[str, str]:
    """Where a series is explained: the file below docs/, and the name that its line holds."""
    for metric in _ALL:
        if name in _series_of(metric):
            if isinstance(metric, Foreign):
                return "dashboards.md", metric.name
            return "metrics.md", of(metric)
    raise KeyError(f"{name}: not in kappa/metrics.py, not in dashboards/names.py")


def document() -> str:
    """The table of docs/dashboards.md: the foreign metrics that panels use."""
    rows = [
        f"| `{f.name}` | {f.kind} | {', '.join(f.labels) or '–'} | {f.meaning} |" for f in FOREIGN
    ]
    return "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
