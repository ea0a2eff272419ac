"""Workers' own HTTP ports, as the decider itself asks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp

from kappa.protocol import TO_SECRET_HEADER


class PortAnswer(NamedTuple):
    """The answer of a worker's port."""

    status: int
    # By their names in lower case.
    headers: Mapping[str, str]
    body: bytes


class WorkerPorts:
    """The ports of a cluster's workers; make and close it on the event loop that asks."""

    def __init__(self, address: Callable[[str], str], secret: str) -> None:
        """`address`: HOST:PORT of a worker, empty if it has none; `secret`: what workers demand."""
        self._address = address
        self._http = aiohttp.ClientSession(headers={TO_SECRET_HEADER: secret})

    async def ask(
        self, worker: str, path: str, timeout_s: float, body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PortAnswer:  # fmt: skip
        """GET `path`, or POST `body` to it.

        Raises:
            TimeoutError: it was not answered in time.
            OSError: the worker has no port, or ended the connection.
        """
        at = self._address(worker)
        if not at:
            raise ConnectionError(f"{worker} has no port")
        asked = self._http.request(
            "GET" if body is None else "POST", f"http://{at}{path}", data=body, headers=headers,
            timeout=aiohttp.ClientTimeout(timeout_s),
        )  # fmt: skip
        try:
            async with asked as answer:
                found = {name.lower(): value for name, value in answer.headers.items()}
                return PortAnswer(answer.status, found, await answer.read())
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from None

    async def close(self) -> None:
        """Ask no more."""
        await self._http.close()
