"""A prompt computed by a prefill worker and handed over, before its request is decided.

A memory-bound prompt stays where its KV is: what would be computed elsewhere is little, and all of
its cached prefix would have to cross a network. A compute-bound one may go to a prefill worker if
its first token then comes sooner, the transfer of its KV included. It goes there first, for one
token, with a reservation of its own; the answer says where its KV can be taken, in vLLM's own
terms, and these go on with the request to the worker that decodes. If anything fails on the way,
that worker computes the prompt itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog

from kappa import metrics as m
from kappa.protocol import Announcement
from kappa.settings.engine import TransferSettings
from router.api.deliver import Attempt, Call, WorkerFailed, may_pass_on
from router.api.metadata import routed_metadata, tenant_metadata
from router.api.request import ApiRequest
from router.decision import COMPUTE, NoWorkerError, PricedWorker, RouteRequest
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


def hands_over(
    network: TransferSettings,
    here: PricedWorker,
    there: PricedWorker,
    to: Announcement,
    tokens: int,
) -> bool:
    """Whether a prefill worker should compute a prompt and hand it over.

    Args:
        network: what lies between the two; its seconds are emulated ones on paced workers.
        here: the best worker that decodes, as if it computed the prompt itself.
        there: the best prefill worker.
        to: the announcement of `here`.
        tokens: whose KV would be handed over.
    """
    if here.bound != COMPUTE or here.counts.new_tokens < network.min_new_tokens:
        return False
    bytes_s = tokens * to.kv_bytes_per_token / network.net_bytes_per_s
    return there.ttft_s + to.node.dilation * (network.fixed_s + bytes_s) < here.ttft_s


@dataclass(frozen=True, slots=True)
class PrefillElsewhere:
    """Hands compute-bound prompts over, where there are prefill workers; `timeout_s`: to the end of
    a prefill."""

    call: Call
    network: TransferSettings
    timeout_s: float

    async def __call__(
        self, live: LiveRouter, routed: RouteRequest, request: ApiRequest
    ) -> RouteRequest:
        """The request as it is to be decided; its body says where its KV is, if it was handed over.

        Raises:
            ApiError: a prefill worker died of it, or may have, so that nobody else may have it.
                Whatever else fails here is only logged and counted.
        """
        workers = {name: state.announcement for name, state in live.router.workers.items()}
        prefill = frozenset(name for name, one in workers.items() if one.role == _ROLE)
        if not prefill:
            return routed
        decodes = replace(routed, exclude=routed.exclude | prefill)
        prefills = replace(
            routed, request_id=f"{routed.request_id}{PREFILL_SUFFIX}", max_tokens=1,
            exclude=routed.exclude | (workers.keys() - prefill),
        )  # fmt: skip
        if not routed.informed:
            return decodes
        try:
            here, there = live.explain(decodes).chosen, live.explain(prefills).chosen
        except NoWorkerError:
            return decodes
        if not hands_over(self.network, here, there, workers[here.worker], routed.tokens):
            live.metrics.inc(m.PREFILLS, "kept" if here.bound == COMPUTE else "memory_bound")
            return decodes
        params = await self._prefill(live, prefills, request)
        live.metrics.inc(m.PREFILLS, "handed_over" if params else "failed")
        if not params:
            return decodes
        request.body.kv_transfer_params = params
        return replace(decodes, handed_tokens=routed.tokens)

    async def _prefill(
        self, live: LiveRouter, prefills: RouteRequest, request: ApiRequest
    ) -> dict[str, Any] | None:
        """Have the prompt computed; where its KV can be taken, None if that failed."""
        try:
            decision = live.route(prefills, request.tenant.name)
        except NoWorkerError:
            return None
        sent = tenant_metadata(live.records[decision.request_id].sent_as, request.tenant)
        sent |= routed_metadata(decision, live.charges.elsewhere(decision.worker))
        changes = {name: one for name, one in _ONE_TOKEN.items() if hasattr(request.body, name)}
        body = request.body.model_copy(
            update={**changes, "kv_transfer_params": dict(_TRANSFER), "vllm_xargs": sent}
        )
        attempt = Attempt.begin(self.call, live, decision, request, body)
        try:
            item = await attempt.first(self.timeout_s)
        except BaseException as error:
            raised = await attempt.failed(error, self.timeout_s)
            if not isinstance(error, Exception):
                raise
            log.warning(
                "prefill_failed", request_id=decision.request_id, worker=decision.worker,
                error=type(error).__name__,
            )  # fmt: skip
            if isinstance(raised, WorkerFailed) and raised.end == "worker_died":
                may_pass_on(live, request, decision.worker)
            return None
        if not hasattr(item, "choices"):
            await attempt.over("refused")
            return None
        live.first_token(decision.request_id)
        await attempt.over("done")
        params = getattr(item, "kv_transfer_params", None)
        return dict(params) if params else None
