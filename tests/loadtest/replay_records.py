"""Records of load tests for the tests: one with everything reported, and many of a seed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kappa_loadtest.run_folder import RequestRecord


def reported(**changes: Any) -> RequestRecord:
    """A request of our cluster: sent 0.01 s late, then 0.1 queue, 0.3 load, 0.5 compute, 0.02 way.

    The endpoint reported token counts and its TTFT, but not how that split.
    """
    values: dict[str, Any] = {
        "session": "s", "turn": 0, "tenant": "a", "scheduled_s": 1.0, "sent_s": 1.01,
        "first_token_s": 1.93, "last_token_s": 2.33, "ended_s": 2.34, "input_tokens": 2000,
        "prompt_tokens": 2000, "output_tokens": 5, "generated_tokens": 5, "cached_tokens": 1600,
        "new_tokens": 400, "gaps_s": [0.1, 0.1, 0.1, 0.1], "status": 200, "request_id": "id",
        "node": "pcie", "paced": True, "reason": "shorter_queue", "ratio": 4.0, "crit": 23.4,
        "predicted_ttft_s": 0.85,
        "predicted": {
            "device_tokens": 0, "cached_tokens": 1600, "new_tokens": 400, "queue_s": 0.05,
            "load_s": 0.3, "compute_s": 0.5, "ttft_s": 0.85,
        },
        "actual": {
            "device_tokens": 0, "cached_tokens": 1600, "new_tokens": 400, "ttft_s": 0.9,
        },
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


def foreign(**changes: Any) -> RequestRecord:
    """A request of an endpoint that reports nothing."""
    nothing: dict[str, Any] = {
        "node": "", "paced": False, "reason": "", "ratio": None, "crit": None, "request_id": "",
        "predicted_ttft_s": None, "predicted": None, "actual": None,
    }  # fmt: skip
    return reported(**{**nothing, **changes})


def failed(error: str = "429", **changes: Any) -> RequestRecord:
    """A request that was refused after 0.2 s."""
    nothing: dict[str, Any] = {
        "first_token_s": None, "last_token_s": None, "ended_s": 1.2, "generated_tokens": 0,
        "gaps_s": [], "actual": None, "error": error, "error_detail": "queue <full>",
    }  # fmt: skip
    return reported(**{**nothing, **changes})


def many(count: int, seed: int = 0) -> Iterator[RequestRecord]:
    """Requests at 20 a second, with TTFTs spread over decades."""
    rng = np.random.default_rng(seed)
    due_s = 0.0
    for i in range(count):
        due_s += float(rng.exponential(0.05))
        ttft_s = float(rng.lognormal(-1, 1))
        yield reported(
            session=f"s{i}", tenant=f"t{i % 3}", scheduled_s=due_s, sent_s=due_s,
            first_token_s=due_s + ttft_s, last_token_s=due_s + ttft_s + 0.4,
            ended_s=due_s + ttft_s + 0.4,
        )  # fmt: skip
