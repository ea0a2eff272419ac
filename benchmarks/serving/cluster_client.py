"""A cluster of ours as benches see it: completions by the load test's client, nodes, decisions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx

from loadtest.client import Endpoint, EndpointSettings, Prepared
from loadtest.journal import RequestRecord

__all__ = ["ClusterClient", "Prepared"]


class ClusterClient:
    """Use as an async context manager; times are those of `time.monotonic`."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._model = model
        self._endpoint = Endpoint(EndpointSettings(url, model, timeout_s=timeout_s), time.monotonic)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def __aenter__(self) -> ClusterClient:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._endpoint)
            await opened.enter_async_context(self._http)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    def prepare(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> Prepared:
        """A completion of exactly `max_tokens` tokens, encoded before it is due."""
        body = {
            "model": self._model, "prompt": list(prompt), "max_tokens": max_tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, **more,
        }  # fmt: skip
        return Prepared("/v1/completions", json.dumps(body, separators=(",", ":")).encode())

    async def send(self, prepared: Prepared, session: str = "", turn: int = 0) -> RequestRecord:
        """Send it and await its end; what goes wrong is the record's error."""
        record = RequestRecord(session, turn)
        await self._endpoint.send(prepared, record)
        return record

    async def nodes(self) -> list[dict[str, Any]]:
        """Every worker, from `GET /v1/nodes`.

        Raises:
            httpx.HTTPError: no answer, or another status than 200.
        """
        rows: list[dict[str, Any]] = (await self._get("/v1/nodes"))["nodes"]
        return rows

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, from `GET /v1/decisions`; raises as `nodes`."""
        rows: list[dict[str, Any]] = (await self._get(f"/v1/decisions?limit={limit}"))["decisions"]
        return rows

    async def _get(self, path: str) -> Any:
        return (await self._http.get(path)).raise_for_status().json()
