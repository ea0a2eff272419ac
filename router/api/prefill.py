"""A prompt computed by a prefill worker and handed over, before its request is decided.

A memory-bound prompt stays where its KV is: what would be computed elsewhere is little, and all of
its cached prefix would have to cross a network. A compute-bound one may go to a prefill worker if
its first token then comes sooner, the transfer of its KV included. It goes there first, for one
token, with a reservation of its own; the answer says where its KV can be taken, in vLLM's own
terms, and these go on with the request to the worker that decodes. If anything fails on the way,
that worker computes the prompt itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from kappa import metrics as m
from kappa.protocol import Announcement
from kappa.settings.engine import TransferSettings
from router.api.deliver import Call
from router.api.errors import ApiError
from router.api.failures import may_pass_on, worker_failed
from router.api.metadata import routed_metadata, tenant_metadata, worker_headers
from router.api.request import ApiRequest
from router.decision import (
    COMPUTE,
    Decision,
    NoWorkerError,
    OverloadedError,
    PricedWorker,
    RouteRequest,
)
from router.live.live_router import LiveRouter

log = structlog.get_logger(__name__)

PREFILL_SUFFIX = "-prefill"
_ROLE = "prefill"
# As vLLM's connectors ask for it; what they need beside comes back with the answer.
_TRANSFER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_ONE_TOKEN = {
    "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "stream": False,
    "stream_options": None, "n": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between prefill and decode workers, as the settings say; seconds are emulated ones
    on paced workers."""

    bytes_per_s: float
    fixed_s: float
    min_new_tokens: int

    def seconds(self, tokens: int, to: Announcement) -> float:
        """Real seconds to hand over so many tokens' KV to that worker."""
        bytes_s = tokens * to.kv_bytes_per_token / self.bytes_per_s
        return to.node.dilation * (self.fixed_s + bytes_s)

    def hands_over(self, here: PricedWorker, there: PricedWorker, transfer_s: float) -> bool:
        """Whether `there` should compute the prompt and hand it to `here`.

        Args:
            here: the best worker that decodes, as if it computed the prompt itself.
            there: the best prefill worker.
            transfer_s: seconds to hand the prompt's KV over.
        """
        if here.bound != COMPUTE or here.counts.new_tokens < self.min_new_tokens:
            return False
        return there.ttft_s + transfer_s < here.ttft_s


def prefill_only(workers: Iterable[Announcement]) -> frozenset[str]:
    """Workers that compute prompts for others and never decode."""
    return frozenset(one.worker for one in workers if one.role == _ROLE)


class PrefillElsewhere:
    """Hands compute-bound prompts over, where there are prefill workers."""

    def __init__(self, call: Call, settings: TransferSettings, timeout_s: float) -> None:
        """`timeout_s`: to the end of a prefill."""
        self._call, self._timeout_s = call, timeout_s
        self._network = Network(settings.net_bytes_per_s, settings.fixed_s, settings.min_new_tokens)

    async def __call__(
        self, live: LiveRouter, routed: RouteRequest, request: ApiRequest
    ) -> RouteRequest:
        """The request as it is to be decided; its body says where its KV is, if it was handed over.

        Raises:
            ApiError: a prefill worker died of it, or may have, so that nobody else may have it.
                Whatever else fails here is only logged and counted.
        """
        workers = [state.announcement for state in live.router.workers.values()]
        prefill = prefill_only(workers)
        if not prefill:
            return routed
        decoding = frozenset(one.worker for one in workers) - prefill
        decodes = replace(routed, exclude=routed.exclude | prefill)
        prefills = replace(
            routed,
            request_id=f"{routed.request_id}{PREFILL_SUFFIX}",
            exclude=routed.exclude | decoding,
            max_tokens=1,
        )
        if not self._worth_it(live, decodes, prefills):
            return decodes
        params = await self._prefill(live, prefills, request)
        live.metrics.inc(m.PREFILLS, "handed_over" if params else "failed")
        if not params:
            return decodes
        request.body.kv_transfer_params = params
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
        if self._network.hands_over(here.chosen, there.chosen, transfer_s):
            return True
        kept = "kept" if here.chosen.bound == COMPUTE else "memory_bound"
        live.metrics.inc(m.PREFILLS, kept)
        return False

    async def _prefill(
        self, live: LiveRouter, prefills: RouteRequest, request: ApiRequest
    ) -> dict[str, Any] | None:
        """Have the prompt computed; where its KV can be taken, None if that failed."""
        try:
            decision = live.route(prefills, request.tenant.name)
        except (NoWorkerError, OverloadedError):
            return None
        headers = worker_headers(request.headers, decision.worker, None)
        stream = self._call(_one_token(live, decision, request), request.method, headers)
        wait = live.members.waits.begin(decision.worker)
        end = "error"
        try:
            first = await wait.next(stream, request.patience_s(self._timeout_s))
            item = first[0] if isinstance(first, list) and first else first
            params = getattr(item, "kv_transfer_params", None)
            end = "done" if hasattr(item, "choices") else "refused"
            return dict(params) if params else None
        except asyncio.CancelledError:
            end = "client_gone"
            raise
        except Exception as error:
            end = _end_of(error, request)
            log.warning(
                "prefill_failed", request_id=decision.request_id, worker=decision.worker,
                error=type(error).__name__,
            )  # fmt: skip
            live.members.failed(decision.worker, worker_failed(error).why)
            if end == "worker_died":
                may_pass_on(live, request, decision.worker)
            return None
        finally:
            if end == "done":
                live.first_token(decision.request_id)
            live.release(decision.request_id, end)
            live.members.waits.end(decision.worker, wait)
            request.attempt_over(end)
            await stream.aclose()


def _one_token(live: LiveRouter, decision: Decision, request: ApiRequest) -> Any:
    """A copy of a request's body that asks for one token, and where the prompt's KV is."""
    changes = {name: value for name, value in _ONE_TOKEN.items() if hasattr(request.body, name)}
    sent = tenant_metadata(live.records[decision.request_id].sent_as, request.tenant)
    sent |= routed_metadata(decision, live.charges.elsewhere(decision.worker))
    return request.body.model_copy(
        update={**changes, "kv_transfer_params": dict(_TRANSFER), "vllm_xargs": sent}
    )


def _end_of(error: Exception, request: ApiRequest) -> str:
    """How a prefill that failed ended; if time ran out, that says nothing of its worker."""
    if isinstance(error, ApiError | TimeoutError):
        return "deadline" if request.expired else "timeout"
    return worker_failed(error).end
