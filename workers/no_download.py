"""Tells Ray Serve LLM that there is nothing to download.

Ray starts a task per replica that imports the whole stack to fetch a model; ours is on disk, or
vLLM fetches it itself. Leaving the task out saves seconds and some 700 MB per replica.
"""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase


class NoDownload(CallbackBase):
    """Skips Ray's node initialisation."""

    async def on_before_node_init(self) -> None:
        """Called by Ray before it would prepare the node."""
        self.ctx.run_init_node = False
