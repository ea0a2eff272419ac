"""What the bench of sparse decoding is held to, judged from its rows alone.

Predictions are judged anywhere; the published speed-up and the gather's bandwidth on a GPU, where
they are about something: on a CPU a gather is a memory copy by index.
"""

from __future__ import annotations

from typing import Any

from benchmarks.offload.sparse_settings import PAPER_HITS

GATHER, COPY = "gather-alone", "copy-alone"
PUBLISHED = (1.16, 1.67)
"""Of paper 004's Llama3-8B: its speed-up over the best of its baselines, least and most."""
LEAST_GATHER = 0.9
MOST_ERROR = 0.15


def judge(rows: list[dict[str, Any]], device_type: str) -> list[dict[str, Any]]:
    """What the rows are held to: predictions anywhere, published figures on a GPU alone."""
    goals = []
    errors = [abs(r["predicted_error"]) for r in rows if r["predicted_error"] is not None]
    if errors:
        within = sum(error <= MOST_ERROR for error in errors)
        least = [abs(r["predicted_error_of_least"]) for r in rows if r["predicted_s"] is not None]
        goals.append({
            "goal": "predicted within 15 % of measured", "value": max(errors),
            "limit": MOST_ERROR, "met": max(errors) <= MOST_ERROR,
            "text": f"{within} of {len(errors)} rows within, "
            f"{sum(error <= MOST_ERROR for error in least)} against the least of the repeats",
        })  # fmt: skip
    if device_type != "cuda":
        return goals
    for row in rows:
        where = f"{row['setting']} {row['cell']}"
        if row["policy"] == f"clo-{round(100 * PAPER_HITS)}":
            goals.append({
                "goal": f"{PUBLISHED[0]} times the best baseline or more, at 79 % injected hits",
                "where": where, "value": row["speedup"], "limit": PUBLISHED[0],
                "met": row["speedup"] >= PUBLISHED[0], "text": f"over {row['baseline']}",
            })  # fmt: skip
        if row["policy"] == GATHER:
            copy = next(r for r in rows if r["policy"] == COPY and r["cell"] == row["cell"]
                        and r["setting"] == row["setting"])  # fmt: skip
            share = row["link_gbps"] / copy["link_gbps"]
            goals.append({
                "goal": "the gather at 90 % of a plain copy's bandwidth", "where": where,
                "value": share, "limit": LEAST_GATHER, "met": share >= LEAST_GATHER,
                "text": f"{row['link_gbps']:.3g} of {copy['link_gbps']:.3g} GB/s",
            })  # fmt: skip
    return goals
