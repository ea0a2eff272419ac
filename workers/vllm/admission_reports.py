"""A connector's answers about requests: how much of a hit to load, and what each one took at last.
Used by all our connectors: once the scheduler has allocated a request, its split into device, host
and new tokens is known for good; vLLM names the device hit only when it asks for the host's."""

from __future__ import annotations

import time
from typing import Any

import structlog

from workers.request_metadata import plan_of, request_id_of
from workers.stats_channel import StatsSender
from workers.vllm.tail_recompute import TailRecompute

log = structlog.get_logger(__name__)


def ignore_malformed_params(request: Any) -> None:
    """Drop a new request's `kv_transfer_params` unless they are a mapping: connectors take them for
    one in the engine's loop, where an exception ends the engine. Without them KV is computed."""
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
    """Remembers device hits until their requests are admitted, then reports each once to `stats`.
    tail: how much of a hit to load."""

    def __init__(self, stats: StatsSender, tail: TailRecompute) -> None:
        self._stats, self._tail = stats, tail
        self._device_tokens: dict[str, int] = {}

    def loaded_tokens(self, request: Any, device_tokens: int, hit: int) -> int:
        """The scheduler asked what to load behind so many device tokens: of `hit` tokens, how
        many."""
        self._device_tokens[request.request_id] = device_tokens
        if not hit:
            return 0
        new = request.num_tokens - device_tokens - hit
        return self._tail.loaded_tokens(device_tokens, hit, new, plan_of(request.sampling_params))

    def admitted(self, request: Any, host_tokens: int, disk_tokens: int = 0) -> int:
        """Blocks are allocated, `host_tokens` will be loaded, of which so many come from disk;
        reported once for each look-up, with the tokens that were on the device, which it returns.
        """
        device_tokens = self._device_tokens.pop(request.request_id, None)
        if device_tokens is None:
            return 0
        self._stats.send(
            {
                "kind": "admit",
                "request_id": request_id_of(request.sampling_params),
                "device_tokens": device_tokens,
                "host_tokens": host_tokens,
                "disk_tokens": disk_tokens,
                "new_tokens": max(request.num_prompt_tokens - device_tokens - host_tokens, 1),
                "t_s": time.time(),
            }
        )
        return device_tokens

    def finished(self, request: Any) -> None:
        """A request ended, perhaps before it was admitted."""
        self._device_tokens.pop(request.request_id, None)
