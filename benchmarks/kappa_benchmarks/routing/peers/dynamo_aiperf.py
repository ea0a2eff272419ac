"""NVIDIA's aiperf as the client of `kappa bench dynamo`: the same requests, sent and timed by it.

It gets every body as it stands, with the bench's arrivals and pauses. It counts a time to first
token from when it sends, not from when that was due, and keeps no worker's id.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kappa_benchmarks.harness import read_lines
from kappa_benchmarks.routing.peers.dynamo_cluster import MODEL
from kappa_benchmarks.routing.peers.dynamo_rows import Sent
from kappa_benchmarks.routing.peers.routers import OUR_VARIABLES, Environment, PeerError, python_of
from kappa_workload.replay import ReplaySession

AIPERF = Environment("aiperf-0.13.0", ["aiperf==0.13.0"], ["aiperf==0.13.0"])
_SNAPSHOT = "0" * 40
_OPTIONS = (
    "--model", MODEL, "--tokenizer", f"kappa/{MODEL}", "--use-server-token-count", "--streaming",
    "--endpoint-type", "completions", "--custom-dataset-type", "mooncake_trace",
    "--fixed-schedule", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry",
)  # fmt: skip


def aiperf(url: str, trace: bytes, model: Path, folder: Path, limit_s: float) -> list[Sent]:
    """What came of a trace's requests.

    Raises:
        PeerError: it sent nothing, or did not end in time; with its last words.
    """
    hub, source, out = folder / f"hub/models--kappa--{MODEL}", folder / "trace", folder / "aiperf"
    # It takes a tokenizer from a cache of Hugging Face's only, and from no folder.
    for name in ("refs", "snapshots"):
        (hub / name).mkdir(parents=True)
    (hub / "refs/main").write_text(_SNAPSHOT)
    (hub / "snapshots" / _SNAPSHOT).symlink_to(model)
    source.write_bytes(trace)
    command = [python_of(AIPERF), "-m", "aiperf", "profile", *_OPTIONS, "--url", url]
    command += ["--input-file", str(source), "--artifact-dir", str(out)]
    kept = {k: v for k, v in os.environ.items() if k not in OUR_VARIABLES}
    try:
        ended = subprocess.run(
            command, env={**kept, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}, timeout=limit_s,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"aiperf: {error}") from None
    rows = read_lines(out / "profile_export.jsonl")
    if not rows:
        raise PeerError(f"aiperf sent nothing: {(ended.stdout + ended.stderr)[-600:]}")
    return received(rows, trace.count(b"\n"))


def trace_of(
    sessions: Sequence[ReplaySession], bodies: Mapping[tuple[str, int], bytes], pause_s: float
) -> bytes:
    """Lines of aiperf's mooncake_trace: a session's first request at its time in ms, the others so
    many ms after their predecessor's end."""
    lines = []
    for session in sessions:
        for turn in session.requests:
            body = msgspec.Raw(bodies[session.id, turn.turn])
            row: dict[str, Any] = {"session_id": session.id, "payload": body}
            if turn.turn:
                row["delay"] = 1e3 * min(turn.after_s, pause_s)
            else:
                row["timestamp"] = 1e3 * session.arrival_s
            lines.append(msgspec.json.encode(row) + b"\n")
    return b"".join(lines)


def received(rows: Sequence[Mapping[str, Any]], requests: int) -> list[Sent]:
    """Its records; those of the requests that it wrote none of failed, too."""
    began_ns = min(row["metadata"]["request_start_ns"] for row in rows)
    sent = [Sent("", 0, 0.0, error="no record") for _ in range(requests - len(rows))]
    for row in rows:
        about, found = row["metadata"], {k: v["value"] for k, v in row["metrics"].items()}
        one = Sent(about["x_request_id"], found.get("usage_prompt_tokens", 0), 0.0)
        one.due_s = one.sent_s = (about["request_start_ns"] - began_ns) / 1e9
        one.ended_s = (about["request_end_ns"] - began_ns) / 1e9
        one.cached = found.get("usage_prompt_cache_read_tokens", 0)
        one.error = str(row.get("error") or "")
        if "time_to_first_token" in found:
            one.first_s = one.sent_s + found["time_to_first_token"] / 1e3
        elif not one.error:
            one.error = "no token came"
        sent.append(one)
    return sent
