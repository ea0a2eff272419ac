"""Whether a request fits at all: its context, and its KV cache on a worker's device.

What can never fit is refused before it is queued: a scheduler that packs by VRAM promises that
every request is served only for those that do. Pure; called by the ingress.
"""

from __future__ import annotations

from collections.abc import Iterable

from kappa.protocol import Announcement
from router.errors import context_too_long, footprint_too_large


def unfit_workers(
    workers: Iterable[Announcement], prompt_tokens: int, max_tokens: int
) -> frozenset[str]:
    """Workers that could never hold the prompt and `max_tokens` more (at least one).

    Raises:
        ApiError: 400 with what it needs and what there is, if that is all of them.
    """
    said = list(workers)
    unfit = frozenset(s.worker for s in said if not _fits(s, prompt_tokens, max_tokens))
    if said and len(unfit) == len(said):
        context = max(s.max_context_tokens for s in said)
        wanted = max(max_tokens, 0)
        if prompt_tokens + max(wanted, 1) > context:
            raise context_too_long(prompt_tokens, wanted, context)
        largest = max(said, key=lambda s: _usable_blocks(s) * s.block_tokens)
        raise footprint_too_large(
            prompt_tokens, wanted, _blocks(largest, prompt_tokens, wanted), _usable_blocks(largest)
        )
    return unfit


def _fits(said: Announcement, prompt_tokens: int, max_tokens: int) -> bool:
    in_context = prompt_tokens + max(max_tokens, 1) <= said.max_context_tokens
    return in_context and _blocks(said, prompt_tokens, max_tokens) <= _usable_blocks(said)


def _blocks(said: Announcement, prompt_tokens: int, max_tokens: int) -> int:
    return -(-(prompt_tokens + max(max_tokens, 1)) // said.block_tokens)


def _usable_blocks(said: Announcement) -> int:
    # vLLM keeps one block that it never gives away.
    return said.device_blocks - 1
