"""A prompt computed by a prefill worker and handed over, before its request is decided.

If that is worth it, the request goes there first, for one token, with a reservation of its own; the
answer says where its KV can be taken, in vLLM's own words, and these go on with the request to the
worker that decodes. If anything fails on the way, that worker computes the prompt itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import structlog
from fastapi import Request

from kappa import metrics as m
from kappa.settings.engine import TransferSettings
from router.decision import COMPUTE, Candidate, NoWorkerError, OverloadedError, RouteRequest
from router.errors import ApiError
from router.ingress.app import tenant_of
from router.ingress.failures import may_pass_on, worker_failed
from router.ingress.messages import engine_marks, mark, pinned
from router.ingress.roles import Network, hands_over, prefill_only
from router.ingress.terms import Terms, terms_of
from router.live.live_router import LiveRouter

log = structlog.get_logger(__name__)

PREFILL_SUFFIX = "-prefill"
# As vLLM's connectors ask for it; what they need beside comes back with the answer.
_ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_ONE_TOKEN = {
    "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "stream": False,
    "stream_options": None, "n": 1,
}  # fmt: skip

Call = Callable[[Any, str, Request], AsyncGenerator[Any, None]]


class PrefillElsewhere:
    """Hands compute-bound prompts over, where there are prefill workers."""

    def __init__(self, call: Call, settings: TransferSettings, timeout_s: float) -> None:
        """`call`: Ray's delivery; `timeout_s`: to the end of a prefill."""
        self._call, self._timeout_s = call, timeout_s
        self._network = Network(settings.net_bytes_per_s, settings.fixed_s, settings.min_new_tokens)

    async def __call__(
        self, live: LiveRouter, routed: RouteRequest, body: Any, method: str, request: Request
    ) -> RouteRequest:
        """The request as it is to be decided; `body` says where its KV is, if it was handed over.

        Raises:
            ApiError: a prefill worker died of it, or may have, so that nobody else may have it.
                Whatever else fails here is only logged and counted.
        """
        said = [state.announcement for state in live.router.workers.values()]
        prefill = prefill_only(said)
        if not prefill:
            return routed
        others = frozenset(one.worker for one in said) - prefill
        decodes = replace(routed, exclude=routed.exclude | prefill)
        prefills = replace(
            routed,
            request_id=f"{routed.request_id}{PREFILL_SUFFIX}",
            exclude=routed.exclude | others,
            max_tokens=1,
        )
        if not self._worth_it(live, decodes, prefills):
            return decodes
        params = await self._prefill(live, prefills, body, method, request)
        live.metrics.inc(m.PREFILLS, "handed_over" if params else "failed")
        if not params:
            return decodes
        body.kv_transfer_params = params
        return replace(decodes, handed_tokens=routed.tokens)

    def _worth_it(self, live: LiveRouter, decodes: RouteRequest, prefills: RouteRequest) -> bool:
        if not decodes.informed:
            return False
        try:
            here, there = live.explain(decodes), live.explain(prefills)
        except NoWorkerError:
            return False
        to = live.router.workers[here.worker].announcement
        transfer_s = self._network.seconds(decodes.tokens, to)
        if hands_over(here.chosen, there.chosen, transfer_s, self._network):
            return True
        live.metrics.inc(m.PREFILLS, _why_kept(here.chosen))
        return False

    async def _prefill(
        self, live: LiveRouter, prefills: RouteRequest, body: Any, method: str, request: Request
    ) -> dict[str, Any] | None:
        """Have the prompt computed; where its KV can be taken, None if that failed."""
        tenant = tenant_of(request)
        try:
            decision = live.route(prefills, tenant.name)
        except (NoWorkerError, OverloadedError):
            return None
        told = {name: value for name, value in _ONE_TOKEN.items() if hasattr(body, name)}
        asked = body.model_copy(update={**told, "kv_transfer_params": dict(_ASKED)})
        sent_as = live.records[prefills.request_id].sent_as
        elsewhere = live.charges.elsewhere(decision.worker)
        mark(asked, engine_marks(sent_as, decision, tenant, elsewhere))
        stream = self._call(asked, method, pinned(request, decision.worker))
        wait, terms = live.members.waits.begin(decision.worker), terms_of(request)
        end = "error"
        try:
            first = await wait.next(stream, terms.patience_s(self._timeout_s))
            item = first[0] if isinstance(first, list) and first else first
            params = getattr(item, "kv_transfer_params", None)
            end = "done" if hasattr(item, "choices") else "refused"
            return dict(params) if params else None
        except asyncio.CancelledError:
            end = "client_gone"
            raise
        except Exception as error:
            end = _end_of(error, terms)
            log.warning(
                "prefill_failed", request_id=prefills.request_id, worker=decision.worker,
                error=type(error).__name__,
            )  # fmt: skip
            failure = worker_failed(error)
            live.members.failed(decision.worker, failure.why)
            if end == "worker_died":
                name = prefills.request_id.removesuffix(PREFILL_SUFFIX)
                may_pass_on(live, request, method, name, decision.worker)
            return None
        finally:
            if end == "done":
                live.first_token(prefills.request_id)
            live.release(prefills.request_id, end)
            live.members.waits.end(decision.worker, wait)
            terms.over(end)
            await stream.aclose()


def _end_of(error: Exception, terms: Terms) -> str:
    """How a prefill that failed ended; if time ran out, that says nothing of its worker."""
    if isinstance(error, ApiError | TimeoutError):
        return "deadline" if terms.expired else "timeout"
    return worker_failed(error).end


def _why_kept(here: Candidate) -> str:
    return "kept" if here.bound == COMPUTE else "memory_bound"
