"""A prompt that is written to a server, evicted from its device by others and sent again: what
`kappa doctor --evict` goes by. `kappa_deploy.checks.tiers` judges it."""

from __future__ import annotations

import random
from collections.abc import Callable

import httpx

from kappa_deploy.checks.facts import ReadBack
from kappa_router.front.facts import load_in, usage_in

# Of the device's tokens: the prompt's share, and what is sent to evict it.
_PROMPT_SHARE, _EVICTING = 1 / 8, 1.25
_LONGEST_TOKENS = 2048
# More than these are not sent to a server.
_MOST_TOKENS = 4_000_000
# A word of four random digits takes two tokens or more.
_TOKENS_PER_WORD = 2


def read_back(
    client: httpx.Client, model: str, device_tokens: int, clock: Callable[[], float]
) -> ReadBack:
    """Try one server: `client` is at its root, `clock` in seconds. It serves others meanwhile, and
    what they had on its device is evicted, too."""
    if not 0 < device_tokens * _EVICTING <= _MOST_TOKENS:
        return ReadBack(fault=f"a device of {device_tokens} tokens is not filled")
    length = int(min(device_tokens * _PROMPT_SHARE, _LONGEST_TOKENS))

    def send(text: str) -> tuple[float, int | None, int]:
        began_s = clock()
        body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/completions", json=body).raise_for_status()
        usage = usage_in(answer.content)
        if usage is None or not usage.prompt_tokens:
            raise ValueError("its answers have no usage")
        return clock() - began_s, usage.cached_tokens, usage.prompt_tokens

    def loads() -> int | None:
        answer = client.get("/metrics")
        return load_in(answer.text).loads if "kv_offload_load_size_count" in answer.text else None

    try:
        text = _words(length)
        new_s, new, tokens = send(text)
        device_s, device, _ = send(text)
        left = device_tokens * _EVICTING
        while left > 0:
            left -= send(_words(length))[2]
        before = loads()
        evicted_s, evicted, _ = send(text)
        after = loads()
    except (httpx.HTTPError, ValueError) as error:
        return ReadBack(fault=f"a prompt could not be sent: {error!r}"[:300])
    counted = None if before is None or after is None else after - before
    return ReadBack(
        tokens, (new_s, new), (device_s, device), (evicted_s, evicted), counted
    )  # fmt: skip


def _words(tokens: int) -> str:
    count = max(tokens // _TOKENS_PER_WORD, 8)
    return " ".join(f"{random.randrange(10_000):04}" for _ in range(count))
