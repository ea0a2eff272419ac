"""Counts the tokens that leave the queue that vLLM's front end has for a request between its engine
and the task that waits for it. Outputs that are not taken in time are merged, so they cannot be
counted behind it. Private names of vLLM: tests/workers/test_contracts.py."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

from kappa_workers import generated


class CountingCollector(RequestOutputCollector):
    """vLLM's, which adds to the tally of its request (`kappa_workers.generated`)."""

    def __init__(self, output_kind: Any, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._tally = generated.current()

    async def get(self) -> Any:
        return self._counted(await super().get())

    def get_nowait(self) -> Any:
        return self._counted(super().get_nowait())

    def _counted(self, output: Any) -> Any:
        answers = getattr(output, "outputs", None)
        if self._tally is not None and isinstance(answers, list):  # an embedding has none
            self._tally.tokens += sum(len(answer.token_ids) for answer in answers)
        return output


def install() -> None:
    """Have vLLM's front ends of this process use it from now on."""
    async_llm.RequestOutputCollector = CountingCollector
