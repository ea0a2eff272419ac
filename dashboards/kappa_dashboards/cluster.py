"""The dashboard "Cluster": health of the service, its load, and its limits.

The objective comes first; then traffic, latency, engines, cache, lengths and machines. Its panels
use our metrics, and Ray's and vLLM's where those count what we do not.
"""

from __future__ import annotations

from kappa import metrics as m
from kappa_dashboards.panels import (
    NODE,
    Dashboard,
    Panel,
    PanelRow,
    Query,
    gauge,
    gauges,
    heat,
    rate,
    rate_by_node,
    rates,
    spread,
)

_GOOD = rate(m.TTFT, where='le="$ttft_slo"', part="bucket")
_SERVED = rate(m.TTFT, part="count")
_ALL = rate(m.REQUESTS)
_REFUSED = f"({rate(m.REQUESTS, where='status=~' + chr(34) + '5..|429' + chr(34))} or vector(0))"
_WITHIN = f"{_GOOD} / {_SERVED}"
_IDLE_GAUGE = "Empty between requests: Ray drops a gauge that is not set for some seconds."

SLO = PanelRow(
    "Service objective",
    (
        Panel("First token in time", "Share of first tokens that came within the objective chosen "
              "above.", "percentunit", (Query(_WITHIN, "in time"),), "stat", 4, 6, 1.0,
              (0.95, 0.99), True),
        Panel("Answered", "Share of requests that were neither refused for load (429, 503) nor "
              "failed (5xx).", "percentunit", (Query(f"1 - {_REFUSED} / {_ALL}", "answered"),),
              "stat", 4, 6, 1.0, (0.99, 0.999), True),
        Panel("Goodput", "Requests per second whose first token came within the objective.",
              "reqps", (Query(_GOOD, "requests/s"),), "stat", 4, 6),
        Panel("Burn rate", "How fast the error budget is spent: 1 uses it up exactly over the "
              "objective's period. Of the objective and target chosen above.", "none",
              (Query(f"(1 - {_WITHIN}) / (1 - $slo_target)", "burn rate"),), "stat", 4, 6,
              thresholds=(1.0, 6.0)),
        Panel("Time to first token", "Seconds from the request's arrival at the decider to its "
              "first token. Of a paced node: real seconds, dilated.", "s",
              spread(m.TTFT, where=NODE), width=8, height=6),
    ),
)  # fmt: skip

TRAFFIC = PanelRow(
    "Traffic",
    (
        Panel("Requests by status", "Requests per second by HTTP status.", "reqps",
              rates(m.REQUESTS, "status"), stacked=True),
        Panel("Prompt tokens by source", "Prompt tokens per second: on the device already, loaded "
              "from the host tier, or new (computed).", "cps",
              rates(m.PROMPT_TOKENS, "source", where=NODE), stacked=True),
        Panel("Generated tokens", "Tokens generated per second, by node.", "cps",
              (rate_by_node(m.OUTPUT_TOKENS),), stacked=True),
        Panel("Input to output", "Prompt tokens for each generated token.", "none",
              (Query(f"{rate(m.PROMPT_TOKENS, (), NODE)} / {rate(m.OUTPUT_TOKENS, (), NODE)}",
               "input/output"),), width=6),
        Panel("Ended by", "Ended requests per second, by model and by why they ended.", "reqps",
              rates("ray_vllm_request_success_total", "model_name", "finished_reason"),
              stacked=True, width=6),
        Panel("Workers", "Workers that report to the router, by whether their speed is emulated.",
              "none", (Query(gauge(m.WORKERS, by=("paced",)), "paced: {{paced}}"),), width=6,
              stacked=True),
        Panel("Replicas, healthy and wanted", "Replicas that pass Serve's health check, and how "
              "many Serve wants.", "none",
              (Query(gauge("ray_serve_deployment_replica_healthy", by=("deployment",)),
               "{{deployment}} healthy"),
               Query(gauge("ray_serve_autoscaling_target_replicas", "max", ("deployment",)),
               "{{deployment}} wanted")), width=6),
    ),
)  # fmt: skip

LATENCY = PanelRow(
    "Latency",
    (
        Panel("Time to first token, distribution", "Requests by their time to first token.", "s",
              heat(m.TTFT, NODE), "heatmap"),
        Panel("Between tokens", "Seconds between two tokens of an answer, as the engines count.",
              "s", spread("ray_vllm_inter_token_latency_seconds")),
        Panel("End to end", "Seconds from a request's arrival at its engine to its last token.",
              "s", spread("ray_vllm_e2e_request_latency_seconds")),
        Panel("End to end, distribution", "Requests by their whole time in the engine.", "s",
              heat("ray_vllm_e2e_request_latency_seconds"), "heatmap"),
        Panel("Waiting in the engine", "Seconds a request waits in its engine before it runs.", "s",
              spread("ray_vllm_request_queue_time_seconds")),
        Panel("Prefill", "Seconds of a request in prefill.", "s",
              spread("ray_vllm_request_prefill_time_seconds")),
        Panel("Decode", "Seconds of a request in decode.", "s",
              spread("ray_vllm_request_decode_time_seconds")),
        Panel("At the front door", "Seconds of a request in Envoy, from its arrival to the last "
              "byte of its answer.", "s", spread(m.REQUEST_SECONDS)),
        Panel("Rendering and tokenizing", "Seconds to render the chat template and tokenize, at "
              "the decider.", "s", spread(m.TOKENIZE_SECONDS)),
    ),
)  # fmt: skip

SCHEDULER = PanelRow(
    "Engines",
    (
        Panel("In flight", "Requests routed to a node whose stream has not ended.", "none",
              gauges(m.RESERVATIONS, "node", where=NODE), stacked=True),
        Panel("Requests in the engines", "Waiting, loading and running, in the last iteration.",
              "none", gauges(m.ENGINE_REQUESTS, "state", where=NODE), stacked=True),
        Panel("Waiting, by why", f"Requests that vLLM keeps waiting, by reason. {_IDLE_GAUGE}",
              "none", gauges("ray_vllm_num_requests_waiting_by_reason", "reason")),
        Panel("Preemptions", "Running requests per second that lost their blocks.", "cps",
              (rate_by_node(m.PREEMPTIONS),)),
        Panel("Longest answers allowed", "Most tokens a request may generate.", "none",
              spread("ray_vllm_request_max_num_generation_tokens", with_mean=False)),
    ),
)  # fmt: skip

_HELD = f'source=~"device|host|disk", {NODE}'


def _hit_rate(*by: str) -> str:
    return f"{rate(m.PROMPT_TOKENS, by, _HELD)} / {rate(m.PROMPT_TOKENS, by, NODE)}"


CACHE = PanelRow(
    "Cache",
    (
        Panel("Prefix hit rate", "Share of prompt tokens that were not computed: on the device, or "
              "in the host tier.", "percentunit", (Query(_hit_rate(), "hit rate"),), "stat", 4, 8,
              1.0, (0.3, 0.6), True),
        Panel("Prefix hit rate by node", "As beside, for each node.", "percentunit",
              (Query(_hit_rate("node"), "{{node}}"),), "bars", 6, 8, 1.0, (0.3, 0.6), True),
        Panel("Hits by tier", "Share of the tokens looked for that were found, on the device and "
              "in the host tier, as vLLM counts.", "percentunit",
              (Query(f"({rate('ray_vllm_prefix_cache_hits_total')} or vector(0)) / "
               f"{rate('ray_vllm_prefix_cache_queries_total')}", "device"),
               Query(f"({rate('ray_vllm_external_prefix_cache_hits_total')} or vector(0)) / "
               f"{rate('ray_vllm_external_prefix_cache_queries_total')}", "host")), width=6,
              top=1.0),
        Panel("Cache in use", "Share of the blocks in use, by replica: the device's, and the host "
              f"tier's. {_IDLE_GAUGE}", "percentunit",
              (Query(gauge("ray_vllm_kv_cache_usage_perc", "max", ("ReplicaId",)),
               "{{ReplicaId}} device"),
               Query(gauge("ray_vllm_kv_offload_cpu_cache_usage_perc", "max", ("ReplicaId",)),
               "{{ReplicaId}} host")), top=1.0),
        Panel("Loads and stores", "Bytes per second over the link: host to device, and back.",
              "Bps", (rate_by_node(m.LOAD_BYTES, "{{node}} loads"),
               rate_by_node(m.STORE_BYTES, "{{node}} stores"))),
        Panel("Stores given up", "Stores to the host tier per second that were dropped because the "
              "link was behind.", "cps", (rate_by_node(m.STORES_DROPPED),)),
        Panel("Faults of cache and loads", "Loads per second that did not arrive (their tokens "
              "were computed), and misuse of blocks, which is a fault of the engine.", "cps",
              (rate_by_node(m.FAILED_LOADS, "{{node}} failed loads"),
               rate_by_node(m.MISUSED_BLOCKS, "{{node}} misused blocks"))),
        Panel("Cached tokens by tier", "Tokens whose KV the nodes hold, as the router's index "
              "knows; what several tiers hold counts in each.", "none",
              gauges(m.CACHED_TOKENS, "tier", where=NODE)),
        Panel("Prefix index", "Entries of the router's prefix index.", "none",
              (Query(gauge(m.INDEX_BLOCKS), "entries"),)),
    ),
)  # fmt: skip

LENGTHS = PanelRow(
    "Lengths",
    (
        Panel("Prompt lengths", "Requests by prompt tokens.", "none",
              heat("ray_vllm_request_prompt_tokens"), "heatmap", 12),
        Panel("Answer lengths", "Requests by generated tokens.", "none",
              heat("ray_vllm_request_generation_tokens"), "heatmap", 12),
    ),
)  # fmt: skip

_NVML = "NVML finds no GPU on a machine without one"

HOST = PanelRow(
    "Machines",
    (
        Panel("CPU", "Percent of a machine's cores in use.", "percent",
              gauges("ray_node_cpu_utilization", "ip", how="max"), width=6, top=100.0),
        Panel("Memory", "Share of a machine's memory in use; the host tier lives there.",
              "percentunit", (Query(f"{gauge('ray_node_mem_used', 'max', ('ip',))} / "
               f"{gauge('ray_node_mem_total', 'max', ('ip',))}", "{{ip}}"),), width=6, top=1.0),
        Panel("Disk", "Share of a machine's disk in use.", "percentunit",
              (Query(f"{gauge('ray_node_disk_usage', 'max', ('ip',))} / "
               f"({gauge('ray_node_disk_usage', 'max', ('ip',))} + "
               f"{gauge('ray_node_disk_free', 'max', ('ip',))})", "{{ip}}"),), width=6, top=1.0),
        Panel("Network", "Bytes per second in and out of a machine.", "Bps",
              (Query(gauge("ray_node_network_receive_speed", "max", ("ip",)), "{{ip}} in"),
               Query(gauge("ray_node_network_send_speed", "max", ("ip",)), "{{ip}} out")), width=6),
        Panel("GPU", "Percent of a GPU's time in use.", "percent",
              (Query(gauge("ray_node_gpus_utilization", "max", ("ip", "GpuIndex")),
               "{{ip}} GPU {{GpuIndex}}"),), top=100.0, absent=_NVML),
        Panel("GPU memory", "MiB of a GPU's memory in use.", "decmbytes",
              (Query(gauge("ray_node_gram_used", "max", ("ip", "GpuIndex")),
               "{{ip}} GPU {{GpuIndex}}"),), absent=_NVML),
        Panel("GPU power", "What a GPU draws, in watts.", "watt",
              (Query(f"{gauge('ray_node_gpu_power_milliwatts', 'max', ('ip', 'GpuIndex'))} / 1000",
               "{{ip}} GPU {{GpuIndex}}"),), absent=_NVML),
    ),
)  # fmt: skip

CLUSTER = Dashboard(
    "kappa-cluster",
    "kappa-serve: Cluster",
    "Is the service well, how much does it do, and what limits it.",
    (SLO, TRAFFIC, LATENCY, SCHEDULER, CACHE, LENGTHS, HOST),
)
