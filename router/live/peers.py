"""What the other ingresses know: asked through Ray Serve, which can call all replicas at once.

Ray sends a client to any ingress, but decisions and counters are kept by the one that decided. So
who is asked for them asks all. One that does not answer in time costs its share of the answer, not
the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from ray import serve

log = structlog.get_logger(__name__)

_PATIENCE_S = 2.0

Own = Callable[..., Awaitable[Any]]


class Peers:
    """The ingresses of this application."""

    def __init__(self, replicas: int, method: str) -> None:
        """`replicas`: how many there are; `method`: of the ingress, which answers its peers."""
        self._replicas, self._method = replicas, method
        self._handle: Any = None

    async def ask(self, own: Own, what: str, *args: Any) -> list[Any]:
        """Everybody's answer, this ingress' among them; `own(what, *args)` is what it says alone.

        Only its own if the others could not be asked within two seconds.
        """
        if self._replicas > 1:
            try:
                return await self._ask_all(what, *args)
            except Exception as error:
                log.warning("peers_not_asked", error=repr(error), what=what)
        return [await own(what, *args)]

    async def _ask_all(self, what: str, *args: Any) -> list[Any]:
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        response = self._handle.broadcast(self._method, what, *args)
        answers = await response.results_async(timeout_s=_PATIENCE_S, return_exceptions=True)
        lost = [answer for answer in answers if isinstance(answer, BaseException)]
        if lost:
            log.warning("peers_silent", count=len(lost), error=repr(lost[0]), what=what)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not found:
            raise RuntimeError("no ingress answered")
        return found
