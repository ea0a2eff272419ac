"""Ray Serve's handles of the pools that serve the model: a request goes to its worker's pool.

Ray's own ingress knows one deployment for each model; ours has one for each pool, and decides over
all of them. Ray's names that are needed to call a deployment as its ingress does stand here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.llm.openai_api_models import ChatCompletionRequest


class PoolHandles:
    """Handles by pool, in the cluster file's order."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """`handles`: Serve's, by pool.

        Raises:
            ValueError: there is none.
        """
        if not handles:
            raise ValueError("no pool was bound to the ingress")
        self._handles = dict(handles)
        # Every configured copy of a handle is one more long poll: each pool has one for streams.
        self._streaming: dict[str, Any] = {}

    def all(self) -> list[Any]:
        return list(self._handles.values())

    def of(self, pool: str) -> Any:
        """A pool's handle; that of any if the pool is not known (its worker has just left)."""
        return self._handles.get(pool) or self.all()[0]

    async def stream(
        self, pool: str, body: Any, method: str, headers: dict[str, str]
    ) -> AsyncGenerator[Any, None]:
        """What a worker of the pool answers to `method`; the pin in `headers` says which one.

        Closed before its end, the worker is stopped: Ray does so by itself only while
        somebody waits for an item, not between two of them.
        """
        known = pool if pool in self._handles else next(iter(self._handles))
        if known not in self._streaming:
            self._streaming[known] = self._handles[known].options(stream=True)
        if isinstance(body, ChatCompletionRequest):
            body = _sanitize_chat_completion_request(body)
        info = RawRequestInfo(headers=headers)
        answer = getattr(self._streaming[known], method).remote(body, info)
        ended = False
        try:
            async for item in answer:
                yield item
            ended = True
        finally:
            if not ended:
                answer.cancel()
