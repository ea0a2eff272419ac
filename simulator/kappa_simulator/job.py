"""A request inside a simulated engine: the scheduler's `Work`, and what its node knows of it."""

from __future__ import annotations

from kappa_scheduler.work import Work
from kappa_simulator.cache import Ids, PrefixRun


class SimulatedJob(Work):
    """A request sent to a node; a retried request is a new job.

    Args:
        key: the request's number in the traffic.
        prompt_tokens, output_tokens: its lengths.
        ids: its blocks, prompt and output, as an engine holds them at the end.
        max_tokens: the bound on its answer that its client gave, which is all that a rule may know.
    """

    def __init__(
        self,
        key: int,
        prompt_tokens: int,
        output_tokens: int,
        ids: Ids,
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
        # Where its prefix is pinned in the device cache, the host tier and on disk.
        self.path: PrefixRun | None = None
        self.host_path: PrefixRun | None = None
        self.disk_path: PrefixRun | None = None
        # Of its load, blocks that are on disk alone.
        self.disk_blocks = 0
        # Blocks in the device cache; and those that it holds and others cannot find, or not yet.
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
