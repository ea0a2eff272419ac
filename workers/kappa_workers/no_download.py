"""Tells Ray Serve LLM that there is nothing to download: the task that it starts per replica to
fetch a model imports the whole stack, for seconds and some 700 MB."""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase


class NoDownload(CallbackBase):
    """Skips Ray's node initialisation."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
