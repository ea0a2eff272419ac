"""What a connector reports of each request that its scheduler has admitted: its tokens by source.

When the scheduler has allocated a request, the split of its prompt into device, host and new tokens
is known for good; vLLM names the device hit only when it asks for the host's. Used by all our
connectors, in the scheduler's process.
"""

from __future__ import annotations

import time
from typing import Any

import structlog

from workers.request_metadata import request_id_of
from workers.stats_channel import StatsSender

log = structlog.get_logger(__name__)


def ignore_malformed_params(request: Any) -> None:
    """Drop a new request's `kv_transfer_params` unless they are a mapping.

    vLLM's connectors and LMCache's take them for one in the engine's loop, where an exception ends
    the engine. Without them KV is computed instead of received, and the answer is the same.
    """
    params = request.kv_transfer_params
    if params is None or isinstance(params, dict):
        return
    log.warning(
        "kv_transfer_params_ignored",
        request_id=request.request_id,
        reason=f"they are of type {type(params).__name__}, not a mapping",
    )
    request.kv_transfer_params = None
    request.sampling_params.extra_args.pop("kv_transfer_params", None)


class AdmissionReports:
    """Remembers device hits until their requests are admitted, then reports each once."""

    def __init__(self, stats: StatsSender) -> None:
        self._stats = stats
        self._device_tokens: dict[str, int] = {}

    def looked_up(self, request: Any, device_tokens: int) -> None:
        """The scheduler asked what can be loaded behind so many device tokens."""
        self._device_tokens[request.request_id] = device_tokens

    def admitted(self, request: Any, host_tokens: int) -> None:
        """Blocks are allocated, `host_tokens` will be loaded; reported once for each look-up."""
        device_tokens = self._device_tokens.pop(request.request_id, None)
        if device_tokens is None:
            return
        self._stats.send(
            {
                "kind": "admit",
                "request_id": request_id_of(request.sampling_params),
                "device_tokens": device_tokens,
                "host_tokens": host_tokens,
                "new_tokens": max(request.num_prompt_tokens - device_tokens - host_tokens, 1),
                "t_s": time.time(),
            }
        )

    def finished(self, request: Any) -> None:
        """A request ended, perhaps before it was admitted."""
        self._device_tokens.pop(request.request_id, None)
