"""Ray Serve LLM's engine protocol, as far as both of our engines answer it alike.

An engine of ours generates text and nothing else: what else the protocol asks is refused by name.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.llm._internal.serve.core.engine.protocol import LLMEngine

from workers.profiler import measure


class OwnEngine(LLMEngine):
    """What `LLMServer` drives. A subclass says what it is called and how one body is answered."""

    CALLED: ClassVar[str]
    """The engine in a sentence: "the emulated engine"."""

    @abstractmethod
    def answer(self, body: Any, kind: str) -> AsyncGenerator[Any, None]:
        """Answer one body, streamed or whole; `kind` is ``chat`` or ``completions``."""

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A chat completion, streamed or whole."""
        async for item in self.answer(request, "chat"):
            yield item

    async def completions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """A completion, streamed or whole."""
        async for item in self.answer(request, "completions"):
            yield item

    async def embeddings(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Refused: text is all there is."""
        yield error_answer(400, f"{self._called_first} has no embeddings.")

    async def transcriptions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Refused: text is all there is."""
        yield error_answer(400, f"{self._called_first} has no transcriptions.")

    async def resolve_lora(self, lora_model: Any) -> None:
        """There are no adapters."""
        raise ValueError(f"{self.CALLED} serves no LoRA adapters")

    def routing_stats(self) -> dict[str, Any]:
        """Nothing of Ray's own; the announcement is added by the replica."""
        return {}

    async def reset_prefix_cache(self) -> None:
        """Nothing asks for it here."""
        raise NotImplementedError(f"{self.CALLED} keeps its caches")

    async def collective_rpc(self, method: str, *_: Any, args: Any = (), **__: Any) -> list[Any]:
        """`kappa_profile` measures this process, for real; there is no other method."""
        if method != "kappa_profile":
            raise ValueError(f"{self.CALLED} has no method {method!r}")
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(None, measure, *args)]

    @property
    def _called_first(self) -> str:
        return self.CALLED[0].upper() + self.CALLED[1:]


def error_answer(status: int, message: str, param: str | None = None) -> ErrorResponse:
    """What `LLMServer` takes instead of an answer."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=status))
