"""The metrics that a panel may use: ours, and those of Ray and vLLM that are listed here.

Ray's metrics agent, one per Ray node, exposes its own metrics and Serve's, and vLLM's with `ray_`
before their names and `_` for the colon. Meanings are ours. Gauges of vLLM vanish from a scrape
some seconds after the last request, counters and histograms stay. As in `kappa.metrics`, counters
stand here without the `_total` that a scrape adds.
"""

from __future__ import annotations

from kappa import metrics as m
from kappa.metrics import Kind, Metric

FOREIGN: tuple[Metric, ...] = (
    Metric("ray_vllm_e2e_request_latency_seconds", "histogram", "a request, first to last"),
    Metric("ray_vllm_inter_token_latency_seconds", "histogram", "between two tokens"),
    Metric("ray_vllm_request_queue_time_seconds", "histogram", "a request, waiting in its engine"),
    Metric("ray_vllm_request_prefill_time_seconds", "histogram", "a request, in prefill"),
    Metric("ray_vllm_request_decode_time_seconds", "histogram", "a request, in decode"),
    Metric("ray_vllm_request_prompt_tokens", "histogram", "prompt tokens of a request"),
    Metric("ray_vllm_request_generation_tokens", "histogram", "generated tokens of a request"),
    Metric("ray_vllm_request_max_num_generation_tokens", "histogram",
            "most tokens a request may get"),
    Metric("ray_vllm_request_success", "counter",
            "ended requests", ("finished_reason", "model_name")),
    Metric("ray_vllm_prefix_cache_queries", "counter", "tokens looked for on the device"),
    Metric("ray_vllm_prefix_cache_hits", "counter", "tokens found on the device"),
    Metric("ray_vllm_external_prefix_cache_queries", "counter", "tokens looked for in host"),
    Metric("ray_vllm_external_prefix_cache_hits", "counter", "tokens found in host"),
    Metric("ray_vllm_kv_cache_usage_perc", "gauge", "share of the device's blocks in use"),
    Metric("ray_vllm_kv_offload_cpu_cache_usage_perc", "gauge", "share of the host tier in use"),
    Metric("ray_vllm_num_requests_waiting_by_reason", "gauge",
            "waiting requests, by why", ("reason",)),
    Metric("ray_serve_deployment_replica_healthy", "gauge",
            "1 if a replica passed its health check", ("deployment", "replica")),
    Metric("ray_serve_autoscaling_target_replicas", "gauge", "replicas wanted", ("deployment",)),
    Metric("ray_node_cpu_utilization", "gauge", "percent of a machine's cores in use", ("ip",)),
    Metric("ray_node_mem_used", "gauge", "bytes of memory in use on a machine", ("ip",)),
    Metric("ray_node_mem_total", "gauge", "bytes of memory of a machine", ("ip",)),
    Metric("ray_node_disk_usage", "gauge", "bytes of disk in use on a machine", ("ip",)),
    Metric("ray_node_disk_free", "gauge", "bytes of disk free on a machine", ("ip",)),
    Metric("ray_node_network_receive_speed", "gauge", "bytes received per second", ("ip",)),
    Metric("ray_node_network_send_speed", "gauge", "bytes sent per second", ("ip",)),
    Metric("ray_node_gpus_utilization", "gauge",
            "percent of a GPU's time in use", ("ip", "GpuIndex")),
    Metric("ray_node_gram_used", "gauge", "MiB of a GPU's memory in use", ("ip", "GpuIndex")),
    Metric("ray_node_gpu_power_milliwatts", "gauge", "what a GPU draws", ("ip", "GpuIndex")),
)  # fmt: skip

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def of(metric: Metric | str, part: str = "") -> str:
    """The series name of a metric, or of a foreign one by name.

    part: of a histogram, `bucket`, `sum` or `count`.
    """
    name = metric if isinstance(metric, str) else metric.exposed
    return f"{name}_{part}" if part else name


def _series_of(metric: Metric) -> list[str]:
    return [metric.name + suffix for suffix in _SUFFIXES[metric.kind]]


def series() -> dict[str, Kind]:
    """Every series name that a scrape may hold, and the kind of its metric."""
    return {name: metric.kind for metric in (*m.ALL, *FOREIGN) for name in _series_of(metric)}


def documented(name: str) -> tuple[str, str]:
    """(file below docs/, name in its line) of the explanation of a series."""
    for page, metrics in (("metrics.md", m.ALL), ("dashboards.md", FOREIGN)):
        for metric in metrics:
            if name in _series_of(metric):
                return page, metric.exposed
    raise KeyError(
        f"{name}: not in kappa/kappa/metrics.py, not in dashboards/kappa_dashboards/names.py"
    )


def document() -> str:
    """The table of docs/dashboards.md: the foreign metrics that panels use."""
    return m.table(FOREIGN)
