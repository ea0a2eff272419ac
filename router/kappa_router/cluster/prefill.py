"""A prompt computed by a prefill worker and handed over, before its request is decided.

A memory-bound prompt stays where its KV is: what would be computed elsewhere is little, and all of
its cached prefix would have to cross a network. A compute-bound one may go to a prefill worker if
its first token then comes sooner, the transfer of its KV included. It goes there first, for one
token, with a reservation of its own; the answer says where its KV can be taken, in vLLM's own
terms, and these go on with the request to the worker that decodes. If anything fails on the way,
that worker computes the prompt itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import structlog

from kappa import metrics as m
from kappa.protocol import RETRY_DIED, RETRY_HEADER, TO_BODY_HEADER, Announcement
from kappa.settings.engine import TransferSettings
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import routed_metadata, tenant_metadata
from kappa_router.api.request import ApiRequest
from kappa_router.cluster.ports import PortAnswer, WorkerPorts
from kappa_router.decision import NoWorkerError, PricedWorker, RouteRequest
from kappa_router.gateway.flights import check_blame
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import DIED, ENGINE_DIED
from kappa_router.live.waiting import WorkerLostError, unless_lost

log = structlog.get_logger(__name__)

# No client can send such an id.
PREFILL_SUFFIX = "+prefill"
_ROLE = "prefill"
# As vLLM's connectors ask for it; what they need beside comes back with the answer.
_TRANSFER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
# What a request for one token leaves out of a body, and what it says instead.
_MANY_TOKENS = {"max_completion_tokens", "min_tokens", "stream", "stream_options"}
_ONE_TOKEN = {"max_tokens": 1, "n": 1}


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
        tokens: how many tokens' KV would be handed over.
    """
    if here.bound == "memory" or here.counts.new_tokens < network.min_new_tokens:
        return False
    bytes_s = tokens * to.kv_bytes_per_token / network.net_bytes_per_s
    return there.ttft_s + to.node.dilation * (network.fixed_s + bytes_s) < here.ttft_s


@dataclass(frozen=True, slots=True)
class PrefillElsewhere:
    """Hands compute-bound prompts over, where there are prefill workers."""

    ports: WorkerPorts
    network: TransferSettings
    # To the end of a prefill.
    timeout_s: float

    async def __call__(
        self, live: LiveRouter, routed: RouteRequest, request: ApiRequest
    ) -> RouteRequest:
        """The request as it is to be decided; its body says where its KV is, if it was handed over.

        Raises:
            ApiError: the request may have killed a prefill worker, so that no other may have it.
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
            live.metrics.inc(m.PREFILLS, "kept" if here.bound == "compute" else "memory_bound")
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
            decision = live.route(prefills)
        except NoWorkerError:
            return None
        worker, request_id, end = decision.worker, decision.request_id, "client_gone"
        sent = tenant_metadata(live.records[request_id].sent_as, request.tenant)
        sent |= routed_metadata(decision, live.charges.elsewhere(worker))
        given = request.body.fields
        kept = {name: value for name, value in given.items() if name not in _MANY_TOKENS}
        body = replace(request.body, fields=kept | _ONE_TOKEN, kv_transfer_params=None)
        path = "/v1/chat/completions" if body.is_chat else "/v1/completions"
        sets = json.dumps({"vllm_xargs": sent, "kv_transfer_params": _TRANSFER})
        params, wait = None, live.members.waits.begin(worker)
        try:
            patience_s = request.patience_s(self.timeout_s)
            asking = self.ports.ask(worker, path, patience_s, body.json(), {TO_BODY_HEADER: sets})
            answer = await unless_lost(wait, asking)
            end = _end_of(answer)
            if end == "done":
                live.first_token(request_id)
                params = _params_in(answer.body)
            elif end == "worker_died":
                live.members.failed(worker, ENGINE_DIED)
        except ApiError:
            end = "deadline"  # It had passed before this was sent.
        except TimeoutError:
            end = "deadline" if request.expired else "timeout"
        except WorkerLostError:
            end = "worker_died"
        except OSError:
            end = "worker_died"
            live.members.failed(worker, DIED)
        finally:
            live.members.waits.end(worker, wait)
            live.release(request_id, end)
        if end != "done":
            log.warning("prefill_failed", request_id=request_id, worker=worker, end=end)
        if end == "worker_died":
            check_blame(live, worker, request.digest, request.request_id)
        return params


def _end_of(answer: PortAnswer) -> str:
    """The end of a prefill, as `LiveRouter.release` names it."""
    if answer.status < 500:
        return "done" if answer.status == 200 else "refused"
    return "worker_died" if answer.headers.get(RETRY_HEADER) == RETRY_DIED else "error"


def _params_in(body: bytes) -> dict[str, Any] | None:
    try:
        params = json.loads(body)["kv_transfer_params"]
    except (ValueError, KeyError, TypeError):
        return None
    return params if isinstance(params, dict) and params else None
