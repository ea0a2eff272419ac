"""Endpoints that show what the live router knows, of the decider and of `kappa route` alike.

With several deciders each knows its own decisions and counters: the one that gets a request
queries all of them (`Face.of_all`).
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kappa_router.api import errors, status
from kappa_router.api.app import Door
from kappa_router.api.request import inbound_of
from kappa_router.decision import NoWorkerError, RouteRequest
from kappa_router.live.live_router import LiveRouter


class Face:
    """Endpoints that both answer alike."""

    _live: LiveRouter
    _door: Door

    async def ready(self, request: Request) -> Response:
        """200 while a worker can be chosen, else 503."""
        count = self._live.choosable
        return JSONResponse({"workers": count}, status_code=200 if count else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics, of all deciders together."""
        answers = await self.of_all("metrics")
        text = answers[0]
        if len(answers) > 1:
            # It imports Ray, which `kappa route` does without.
            from kappa_router.live.deciders import merged

            text = merged(answers)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def tenants(self, request: Request) -> Response:
        """Every tenant with its weight, what it was charged, and its share of all charges."""
        charged = self._live.charges.totals()
        return JSONResponse({"tenants": status.shares(self._door.keyring.tenants, charged)})

    async def decisions(self, request: Request, limit: int = 100) -> Response:
        """The last decisions with their outcomes, newest last; of other tenants to operators.

        At most `status.MOST_DECISIONS` to others.
        """
        asker = inbound_of(request).tenant
        only = None if asker.operator else asker.name
        count = max(min(limit, sys.maxsize if asker.operator else status.MOST_DECISIONS), 0)
        answers = await self.of_all("decisions", only, count)
        records = sorted((r for one in answers for r in one), key=lambda record: record["time_s"])
        return JSONResponse({"decisions": records[-count:] if count else []})

    async def decision(self, request_id: str, request: Request) -> Response:
        """One request: its decision, its outcome, and where its time went; or 404."""
        asker = inbound_of(request).tenant
        for tenant, account in await self.of_all("decision", request_id):
            own = tenant is not None and (asker.operator or asker.name == tenant)
            if account is not None and own:
                return JSONResponse(account)
        raise errors.UNKNOWN_REQUEST(request_id=request_id[:80])

    def explained(self, routed: RouteRequest, request: Request) -> Response:
        """The decision that would be made; ApiError 503 if no worker can serve it."""
        live = self._live
        try:
            decision = live.explain(routed)
        except NoWorkerError as error:
            after_s = live.retry_after_s(routed.model)
            raise errors.NO_WORKER(why=error, retry_after_s=after_s) from None
        operator = inbound_of(request).tenant.operator
        return JSONResponse(status.explanation(decision, operator=operator))

    # -- what other deciders ask ---------------------------------------------------------------

    async def of_all(self, what: str, *args: Any) -> list[Any]:
        """Every decider's answer to `for_deciders`; here the only one's."""
        return [await self.for_deciders(what, *args)]

    async def for_deciders(self, what: str, *args: Any) -> Any:
        """This decider's own answer: its `metrics`, its last `decisions`, or one `decision`."""
        live = self._live
        match what:
            case "metrics":
                return status.exposition(live, self._door)
            case "decisions":
                return status.newest_decisions(live, *args)
            case "decision":
                return self._account(*args)
        raise ValueError(f"a decider asked for {what!r}, which this one does not know")

    def _account(self, request_id: str) -> tuple[str | None, dict[str, Any] | None]:
        """The tenant of a request and its outcome; None where they are not known."""
        record = self._live.records.get(request_id)
        return (None, None) if record is None else (record.tenant, record.to_dict())
