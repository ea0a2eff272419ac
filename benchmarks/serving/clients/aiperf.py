"""NVIDIA's aiperf, in an environment of its own: what it is told, and what its records say.

Bodies are given to it whole (a trace with payloads), so it sends what we do. Its
`inter_token_latency` is what we call TPOT, its `inter_chunk_latency` are our gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.routing.peers.venvs import Peer
from benchmarks.serving.clients.common import Answer, ClientError, Plan, Played, json_lines, run

AIPERF = Peer("aiperf", "0.13.0")
NAME = "aiperf"
_RECORDS = "profile_export.jsonl"


def play(plan: Plan, python: Path, folder: Path) -> Played:
    """Have aiperf send the plan; `folder` is empty and stays behind with its files.

    Raises:
        ClientError: it failed, or its records cannot be read.
    """
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps({"payload": body}) + "\n" for body in bodies(plan)))
    _, cpu_s = run(NAME, command(plan, python, trace, folder / "out"), plan.timeout_s)
    return read(folder / "out" / _RECORDS, cpu_s)


def bodies(plan: Plan) -> list[dict[str, Any]]:
    """The bodies that we send for this plan."""
    return [
        {
            "model": plan.model, "max_tokens": plan.output_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
            "prompt": prompt,
        }
        for prompt in plan.prompts
    ]  # fmt: skip


def command(plan: Plan, python: Path, trace: Path, out: Path) -> list[str]:
    """Its command line."""
    pace = (
        ["--concurrency", str(plan.concurrency)]
        if plan.concurrency is not None
        else ["--request-rate", f"{plan.rate_rps:g}", "--arrival-pattern", "constant"]
    )
    return [
        str(python), "-m", "aiperf", "profile", "--model", plan.model, "--url", plan.url,
        "--endpoint-type", "completions", "--streaming", "--input-file", str(trace),
        "--custom-dataset-type", "mooncake-trace", "--no-fixed-schedule",
        "--dataset-sampling-strategy", "sequential", "--request-count", str(len(plan.prompts)),
        *pace, "--tokenizer", plan.tokenizer, "--use-server-token-count", "--ui-type", "none",
        "--no-gpu-telemetry", "--no-server-metrics", "--export-level", "records",
        "--output-artifact-dir", str(out),
    ]  # fmt: skip


def read(path: Path, cpu_s: float = math.nan) -> Played:
    """What its file of records says.

    Raises:
        ClientError: it is not as aiperf 0.13.0 writes it.
    """
    answers: list[Answer] = []
    gaps: list[float] = []
    failed = 0
    begin_ns, end_ns = math.inf, -math.inf
    for number, record in enumerate(json_lines(NAME, path), start=1):
        try:
            meta, metrics = record["metadata"], record["metrics"]
            if meta["benchmark_phase"] != "profiling":
                continue
            begin_ns = min(begin_ns, meta["request_start_ns"])
            end_ns = max(end_ns, meta["request_end_ns"])
            if record.get("error") or "time_to_first_token" not in metrics:
                failed += 1
                continue
            answers.append(
                Answer(
                    _seconds(metrics, "time_to_first_token"),
                    _seconds(metrics, "inter_token_latency"),
                    _seconds(metrics, "request_latency"),
                    (meta["request_start_ns"] - meta["credit_issued_ns"]) / 1e9,
                )
            )
            gaps += [gap / 1e3 for gap in _metric(metrics, "inter_chunk_latency") or ()]
        except (KeyError, TypeError) as error:
            raise ClientError(
                f"{NAME}: {path}:{number}: not as {AIPERF} writes it: {error!r}"
            ) from None
    return Played(tuple(answers), failed, max(end_ns - begin_ns, 0.0) / 1e9, tuple(gaps), cpu_s)


def _seconds(metrics: Mapping[str, Any], name: str) -> float:
    value = _metric(metrics, name)
    return math.nan if value is None else float(value) / 1e3


def _metric(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric in milliseconds, or several; None if it is not told."""
    metric = metrics.get(name)
    if metric is None:
        return None
    if metric["unit"] != "ms":
        raise KeyError(f"{name} in {metric['unit']}")
    return metric["value"]
