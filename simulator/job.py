"""One request inside a simulated engine: the scheduler's view of it and the node's own."""

from __future__ import annotations

from scheduler.work import Work
from simulator.cache import Ids, Run


class Job(Work):
    """A request sent to a node; a retried request is a new job.

    key: the request's number in the traffic. prompt_tokens, output_tokens: its lengths. ids: its
    blocks, prompt and output; kept: how many of them an engine holds at the end. max_tokens: bound
    on its answer that its client gave, which is all that a rule may know. The rest is the node's:
    hashed blocks are in the device cache, private ones are held but not (yet) findable.
    """

    __slots__ = (
        "cached_tokens", "device_tokens", "finish_at", "first_s", "generated", "grow_at", "hashed",
        "host_path", "ids", "joined_at", "kept", "key", "output_tokens", "path", "private",
        "prompt_tokens", "stored",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        prompt_tokens: int,
        output_tokens: int,
        ids: Ids,
        kept: int,
        arrival_s: float,
        max_tokens: int | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> None:
        bound = output_tokens if max_tokens is None else max_tokens
        super().__init__(prompt_tokens, arrival_s, bound, tenant, priority)
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.ids = ids
        self.kept = kept
        self.path: Run | None = None
        self.host_path: Run | None = None
        self.hashed = 0
        self.private = 0
        self.stored = 0
        self.device_tokens = -1
        self.cached_tokens = 0
        self.first_s = -1.0
        # Tokens generated before the last preemption, and the step counts at which it joined the
        # decoding ones, will be done, and will need its next block.
        self.generated = 0
        self.joined_at = self.finish_at = self.grow_at = -1
